"""Devices: what the datasheet promises and what real kernels reach, one YAML file per device.

A profile separates three kinds of figures. Spec peaks are dense (never 2:4 sparse) and count a fused multiply-add as 2
FLOP. `achieved` has the measured fractions of the peaks that typical large kernels reach; without a measurement
power.py estimates them. `check` computes each peak in a second way (SMs x FLOP per clock x clock, bus width x pin
rate), and the tests compare both.

The YAML keys are the fields of `Hardware`; the name of a device is the stem of its file. `Hardware` validates its own
fields, so the same rules hold for a file, for `extends:` and for `Hardware.replace`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from flopmeter.device import power
from flopmeter.device.files import SUFFIXES, names_in, read_record, resolve, unreadable
from flopmeter.device.profile_parts import (
    Achieved,
    DtypeRates,
    Host,
    Interconnect,
    Pcie,
    SpecCheck,
    amount,
    capability,
    count,
    matrix_rates,
    vector_rates,
)
from flopmeter.device.schema import (
    FrozenMapping,
    HardwareError,
    SchemaRecord,
    at,
    build,
    by,
    mapping_of,
    merge,
    plain,
    record,
    text,
    true_or_false,
    tuple_of,
    whole_number,
)
from flopmeter.device.unit_shares import matrix_unit, vector_unit
from flopmeter.records.dtypes import DTYPES, MATRIX_DTYPES, opmath_of

__all__ = ["Hardware", "HardwareError", "Host", "Peak", "available_hardware", "load_hardware"]

_PACKAGED = Path(__file__).parents[1] / "profiles"  # where the wheel puts hardware/
PROFILES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "hardware"

Unit = Literal["matrix", "emulated", "vector"]
_MATRIX_TABLES = ("matrix_tflop_per_s", "matrix_fp16_accumulate_tflop_per_s", "emulated_tflop_per_s")

# A virtual function (SR-IOV): the name under which a guest of a hypervisor sees a whole AMD GPU.
_VIRTUAL = " VF"


def _sources(value: object) -> FrozenMapping[str]:
    names = ("default", *(entry.name for entry in fields(Hardware)))
    parsed = mapping_of(text, names)(value)
    if "default" not in parsed:
        raise HardwareError("this field is missing", field="default")
    return parsed


@dataclass(frozen=True, slots=True)
class Peak:
    """The rate of one unit in one dtype: by the datasheet, and the fractions of it that typical large kernels reach, in
    a long run under the power limit (`achieved`) and at the boost clock (`burst`).

    An emulated rate is already one that torch reaches, so its fraction is 1.
    """

    flop_per_s: float
    unit: Unit
    achieved: float
    burst: float
    picojoules_per_flop: float | None  # at boost voltage; None where the power limit is unknown

    @property
    def sustained_flop_per_s(self) -> float:
        """The rate of a large, well-shaped kernel."""
        return self.flop_per_s * self.achieved


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(SchemaRecord):
    """One device as torch sees it. The fields are the YAML keys, in the units that datasheets print.

    Rates are dense, in TFLOP/s (TOP/s for integers), a fused multiply-add counted as 2:

    vector_tflop_per_s: the general-purpose (CUDA-core, SIMD) units.
    matrix_tflop_per_s: the matrix unit, accumulating as torch does (fp32 for the floating types).
    matrix_fp16_accumulate_tflop_per_s: only where accumulating in fp16 is faster (GeForce);
        torch does so under `torch.backends.cuda.matmul.allow_fp16_accumulation`.
    emulated_tflop_per_s: matrix products in types that have no unit of their own, at the rate that torch reaches.

    memory_gb: SI gigabytes of what torch reports as `total_memory`: of an `80 GB` card 85, since it has 80 binary ones,
        less 1 % for the driver.
    l2_cache_mb: as vendors print it, which for caches means 2**20 bytes; on a CPU the last-level cache.
    l2_bandwidth_gb_per_s: of that cache, reached by a copy; only the times of CPUs use it.
    power_limit_w: what an operator allows (nvidia-smi -pl), if it is not the board power `tdp_w`.
    host_link: the link for copies from and to the host, if it is not PCIe (NVLink-C2C).
    is_cpu: the host runs the kernels itself: the time to dispatch an op and its work add up, nothing overlaps.
    systolic_array: rows of multiply-adds, and columns, of the array in which a device without SMs runs its products.
    kernel_floor_us: time of the smallest kernel, if kernels follow each other without a pause.
    host: the CPU that launches the kernels.
    sources: where the figures come from; `default` covers each field without a source of its own.
    unverified: fields, or `field.key`, that were not found in any source.

    base: the shipped profile that this one extends, which decides its default cluster; `extends:` sets it.

    None means that a figure is unknown or makes no sense on the device.
    """

    name: str = field(metadata=by(text))
    title: str = field(metadata=by(text))
    vendor: str = field(metadata=by(text))
    year: int = field(metadata=by(whole_number(1980, 2100)))
    architecture: str = field(metadata=by(text))
    aliases: tuple[str, ...] = field(default=(), metadata=by(tuple_of(text)))
    base: str | None = field(default=None, metadata=by(text))
    compute_capability: tuple[int, int] | None = field(default=None, metadata=by(capability))
    is_cpu: bool = field(default=False, metadata=by(true_or_false))
    systolic_array: int | None = field(default=None, metadata=by(count))
    sm_count: int = field(metadata=by(count))
    boost_clock_mhz: float | None = field(default=None, metadata=by(amount))

    vector_tflop_per_s: DtypeRates = field(metadata=by(vector_rates))
    matrix_tflop_per_s: DtypeRates = field(default_factory=FrozenMapping, metadata=by(matrix_rates))
    matrix_fp16_accumulate_tflop_per_s: DtypeRates = field(default_factory=FrozenMapping, metadata=by(matrix_rates))
    emulated_tflop_per_s: DtypeRates = field(default_factory=FrozenMapping, metadata=by(matrix_rates))

    memory_gb: float | None = field(default=None, metadata=by(amount))
    memory_type: str = field(metadata=by(text))
    memory_bandwidth_gb_per_s: float = field(metadata=by(amount))
    l2_cache_mb: float | None = field(default=None, metadata=by(amount))
    l2_bandwidth_gb_per_s: float | None = field(default=None, metadata=by(amount))
    tdp_w: float | None = field(default=None, metadata=by(amount))
    power_limit_w: float | None = field(default=None, metadata=by(amount))
    interconnect: Interconnect | None = field(default=None, metadata=by(record(Interconnect)))
    pcie: Pcie | None = field(default=None, metadata=by(record(Pcie)))
    host_link: Interconnect | None = field(default=None, metadata=by(record(Interconnect)))

    achieved: Achieved | None = field(default=None, metadata=by(record(Achieved)))
    kernel_floor_us: float = field(metadata=by(amount))
    host: Host = field(default=Host(), metadata=by(record(Host)))

    check: SpecCheck = field(default=SpecCheck(), metadata=by(record(SpecCheck)))
    sources: Mapping[str, str] = field(metadata=by(_sources))
    notes: str | None = field(default=None, metadata=by(text))
    unverified: tuple[str, ...] = field(default=(), metadata=by(tuple_of(text)))

    def __post_init__(self) -> None:
        SchemaRecord.__post_init__(self)
        _check_together(self)

    def replace(self, **changes: object) -> Hardware:
        """A changed copy, with the rules of `extends:`: mappings merge, None removes an entry.

        >>> load_hardware("a100-sxm4-80gb").replace(tdp_w=330, achieved={"memory": 0.83}).tdp_w
        330.0
        """
        return build(Hardware, _changed(self, changes))

    def contraction_peak(self, dtype: str, *, fp16_accumulate: bool = False) -> Peak:
        """The rate of matmuls with inputs of `dtype`: of the matrix unit, else emulated, else of vector units.

        tf32 is a setting, and no tensor has this type: a device without it runs the fp32 matmul, as torch does.
        Raises HardwareError if the device has no rate for it; the error names the types that it has.
        """
        if fp16_accumulate and dtype in self.matrix_fp16_accumulate_tflop_per_s:
            return self._peak(self.matrix_fp16_accumulate_tflop_per_s, dtype, "matrix")
        units: dict[Unit, DtypeRates] = {
            "matrix": self.matrix_tflop_per_s,
            "emulated": self.emulated_tflop_per_s,
            "vector": self.vector_tflop_per_s,
        }
        for candidate in ("tf32", "fp32") if dtype == "tf32" else (dtype,):
            for unit, rates in units.items():
                if candidate in rates:
                    return self._peak(rates, candidate, unit)
        has = [name for name in MATRIX_DTYPES if any(name in rates for rates in units.values())]
        raise HardwareError(f"{self.name} has no rate for matrix products in {dtype}; it has: {', '.join(has)}")

    def vector_peak(self, dtype: str) -> Peak:
        """The rate of element-wise work. torch computes fp16 and narrower in fp32 (its `opmath`): they get that rate.

        Raises HardwareError if the device has no rate for it; the error names the types that it has.
        """
        for candidate in (opmath_of(dtype), dtype):
            if candidate in self.vector_tflop_per_s:
                return self._peak(self.vector_tflop_per_s, candidate, "vector")
        has = ", ".join(self.vector_tflop_per_s)
        raise HardwareError(f"{self.name} has no rate for element-wise work in {dtype}; it has: {has}")

    def _peak(self, rates: DtypeRates, dtype: str, unit: Unit) -> Peak:
        found = vector_unit(self) if unit == "vector" else matrix_unit(self, unit, dtype, rates[dtype])
        picojoules = found.picojoules
        if unit == "vector" and picojoules is not None:
            picojoules *= DTYPES[dtype].item_bytes / 4  # wider operands, more energy
        return Peak(rates[dtype] * 1e12, unit, found.sustained_share, found.burst_share, picojoules)

    def at_clock(self, ratio: float) -> Hardware:
        """The device with its multiprocessors at this share of the boost clock: every rate but that of memory changes
        with it, and that of memory too if the clock is very low. Large GEMMs reach the share of the peak that they
        reach when power does not limit them."""
        scaled: dict[str, Any] = {
            name: {dtype: ratio * rate for dtype, rate in getattr(self, name).items()}
            for name in ("vector_tflop_per_s", *_MATRIX_TABLES)
        }
        shares = {dtype: matrix_unit(self, "matrix", dtype, rate) for dtype, rate in self.matrix_tflop_per_s.items()}
        achieved = Achieved(
            matrix_by_dtype=FrozenMapping((dtype, found.burst_share) for dtype, found in shares.items()),
            vector=vector_unit(self).burst_share,
            memory=None if self.achieved is None else self.achieved.memory,
            limit_w=self.limit_watts,
            source="at one clock",
        )
        mhz = None if self.boost_clock_mhz is None else ratio * self.boost_clock_mhz
        bandwidth = self.memory_bandwidth_gb_per_s * min(1.0, ratio / power.MEMORY_BOUND_CLOCK)
        return dataclasses.replace(
            self, **scaled, achieved=achieved, boost_clock_mhz=mhz, memory_bandwidth_gb_per_s=bandwidth
        )

    def at_boost(self) -> Hardware:
        """The device at its boost clock, as if nothing limited its power."""
        return dataclasses.replace(self.at_clock(1.0), tdp_w=None, power_limit_w=None, unverified=())

    def ridge_point(self, dtype: str) -> float:
        """The ridge point in FLOP/B: above it a matmul of `dtype` is compute-bound, by the datasheet."""
        return self.contraction_peak(dtype).flop_per_s / self.bandwidth_bytes_per_s

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth by the datasheet."""
        return self.memory_bandwidth_gb_per_s * 1e9

    @property
    def sustained_bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth that a streaming kernel reaches."""
        measured = None if self.achieved is None else self.achieved.memory
        share = power.memory_share(self.memory_type) if measured is None else measured
        return self.bandwidth_bytes_per_s * share

    @property
    def limit_watts(self) -> float | None:
        """What the device may draw in a long run."""
        return self.power_limit_w or self.tdp_w

    @property
    def idle_watts(self) -> float:
        """What it draws at its boost clock with nothing to do: it does not depend on the power limit, but is at most
        half of it. 0 where the board power is unknown."""
        rated = (self.achieved and self.achieved.limit_w) or self.tdp_w or 0.0
        return min(power.idle_watts(rated), (self.limit_watts or 0.0) / 2)

    @property
    def memory_bytes(self) -> int | None:
        """Capacity; None for a CPU, whose memory depends on the machine."""
        return None if self.memory_gb is None else round(self.memory_gb * 1e9)

    @property
    def l2_cache_bytes(self) -> int | None:
        """Size of the last cache before memory."""
        return None if self.l2_cache_mb is None else round(self.l2_cache_mb * 2**20)

    @property
    def l2_bandwidth_bytes_per_s(self) -> float | None:
        """Bandwidth that a copy within the last-level cache reaches."""
        return None if self.l2_bandwidth_gb_per_s is None else self.l2_bandwidth_gb_per_s * 1e9

    @property
    def kernel_floor_seconds(self) -> float:
        """Time of the smallest kernel on the device."""
        return self.kernel_floor_us * 1e-6

    @property
    def host_link_bytes_per_s(self) -> float | None:
        """Spec rate of a copy from or to the host: one direction of the link."""
        link = self.host_link or self.pcie
        if link is None or link.bidirectional_gb_per_s is None:
            return None
        return link.bidirectional_gb_per_s * 1e9 / 2


AnyHardware = str | os.PathLike[str] | Hardware  # what load_hardware takes


# --- rules and changes ---------------------------------------------------------------------------------------------


def _check_together(device: Hardware) -> None:
    """Rules that involve more than one field."""
    if (device.vendor == "nvidia") != (device.compute_capability is not None):
        raise HardwareError("expected for vendor nvidia, and for no other", field="compute_capability")
    if not device.vector_tflop_per_s:
        raise HardwareError("expected at least one rate", field="vector_tflop_per_s")
    values = plain(device)
    for path in device.unverified:
        head, _, key = path.partition(".")
        block = values.get(head)
        if block is None or (key and (not isinstance(block, dict) or key not in block)):
            raise HardwareError(f"expected fields, or field.key, that have a value; got {path}", field="unverified")


def _changed(base: Hardware, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `base` with changes: mappings merge, None removes an entry, and a changed field is no longer in
    `unverified`."""

    def replaced(path: str) -> bool:
        head, _, key = path.partition(".")
        change = changes.get(head)
        return head in changes and (key in change if isinstance(change, Mapping) else True)

    values = merge(plain(base), changes)
    _keep_measured_limit(base, values, changes)
    if changes.get("name", base.name) != base.name:
        values["base"] = _base(base)
    if "unverified" not in changes:
        values["unverified"] = [path for path in base.unverified if not replaced(path)]
    return values


def _keep_measured_limit(base: Hardware, values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Another power limit does not change the watts per FLOP/s under which the fractions were measured: two chips in
    one package reach what each of them does at half of their limit."""
    if "tdp_w" not in changes or base.tdp_w is None or values.get("achieved") is None:
        return
    change = changes.get("achieved") or {}
    is_measured_anew = isinstance(change, Achieved) or any(key in change for key in ("matrix", "vector", "limit_w"))
    if not is_measured_anew:
        old = base.matrix_tflop_per_s
        new = at("matrix_tflop_per_s", matrix_rates, values.get("matrix_tflop_per_s", {}))
        times = next((new[dtype] / old[dtype] for dtype in ("fp16", "bf16") if dtype in new and dtype in old), 1.0)
        values["achieved"] = {"limit_w": times * base.tdp_w, **values["achieved"]}


# --- finding profiles --------------------------------------------------------------------------------------------


def available_hardware() -> list[str]:
    """The names of the devices that flopmeter knows, sorted."""
    return names_in(PROFILES)


def load_hardware(name: AnyHardware) -> Hardware:
    """The device of that exact name or alias, or of the YAML file at that path.

    Aliases are the strings of `torch.cuda.get_device_name` and the marketing names; upper and lower case differ.
    Raises HardwareError for a name that is neither (with the family members or the nearest names; there is no
    fallback), and for a file that is not a valid profile (with file, field and what was expected).
    """
    return resolve(name, Hardware, "device", _by_name, _load_file)


def _by_name(name: str) -> Hardware:
    known = name if name in available_hardware() else _aliases().get(name.removesuffix(_VIRTUAL))
    if known is None:
        raise HardwareError(_unknown(name))
    return _profile(known)


@functools.cache
def _profile(name: str) -> Hardware:
    return _load_file(PROFILES / f"{name}.yaml")


@functools.cache
def _aliases() -> dict[str, str]:
    return {alias: name for name in available_hardware() for alias in _profile(name).aliases}


def _load_file(path: Path, extended_by: tuple[Path, ...] = ()) -> Hardware:
    """Read one profile. `extended_by` are the profiles that extend it, to notice a cycle."""
    found = _found(path)
    return read_record(found, Hardware, lambda fields: _extended(fields, (*extended_by, found)))


def _found(path: Path) -> Path:
    """The full path of a file: a profile finds the one that it extends from there."""
    try:
        if path.is_file():
            return path.resolve()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise unreadable(path, error) from None
    raise HardwareError("there is no such file", file=str(path))


def _extended(values: dict[str, Any], chain: tuple[Path, ...]) -> dict[str, Any]:
    """The fields of a file, merged into those of the profile that it extends."""
    values = dict(values)
    base = values.pop("extends", None)
    if base is None:
        return merge({}, values)
    name = at("extends", text, base)
    path = PROFILES / f"{name}.yaml"
    if name.endswith(SUFFIXES):
        path = chain[-1].parent / name
    elif name not in available_hardware():
        raise HardwareError(_unknown(name), field="extends")
    if path.resolve() in chain:
        raise HardwareError(f"{name} extends this file in turn", field="extends")
    unnamed: dict[str, Any] = {"title": None, "aliases": None}  # what names a device is never inherited
    extended = _load_file(path, chain)
    return _changed(extended, unnamed | {"base": _base(extended)} | values)


def _base(device: Hardware) -> str | None:
    """The shipped profile that a profile made from this device extends."""
    return device.name if device.name in available_hardware() else device.base


def _unknown(name: str) -> str:
    """The error's text for a name that is neither a profile nor an alias."""
    names = available_hardware()
    wanted = "-".join(name.lower().replace("_", " ").split()).removeprefix("nvidia-")
    family = [known for known in names if wanted and f"-{wanted}" in f"-{known}"]
    near = difflib.get_close_matches(wanted, names, n=3)
    if len(family) > 1:
        said = f"its family has {', '.join(family)}"
    elif family or near:
        said = f"near to it: {', '.join(family or near)}"
    else:
        said = "`flopmeter hardware` lists the names"
    return f"no hardware is named {reprlib.repr(name)}; {said} (or give the path of a YAML file)"
