"""Measure this machine and write its profile: rates of large matmuls by dtype, bandwidth of memory and of the
last-level cache, and the host's time for ops, views and module calls.

Each figure is the median of repeats on the wall clock, so it includes the effect of other programs on the machine; the
spread of the repeats is in the profile's sources. On a busy machine the CPU time of one thread can be measured instead,
which does not run on while other programs run.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from flopmeter.device.hardware import Hardware, HardwareError, load_hardware
from flopmeter.device.schema import build, plain
from flopmeter.records.dtypes import DTYPES, FLOATS, NARROW_FLOATS

DeviceType = Literal["cpu", "cuda"]
Clock = Literal["wall", "cpu"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
MATMUL_DTYPES = {  # of torch.mm and torch._int_mm
    name: next(iter(dtype.in_torch))
    for name, dtype in DTYPES.items()
    if "matrix" in dtype.units and ("vector" in dtype.units or dtype.is_switch)
}
LONGEST_MATMUL_SECONDS = 0.2  # the side of the matrices doubles until a matmul would take longer than this
MEASURED_SHARE = 0.7  # of the budget; the rest goes to finding sizes and to warming up
SIDES = (256, 512, 1024, 2048, 4096, 8192)
CACHE_FACTOR = 4  # a copy of this many times the cache's size does not fit into it
LEAST_REPEATS = 5
BUSY_SPREAD = 0.2  # spread of the quartiles that is called busy: on an idle machine it is a few percent
OPS_PER_REPEAT = 200  # one op is too short for the clock
DEPTH = 10  # of nested modules
SMALL = 16  # elements: next to no work
# ATen gives each thread at least this many elements of an element-wise op (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32768
LEAST_FLOOR_US = 0.1  # of a fork and join of threads; one thread needs none
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Figure(NamedTuple):
    """The median of repeats, and half the distance of their quartiles as a share of it."""

    value: float
    spread: float
    repeats: int

    def per(self, amount: float) -> Figure:
        """The rate: `amount` of work over the seconds of this figure."""
        return self._replace(value=amount / self.value)


@dataclass
class Calibration:
    """Figures by the name of what was measured. `profile()` is their profile."""

    threads: int
    clock: Clock = "wall"
    figures: dict[str, Figure] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)  # dtype -> why its matmul was not measured

    def rates_tflop_per_s(self) -> dict[str, float]:
        """The rates of matmuls, by dtype."""
        prefix = "product "
        return {
            name.removeprefix(prefix): _rounded(figure.value / 1e12)
            for name, figure in self.figures.items()
            if name.startswith(prefix)
        }

    def spread_of(self, *names: str) -> str:
        """The spread of the repeats, as a text for a profile's sources."""
        figures = [self.figures[name] for name in names if name in self.figures]
        repeats, spread = min(figure.repeats for figure in figures), max(figure.spread for figure in figures)
        return f"median of at least {repeats} repeats, quartiles within {100 * spread:.0f} %"


def calibrate(
    device: DeviceType = "cpu",
    *,
    budget_seconds: float = 20.0,
    clock: Clock = "wall",
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Hardware:
    """Measure this machine for about `budget_seconds` and return its profile; `as_yaml` writes it.

    clock: 'cpu' measures the CPU time of the one thread that torch is set to.
    progress: wraps the list of measurements, as `tqdm` does.
    Raises HardwareError where there is no such device, ValueError for a clock that cannot tell its time.
    """
    check_clock(device, clock)
    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareError("torch finds no CUDA device here: calibrate the CPU, or run this where there is one")
    calibration = Calibration(torch.get_num_threads(), clock)
    steps = _steps(device)
    timer = _Timer(device, CLOCKS[clock], budget_seconds * MEASURED_SHARE / len(steps))
    with torch.inference_mode():
        for name, measure in progress(steps):
            try:
                calibration.figures[name] = measure(timer)
            except (RuntimeError, NotImplementedError) as error:
                if not name.startswith("product "):
                    raise
                calibration.unsupported[name.removeprefix("product ")] = str(error).splitlines()[0]
    return cpu_profile(calibration) if device == "cpu" else cuda_profile(calibration)


def check_clock(device: DeviceType, clock: Clock) -> None:
    """Raises ValueError for a clock that cannot measure the device."""
    if clock == "cpu" and (device == "cuda" or torch.get_num_threads() > 1):
        raise ValueError(
            "the CPU clock measures one thread on the CPU: use the wall clock, or set OMP_NUM_THREADS=1 or"
            " torch.set_num_threads(1)"
        )


def as_yaml(profile: Hardware) -> str:
    """The file that load_hardware() reads; it is named by its stem."""
    values = {name: value for name, value in _without_empty(plain(profile)).items() if name != "name"}
    head = f"# {profile.title}, measured by `flopmeter calibrate`.\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True))


def _without_empty(value: Any) -> Any:
    """The nested mapping without empty lists, empty mappings and False."""
    if not isinstance(value, dict):
        return value
    below = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in below.items() if item not in ([], {}) and item is not False}


# --- measuring -----------------------------------------------------------------------------------------------------


class _Timer:
    """Times a function on the device, again and again until its share of the budget is spent."""

    def __init__(self, device: DeviceType, now: Callable[[], float], seconds: float):
        self.device, self._now, self._seconds = device, now, seconds

    def once(self, function: Callable[[], object]) -> float:
        self._wait()
        start = self._now()
        function()
        self._wait()
        return self._now() - start

    def median(self, function: Callable[[], object], calls: int = 1) -> Figure:
        """Median seconds of one of the calls that `function` makes."""
        self.once(function)  # libraries choose and compile their kernels
        samples: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(samples) < LEAST_REPEATS or time.perf_counter() < end:
            samples.append(self.once(function) / calls)
        low, middle, high = statistics.quantiles(samples, n=4)
        return Figure(middle, (high - low) / 2 / middle, len(samples))

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


_Measurement = tuple[str, Callable[[_Timer], Figure]]


def _steps(device: DeviceType) -> list[_Measurement]:
    types = [dtype for dtype in MATMUL_DTYPES if device == "cuda" or dtype != "tf32"]
    steps: list[_Measurement] = [(f"product {dtype}", functools.partial(_matmul, dtype=dtype)) for dtype in types]
    steps += [("copy", _copy), ("op", _op), ("matmul call", _matmul_call), ("view", _view)]
    steps.append(("module call", _module_call))
    return steps + ([("cache copy", _cache_copy), ("fork", _fork)] if device == "cpu" else [("kernel", _graph_node)])


def _matmul(timer: _Timer, dtype: str) -> Figure:
    """FLOP/s of square matmuls, as large as the time allows."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        for side in SIDES:
            operands = [_operand(side, dtype, timer.device) for _ in range(2)]
            run = functools.partial(torch._int_mm if dtype == "int8" else torch.mm, *operands)
            # The next side takes eight times as long. (The shortest of three, since other programs may take the core.)
            if 8 * min(timer.once(run) for _ in range(3)) > LONGEST_MATMUL_SECONDS:
                break
        return timer.median(run).per(2.0 * side**3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _operand(side: int, dtype: str, device: DeviceType) -> Tensor:
    if dtype == "int8":
        return torch.randint(-9, 10, (side, side), dtype=torch.int8, device=device)
    return torch.randn(side, side, device=device).to(MATMUL_DTYPES[dtype])


def _copy(timer: _Timer) -> Figure:
    """Bytes read and written per second by a copy of several caches."""
    return _copied(timer, CACHE_FACTOR * last_cache_bytes(timer.device))


def _cache_copy(timer: _Timer) -> Figure:
    """Bytes read and written per second by a copy between two buffers that together fill half of the last-level
    cache."""
    return _copied(timer, last_cache_bytes("cpu") // 4)


def _copied(timer: _Timer, nbytes: int) -> Figure:
    source = torch.ones(nbytes // 4, device=timer.device)
    target = torch.empty_like(source)
    return timer.median(lambda: target.copy_(source)).per(2.0 * source.nbytes)


def _op(timer: _Timer) -> Figure:
    """Mean seconds of an op with next to no work, with the Python that calls it."""
    x, norm = (torch.ones(SMALL, device=timer.device) for _ in range(2))
    layer_norm = nn.functional.layer_norm

    def ops() -> None:
        for _ in range(OPS_PER_REPEAT // 4):
            x + norm
            x.relu()
            layer_norm(x, (SMALL,), norm, norm)
            x.softmax(0)

    return timer.median(ops, OPS_PER_REPEAT)


def _matmul_call(timer: _Timer) -> Figure:
    """Seconds of a matmul with next to no work, as an op whose kernel is a library's."""
    square = torch.ones(4, 4, device=timer.device)

    def calls() -> None:
        for _ in range(OPS_PER_REPEAT):
            torch.addmm(square, square, square)

    return timer.median(calls, OPS_PER_REPEAT)


def _view(timer: _Timer) -> Figure:
    x = torch.ones(4, 4, device=timer.device)

    def views() -> None:
        for _ in range(OPS_PER_REPEAT // 2):
            x.view(2, 8)
            x.transpose(0, 1)

    return timer.median(views, OPS_PER_REPEAT)


class _Around(nn.Module):
    """A module that calls another module."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def _module_call(timer: _Timer) -> Figure:
    module: nn.Module = nn.Identity()
    for _ in range(DEPTH - 1):
        module = _Around(module)
    x = torch.ones(1)

    def calls() -> None:
        for _ in range(OPS_PER_REPEAT // DEPTH):
            module(x)

    return timer.median(calls, OPS_PER_REPEAT)


def _fork(timer: _Timer) -> Figure:
    """Seconds to start all threads and wait for them: an op with one grain per thread, less an op with one grain."""
    threads = torch.get_num_threads()
    alone, shared = (torch.ones(count * GRAIN_ELEMENTS) for count in (1, threads))
    one = timer.median(lambda: [alone.add_(1) for _ in range(OPS_PER_REPEAT)], OPS_PER_REPEAT)
    all_together = timer.median(lambda: [shared.add_(1) for _ in range(OPS_PER_REPEAT)], OPS_PER_REPEAT)
    return all_together._replace(value=max(LEAST_FLOOR_US * 1e-6, all_together.value - one.value))


def _graph_node(timer: _Timer) -> Figure:
    """Seconds from one tiny kernel to the next in a CUDA graph, in which the host does not slow them down."""
    x = torch.ones(SMALL, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(OPS_PER_REPEAT):
            x.add_(1)
    return timer.median(graph.replay, OPS_PER_REPEAT)


def last_cache_bytes(device: DeviceType) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties().L2_cache_size)
    return max(_cache_sizes().values(), default=32 * 2**20)


def _cache_sizes() -> dict[int, int]:
    """Bytes of the data caches of the first CPU, by level, if the system says them (Linux)."""
    sizes = {}
    for folder in _CACHES.glob("index*"):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                sizes[int(level)] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sizes


# --- profiles ------------------------------------------------------------------------------------------------------


_CLOCK_NAMES: dict[Clock, str] = {"wall": "wall clock", "cpu": "CPU time"}
_MEASURED_PEAKS = "the rates and the bandwidth are measured ones"
_NOTE = "year: that of the measurement. Peaks are the rates of large products: MFU is relative to those."


def cpu_profile(calibration: Calibration) -> Hardware:
    """The datasheet of the machine is not known, so measured rates take the place of its peaks, with fractions of 1."""
    figures, model = calibration.figures, _cpu_model()
    caches = _cache_sizes()
    values: dict[str, Any] = {
        "name": "this-cpu",
        "title": f"{model['name']} ({_threads(calibration)})",
        "vendor": model["vendor"],
        "year": datetime.date.today().year,
        "architecture": torch.backends.cpu.get_cpu_capability(),
        "is_cpu": True,
        "sm_count": calibration.threads,
        "vector_tflop_per_s": calibration.rates_tflop_per_s(),
        "memory_type": "unknown",
        "memory_bandwidth_gb_per_s": _rounded(figures["copy"].value / 1e9),
        "achieved": {"vector": 1.0, "memory": 1.0, "source": _MEASURED_PEAKS},
        "kernel_floor_us": _rounded(figures["fork"].value * 1e6),
    }
    if caches:
        values["l2_cache_mb"] = caches[max(caches)] / 2**20
        values["l2_bandwidth_gb_per_s"] = _rounded(figures["cache copy"].value / 1e9)
    sources = {
        "kernel_floor_us": f"an element-wise op on all threads against one; {calibration.spread_of('fork')}",
        "memory_bandwidth_gb_per_s": f"a copy of {CACHE_FACTOR} last-level caches; {calibration.spread_of('copy')}",
    }
    return build(Hardware, values | _common(calibration, sources, _NOTE))


def cuda_profile(calibration: Calibration) -> Hardware:
    """A device that flopmeter knows keeps its spec peaks and gets measured fractions of them. For another device the
    measured rates take the place of the peaks."""
    found = torch.cuda.get_device_properties()
    try:
        known = load_hardware(found.name)
    except HardwareError:
        return _unknown_gpu(calibration, found)
    figures, rates = calibration.figures, calibration.rates_tflop_per_s()
    shares = {
        name: _rounded(rate * 1e12 / known.contraction_peak(name).flop_per_s)
        for name, rate in rates.items()
        if name in known.matrix_tflop_per_s
    }
    achieved = {
        "matrix_by_dtype": shares,
        "vector": _rounded(rates["fp32"] * 1e12 / known.vector_peak("fp32").flop_per_s),
        "memory": _rounded(figures["copy"].value / known.bandwidth_bytes_per_s),
    }
    common = _common(calibration, {"kernel_floor_us": _graph_source(calibration)}, known.notes)
    measured = common["sources"].pop("default")
    floor = _rounded(figures["kernel"].value * 1e6)
    return known.replace(achieved={**achieved, "source": measured}, kernel_floor_us=floor, **common)


def _unknown_gpu(calibration: Calibration, found: Any) -> Hardware:
    figures, rates = calibration.figures, calibration.rates_tflop_per_s()
    on_vector_units = set(FLOATS) - set(NARROW_FLOATS)
    values = {
        "name": "this-gpu",
        "title": found.name,
        "vendor": "nvidia",
        "year": datetime.date.today().year,
        "architecture": f"compute capability {found.major}.{found.minor}",
        "compute_capability": [found.major, found.minor],
        "sm_count": found.multi_processor_count,
        "vector_tflop_per_s": {name: rate for name, rate in rates.items() if name in on_vector_units},
        "matrix_tflop_per_s": {name: rate for name, rate in rates.items() if name not in on_vector_units},
        "memory_gb": found.total_memory / 1e9,
        "memory_type": "unknown",
        "memory_bandwidth_gb_per_s": _rounded(figures["copy"].value / 1e9),
        "l2_cache_mb": found.L2_cache_size / 2**20,
        "achieved": {"matrix": 1.0, "vector": 1.0, "memory": 1.0, "source": _MEASURED_PEAKS},
        "kernel_floor_us": _rounded(figures["kernel"].value * 1e6),
    }
    return build(Hardware, values | _common(calibration, {"kernel_floor_us": _graph_source(calibration)}, _NOTE))


def _graph_source(calibration: Calibration) -> str:
    return f"from one tiny kernel to the next in a CUDA graph; {calibration.spread_of('kernel')}"


def _common(calibration: Calibration, sources: dict[str, str], note: str | None) -> dict[str, Any]:
    """Fields that profiles of all devices have in common."""
    figures = calibration.figures
    products = [name for name in figures if name.startswith("product ")]
    default = (
        f"flopmeter calibrate, {datetime.date.today().isoformat()}, torch {torch.__version__}, "
        f"{_threads(calibration)}, {_CLOCK_NAMES[calibration.clock]}; {calibration.spread_of(*products)} (products)"
    )
    remarks = [note] if note else []
    remarks += [f"No product in {dtype}: {why}." for dtype, why in calibration.unsupported.items()]
    spread = max(figure.spread for figure in figures.values())
    if spread > BUSY_SPREAD:
        remarks.append(f"Repeats differ by {100 * spread:.0f} %: other work ran here; measure again without it.")
    host_spread = calibration.spread_of("op", "matmul call", "view", "module call")
    return {
        "host": {
            "launch_seconds": _rounded(figures["op"].value),
            "library_seconds": _rounded(max(0.0, figures["matmul call"].value - figures["op"].value)),
            "view_seconds": _rounded(figures["view"].value),
            "module_call_seconds": _rounded(figures["module call"].value),
            "source": f"loops of tiny ops, matmuls, views and nested modules; {host_spread}",
        },
        "sources": {"default": default, **sources},
        "notes": " ".join(remarks) or None,
    }


def _threads(calibration: Calibration) -> str:
    return "1 thread" if calibration.threads == 1 else f"{calibration.threads} threads"


def _rounded(value: float) -> float:
    """Rounded to four digits, which is more than the repeats agree on."""
    return float(f"{value:.4g}")


def cpu_name() -> str:
    """The name of the first CPU, as the system gives it."""
    return _cpu_model()["name"]


def _cpu_model() -> dict[str, str]:
    """Name and vendor, if the system says them."""
    fields: dict[str, str] = {}
    if os.path.exists("/proc/cpuinfo"):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        fields = {key.strip(): value.strip() for key, _, value in reversed(list(lines))}
    vendors = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
    name = fields.get("model name") or platform.processor() or platform.machine() or "CPU"
    return {"name": name, "vendor": vendors.get(fields.get("vendor_id", ""), "unknown")}
