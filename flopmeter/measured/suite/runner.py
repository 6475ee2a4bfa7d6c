"""`flopmeter measure`: runs the suite on this machine, and writes its file case by case."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flopmeter.device.hardware import Hardware, HardwareError, load_hardware
from flopmeter.device.schema import plain
from flopmeter.measured.calibration import Clock, DeviceType, calibrate, check_clock, cpu_name, last_cache_bytes
from flopmeter.measured.suite.cases import Case, switches_of
from flopmeter.measured.suite.kernels import kernel_cases
from flopmeter.measured.suite.nvml import Gpu, gpu_of_torch
from flopmeter.measured.suite.prediction import CASES, copies_of, work_of
from flopmeter.measured.suite.programs import PROGRAMS, cpu_program_cases, program_cases
from flopmeter.measured.suite.run_file import CaseResult, RunFileError, SuiteRun, read_run
from flopmeter.measured.suite.stopwatch import CpuWatch, CudaWatch, Effort, profiled

QUICK = Effort(burst_seconds=0.02, sustained_seconds=0.6, heat_seconds=0.5)
QUICK_STRIDE = 4  # one of this many cases of each kind
CALIBRATION_SECONDS = 20.0
# Most work of a kernel on a CPU: more would take seconds a call on one core.
MOST_CPU_FLOPS, MOST_CPU_BYTES = 6e9, 2e8
OTHER_DTYPES_OF_CUDA = ("fp16", "bf16", "fp32", "tf32", "fp64", "fp8", "int8")
# Of the environment, what may change speed, and nothing that could be a secret.
ENVIRONMENT = ("MALLOC_", "OMP_", "MKL_", "KMP_", "CUDA_", "CUBLAS_", "PYTORCH_ALLOC_", "PYTORCH_CUDA_ALLOC_")
CACHES_IN_TURN = 2  # together, the copies of a kernel's weights fill this many caches
MOST_COPIES = 16  # if that would take more copies, a single one is used again and again

METHOD = (
    "Weights (and keys and values of earlier tokens) are read from memory: `copies` of a kernel with weights of their "
    f"own are called in turn, together {CACHES_IN_TURN} times the last-level cache. Where that would take more than "
    f"{MOST_COPIES} copies there is one, whose weights stay in the cache. Activations are the same in each call.",
    "Numbers are normal and random; after two calls of warm-up.",
)
METHOD_OF: dict[DeviceType, tuple[str, ...]] = {
    "cpu": ("Samples of at least 4 ms on the clock that each case names; no pause between them.",),
    "cuda": (
        "Kernels: CUDA events around replays of a CUDA graph, in samples of about 4 ms. Clocks `burst`: after each "
        "sample a pause of nine times its length. Clocks `sustained`: two seconds of the same work before, and two "
        "measured ones.",
        "Programs: the host's clock around each step, the device idle before and after; two seconds of steps before.",
        "Watts: the board's energy counter over the samples (NVML), at sustained clocks only.",
        "profiled_seconds: the kernels of one call under torch.profiler.",
    ),
}


def measure(
    path: str | Path,
    device: DeviceType = "cpu",
    *,
    quick: bool = False,
    kinds: Collection[str] = (),
    clock: Clock = "wall",
    resume: bool = False,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> SuiteRun:
    """Run the suite on this machine and write the file `path` after each case.

    kinds: only cases of these kinds. quick: one case of four, in a tenth of the time.
    clock: 'cpu' measures the CPU time of the one thread that torch is set to.
    resume: go on with the file that is there; what failed is tried again.
    Raises HardwareError where there is no such device, RunFileError for a file that is in the way, ValueError for kinds
    that do not exist and for a clock that cannot tell.
    """
    path = Path(path)
    _check(path, device, kinds, clock, resume)
    run = read_run(path) if resume and path.exists() else _new_run(device)
    if run.device["name"] != _device(device, None)["name"]:
        raise RunFileError(f"{path} was measured on {run.device['name']}: give another file")
    run.write(path)  # so that a folder that cannot be written is noticed first
    if run.calibration == "not made":
        run.calibration = _calibrated(device, clock, quick)
    done = {result.case.name for result in run.results if not result.failed}
    run.results = [result for result in run.results if not result.failed]
    effort = QUICK if quick else Effort()
    watch = CpuWatch(effort, clock) if device == "cpu" else CudaWatch(effort, gpu_of_torch())
    missing = [case for case in cases_of(device, quick=quick, kinds=kinds) if case.name not in done]
    for case in progress(missing):
        run.results.append(_result(case, device, watch))
        run.write(path)
    run.finished = _now()
    run.write(path)
    return run


def cases_of(device: DeviceType, *, quick: bool = False, kinds: Collection[str] = ()) -> list[Case]:
    """What is measured on a device of this type, kernels first."""
    cases = [case for case in _all_cases(device) if not kinds or case.kind in kinds]
    if device == "cpu":
        cases = [case for case in cases if case.kind in PROGRAMS or _is_small(case)]
    return list(_each_nth(cases)) if quick else cases


def _each_nth(cases: Iterable[Case]) -> Iterator[Case]:
    met: Counter[tuple[str, str]] = Counter()
    for case in cases:
        if met[case.kind, case.clocks] % QUICK_STRIDE == 0:
            yield case
        met[case.kind, case.clocks] += 1


def _all_cases(device: DeviceType) -> list[Case]:
    if device == "cpu":
        kernels = [case for case in kernel_cases("fp32", ["bf16"]) if case.clocks == "burst"]
        return kernels + cpu_program_cases()
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return kernel_cases(half, OTHER_DTYPES_OF_CUDA) + program_cases(half)


def _is_small(case: Case) -> bool:
    flops, nbytes = work_of(case)
    return flops <= MOST_CPU_FLOPS and nbytes <= MOST_CPU_BYTES


def _check(path: Path, device: DeviceType, kinds: Collection[str], clock: Clock, resume: bool) -> None:
    unknown = sorted(set(kinds) - set(CASES))
    if unknown:
        raise ValueError(f"no case is of the kind {', '.join(unknown)}; there are {', '.join(CASES)}")
    if path.exists() and not resume:
        raise RunFileError(f"{path} is there already: resume it (--resume), or give another file")
    if not path.parent.is_dir():
        raise RunFileError(f"{path} cannot be written: there is no folder {path.parent}")
    if device == "cuda" and not torch.cuda.is_available():
        raise HardwareError("torch finds no CUDA device here: --device cpu measures the CPU")
    check_clock(device, clock)


def _new_run(device: DeviceType) -> SuiteRun:
    gpu = gpu_of_torch() if device == "cuda" else None
    versions = {
        "flopmeter": import_module("flopmeter").__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    return SuiteRun(_device(device, gpu), versions, METHOD + METHOD_OF[device], started=_now())


def _device(device: DeviceType, gpu: Gpu | None) -> dict[str, Any]:
    if device == "cpu":
        name = cpu_name()
        facts: dict[str, Any] = {"threads": torch.get_num_threads()}
    else:
        found = torch.cuda.get_device_properties()
        name = found.name
        facts = {
            "compute_capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            **(gpu.facts() if gpu else {"nvml": "not found"}),
        }
    return {
        "type": device,
        "name": name,
        "hardware": _known(name),
        "last_cache_bytes": last_cache_bytes(device),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        **facts,
    }


def _known(name: str) -> str | None:
    try:
        return load_hardware(name).name
    except HardwareError:
        return None


def _calibrated(device: DeviceType, clock: Clock, quick: bool) -> dict[str, Any] | str:
    """A profile of this machine; a failure is told in the file, and leaves the rest of the suite."""
    try:
        seconds = CALIBRATION_SECONDS / (QUICK_STRIDE if quick else 1)
        profile: Hardware = calibrate(device, budget_seconds=seconds, clock=clock)
    except (RuntimeError, ValueError) as error:
        return f"failed: {_in_one_line(error)}"
    return plain(profile)


def _result(case: Case, device: DeviceType, watch: CpuWatch | CudaWatch) -> CaseResult:
    """A case that this device or this torch cannot run is a result too: it says why."""
    try:
        with switches_of(case), _own_memory(case, device):
            return _measured(case, device, watch)
    except Exception as error:  # whatever an op, a compiler or a driver may raise
        return CaseResult(case, failed=_in_one_line(error))


def _measured(case: Case, device: DeviceType, watch: CpuWatch | CudaWatch) -> CaseResult:
    held = torch.cuda.memory_allocated() if device == "cuda" else 0  # workspaces of libraries, which cases before made
    runs, weight_bytes = copies_of(case, device, lambda nbytes: _copies(nbytes, last_cache_bytes(device)))
    is_program = case.kind in PROGRAMS
    with torch.set_grad_enabled(is_program):
        reading = watch.program(runs[0]) if is_program else watch.kernel(runs, case.clocks)
        peak = _peak_memory(runs[0]) - held if is_program and device == "cuda" else None
        result = CaseResult(case, "", reading, len(runs), weight_bytes, peak_memory_bytes=peak)
        try:
            seconds, kernels = profiled(runs[0], device)
        except Exception as error:  # where the driver lets nobody profile; what was measured stays
            return result._replace(not_profiled=_in_one_line(error))
    return result._replace(profiled_seconds=seconds, kernels=tuple(kernels))


def _copies(weight_bytes: int, cache_bytes: int) -> int:
    wanted = math.ceil(CACHES_IN_TURN * cache_bytes / weight_bytes) if weight_bytes else 1
    return wanted if wanted <= MOST_COPIES else 1


def _peak_memory(run: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


@contextlib.contextmanager
def _own_memory(case: Case, device: DeviceType) -> Iterator[None]:
    """In this context memory is the case's own: what it leaves behind is freed before the next one."""
    try:
        yield
    finally:
        if case.inputs.get("mode") == "compiled":
            torch.compiler.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
