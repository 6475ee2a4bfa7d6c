"""`flopmeter calibrate`: profiles of figures that are given, and what is timed for them, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopmeter.measured import calibration
from flopmeter.measured.calibration import Calibration, Figure


def figures(**changes: Figure) -> dict[str, Figure]:
    """3 TFLOP/s in fp32, 6 in bf16 and 24 in int8, copies at 80 GB/s and in the cache at 400, 12 us an op."""
    values = {
        "product fp32": 3.00004e12, "product bf16": 6e12, "product int8": 24e12, "copy": 80e9, "cache copy": 400e9,
        "op": 12.00004e-6, "matmul call": 15e-6, "view": 2e-6, "module call": 1.5e-6, "fork": 4e-6, "kernel": 3e-6,
    }  # fmt: skip
    return {name: Figure(value, 0.015, 9) for name, value in values.items()} | changes


@pytest.mark.parametrize("threads", [1, 16])
def test_a_cpus_profile_has_each_figure_in_its_unit(monkeypatch, threads: int):
    monkeypatch.setattr(calibration, "_cpu_model", lambda: {"name": "A CPU", "vendor": "amd"})
    monkeypatch.setattr(calibration, "_cache_sizes", lambda: {1: 32 * 1024, 3: 64 * 2**20})
    busy = {"op": Figure(12e-6, 0.21, 5)}
    found = calibration.cpu_profile(Calibration(threads, "cpu", figures(**busy), {"fp64": "none"}))
    assert found.title == ("A CPU (1 thread)" if threads == 1 else "A CPU (16 threads)")
    assert (found.is_cpu, found.vendor, found.sm_count) == (True, "amd", threads)
    assert found.vector_tflop_per_s == {"fp32": 3.0, "bf16": 6.0, "int8": 24.0}
    assert (found.memory_bandwidth_gb_per_s, found.l2_bandwidth_gb_per_s, found.l2_cache_mb) == (80, 400, 64)
    assert (found.kernel_floor_us, found.achieved.vector, found.achieved.memory) == (4, 1, 1)
    host = found.host
    assert (host.launch_seconds, host.view_seconds, host.module_call_seconds) == (12e-6, 2e-6, 1.5e-6)
    assert host.library_seconds == pytest.approx(3e-6)
    told = found.sources
    assert told["kernel_floor_us"].endswith("; median of at least 9 repeats, quartiles within 2 %")
    assert told["memory_bandwidth_gb_per_s"].startswith("a copy of 4 last-level caches; median of at least 9")
    assert "CPU time; median of at least 9 repeats, quartiles within 2 % (products)" in told["default"]
    assert host.source.endswith("nested modules; median of at least 5 repeats, quartiles within 21 %")
    assert str(found.notes).endswith("No product in fp64: none. Repeats differ by 21 %: other work ran here; measure "
                                     "again without it.")  # fmt: skip
    faster = calibration.cpu_profile(Calibration(1, "wall", figures(**{"matmul call": Figure(9e-6, 0.0, 9)})))
    assert faster.host.library_seconds == 0


def test_an_unknown_gpus_profile_has_narrow_types_on_its_matrix_units(monkeypatch):
    found = SimpleNamespace(
        name="Quantum 9000", major=9, minor=5, multi_processor_count=77, total_memory=85e9, L2_cache_size=40 * 2**20
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    gpu = calibration.cuda_profile(Calibration(8, "wall", figures(op=Figure(1e-6, 0.2, 9))))
    assert "measure again" not in str(gpu.notes)
    assert (gpu.vendor, gpu.architecture, gpu.compute_capability) == ("nvidia", "compute capability 9.5", (9, 5))
    assert (gpu.vector_tflop_per_s, gpu.matrix_tflop_per_s) == ({"fp32": 3.0}, {"bf16": 6.0, "int8": 24.0})
    assert (gpu.sm_count, gpu.memory_gb, gpu.l2_cache_mb, gpu.memory_bandwidth_gb_per_s) == (77, 85, 40, 80)
    assert (gpu.kernel_floor_us, gpu.achieved.matrix, gpu.achieved.memory) == (3, 1, 1)
    assert gpu.sources["kernel_floor_us"].startswith("from one tiny kernel to the next in a CUDA graph; median of")


class Timer:
    """Takes a product for as long as its side cubed is in nanoseconds; notes what else it is to time."""

    device = "cpu"

    def __init__(self, *medians: float):
        self.sides, self.medians, self.timed = list[int](), list(medians), list[tuple[Any, int]]()

    def once(self, product: Any):
        self.sides.append(product.args[0].shape[0])
        return float(self.sides[-1] ** 3 * 1e-9)

    def median(self, function: Any, calls: int = 1):
        self.timed.append((function, calls))
        return Figure(self.medians.pop(0) if self.medians else self.once(function), 0.0, 5)


def test_products_grow_until_the_next_would_take_too_long(monkeypatch):
    """8 times 256 cubed are 0.13 s, 8 times 512 cubed 1.1."""
    monkeypatch.setattr(calibration, "SIDES", (128, 256, 512, 1024))
    timer: Any = Timer()
    assert calibration._matmul(timer, "fp32").value == pytest.approx(2e9)  # 2 s**3 FLOP in s**3 ns
    assert timer.sides == [128] * 3 + [256] * 3 + [512] * 3 + [512]
    assert [calibration._operand(8, dtype, "cpu").dtype for dtype in ("int8", "bf16", "fp64")] == [
        torch.int8, torch.bfloat16, torch.float64
    ]  # fmt: skip
    assert set(calibration._operand(99, "int8", "cpu").unique().tolist()) == set(range(-9, 10))


def test_what_is_timed_many_times_is_what_is_counted(monkeypatch):
    """Ops, products, views and modules, of which each is called as often as the time is divided by."""
    monkeypatch.setattr(calibration, "last_cache_bytes", lambda device: 4096)
    for measure, names in (
        (calibration._op, "add relu native_layer_norm _softmax"),
        (calibration._matmul_call, "addmm"),
        (calibration._view, "view transpose"),
    ):
        timer: Any = Timer(1.0)
        measure(timer)
        ((function, calls),) = timer.timed
        with torch.profiler.profile() as profiler:
            function()
        counts = {event.key: event.count for event in profiler.key_averages()}
        assert sum(counts[f"aten::{name}"] for name in names.split()) == calls == 200
    timer, called = Timer(1.0), list[object]()
    calibration._module_call(timer)
    ((function, calls),) = timer.timed
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    function()
    handle.remove()
    assert len(called) == calls == 200
    assert len(set(map(id, called))) == 10
    # Of a copy of four caches what is read and written in half a second; of one that fits half of it.
    assert [calibration._copy(Timer(0.5)).value, calibration._cache_copy(Timer(0.5)).value] == [2 * 16384 * 2, 4096]
    # Threads start in what an op with a grain for each takes longer than one with a grain alone, of which each is 200.
    forks: Any = Timer(5e-6, 8e-6)
    assert calibration._fork(forks).value == pytest.approx(3e-6)
    assert [calls for _, calls in forks.timed] == [200, 200]
    assert len(forks.timed[0][0]()) == len(forks.timed[1][0]()) == 200
    assert calibration._fork(Timer(5e-6, 4e-6)).value == pytest.approx(1e-7)


def test_a_timer_takes_the_median_of_at_least_five_and_goes_on_while_there_is_time(monkeypatch):
    """Of 1, 2, ... 7 s for two calls each: quartiles at 2, 4 and 6 s; the first call of all warms up."""
    now, lengths = [0.0], iter([100, *range(1, 100)])
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work():
        now[0] += next(lengths)

    timer = calibration._Timer("cpu", lambda: now[0], 27.5)
    assert timer.median(work, 2) == (2.0, pytest.approx(0.5), 7)
    assert calibration._Timer("cpu", lambda: now[0], 0.0).median(work).repeats == 5


def test_caches_and_the_name_of_a_cpu_are_what_the_system_says(monkeypatch, tmp_path):
    for number, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (3, "Unified", "2048K")]
    ):
        (tmp_path / f"index{number}").mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (tmp_path / f"index{number}" / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()  # of which nothing is told
    monkeypatch.setattr(calibration, "_CACHES", tmp_path)
    assert calibration._cache_sizes() == {1: 48 * 1024, 3: 2 * 2**20}
    assert calibration.last_cache_bytes("cpu") == 2 * 2**20
    monkeypatch.setattr(calibration, "_CACHES", tmp_path / "none")
    assert calibration.last_cache_bytes("cpu") == 32 * 2**20
    text = "vendor_id : {}\nmodel name\t: First: 9\n\nmodel name : Second\n"
    for vendor, name in (("GenuineIntel", "intel"), ("AuthenticAMD", "amd"), ("Other", "unknown")):
        system = SimpleNamespace(read_text=lambda vendor=vendor: text.format(vendor))
        monkeypatch.setattr(calibration, "Path", lambda _, system=system: system)
        assert calibration._cpu_model() == {"name": "First: 9", "vendor": name}
    monkeypatch.setattr(calibration, "Path", lambda _: SimpleNamespace(read_text=lambda: ""))
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv")
    assert calibration._cpu_model() == {"name": "riscv", "vendor": "unknown"}


def test_fields_that_say_nothing_are_left_out_of_a_profiles_file():
    assert calibration._without_empty({"a": [], "b": {}, "c": False, "d": 0, "e": {"f": [], "g": None}, "h": "x"}) == {
        "d": 0, "e": {"g": None}, "h": "x"
    }  # fmt: skip
