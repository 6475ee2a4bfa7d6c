"""The parts of a profile that have a structure of their own, and the values that a figure of it may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flopmeter.device.schema import (
    FrozenMapping,
    SchemaRecord,
    by,
    expected,
    mapping_of,
    number,
    one_of,
    record,
    text,
    tuple_of,
    whole_number,
)
from flopmeter.records.dtypes import MATRIX_DTYPES, VECTOR_DTYPES

DtypeRates = Mapping[str, float]

amount = number("a number over 0 and at most 1e9", above=0, most=1e9)  # so that products in SI units stay finite
# A part whose real clock exceeds the spec boost reaches more than its spec peak: an RTX 5090 measures 1.2.
fraction = number("a number over 0 and at most 1.5", above=0, most=1.5)
count = whole_number(1, 1_000_000)
vector_rates = mapping_of(amount, VECTOR_DTYPES)
matrix_rates = mapping_of(amount, MATRIX_DTYPES)


def capability(value: object) -> tuple[int, int]:
    parts = tuple_of(whole_number(0, 99))(value)
    if len(parts) != 2:
        raise expected("two whole numbers such as [9, 0]", value)
    return parts[0], parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved(SchemaRecord):
    """Fractions of the spec peaks that typical large kernels reach: medians, not the best ever seen.

    A fraction without a measurement is left out; power.py estimates it from the power of the device. `matrix` is for
    fp16 and bf16, `matrix_by_dtype` for other dtypes that were measured; those and `vector` are of long runs, in which
    the clock has fallen as far as the power limit asks. `matrix_burst` is of runs too short for that (below 20 ms), in
    fp16 or bf16; without `matrix`, the law of power says what is left of it in a long run.
    limit_w: the power limit under which they were measured; without it the device's `tdp_w`.
    """

    matrix: float | None = field(default=None, metadata=by(fraction))
    matrix_burst: float | None = field(default=None, metadata=by(fraction))
    matrix_by_dtype: DtypeRates = field(default_factory=FrozenMapping, metadata=by(mapping_of(fraction, MATRIX_DTYPES)))
    vector: float | None = field(default=None, metadata=by(fraction))
    memory: float | None = field(default=None, metadata=by(fraction))
    limit_w: float | None = field(default=None, metadata=by(amount))
    source: str = field(metadata=by(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect(SchemaRecord):
    """The link between devices; the rate is the sum of both directions of one device, as vendors print it.

    `peers`: how many others a device has a link of its own to, where no switch joins them; each gets its share.
    """

    name: str = field(metadata=by(text))
    bidirectional_gb_per_s: float | None = field(default=None, metadata=by(amount))
    peers: int | None = field(default=None, metadata=by(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie(SchemaRecord):
    """The link to the host; the rate is the sum of both directions of the lanes that the device has.

    `devices` share one link from their switch to the CPU in the machines that the device comes in.
    """

    generation: int = field(metadata=by(count))
    bidirectional_gb_per_s: float = field(metadata=by(amount))
    devices: int = field(default=1, metadata=by(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCheck(SchemaRecord):
    """A second way to the rates at one clock: sm_count x flop_per_clock_per_sm x clock."""

    unit: str = field(metadata=by(one_of("vector", "matrix", "matrix_fp16_accumulate")))
    clock_mhz: float = field(metadata=by(amount))
    flop_per_clock_per_sm: DtypeRates = field(metadata=by(matrix_rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck(SchemaRecord):
    """A second way to the bandwidth: bus width x data rate of one pin."""

    bus_bits: int = field(metadata=by(count))
    gbit_per_s_per_pin: float = field(metadata=by(amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCheck(SchemaRecord):
    """A second way to compute the peaks, from other figures, as far as those are known."""

    compute: tuple[ComputeCheck, ...] = field(default=(), metadata=by(tuple_of(record(ComputeCheck))))
    memory: MemoryCheck | None = field(default=None, metadata=by(record(MemoryCheck)))
