"""`flopmeter measure`: the work of each case, clocks and drivers that are given, and files, by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopmeter import load_hardware
from flopmeter.device.hardware import HardwareError
from flopmeter.measured import calibration
from flopmeter.measured.suite import programs, runner, stopwatch
from flopmeter.measured.suite.beside import BUSY, pairs, programs_table, table
from flopmeter.measured.suite.cases import Case, Maker, UnknownCaseError
from flopmeter.measured.suite.kernels import kernel_cases
from flopmeter.measured.suite.nvml import EnergyCount, Gpu
from flopmeter.measured.suite.prediction import copies_of, predict, work_of
from flopmeter.measured.suite.run_file import CaseResult, RunFileError, SuiteRun, read_run
from flopmeter.measured.suite.stopwatch import CpuWatch, CudaWatch, Effort, ProfiledKernel, Reading
from flopmeter.models.llama import Llama, LlamaConfig, rotary_table, rotate

H100 = load_hardware("h100-sxm5-80gb")

# --- which work the cases do

M, N, K = 32, 16, 64
ROW, MATRIX = 2 * 100, 2 * 10 * 100  # bytes in bf16 of 10 rows of 100 columns
WORK = {  # kind, type and sizes -> FLOPs (None: no convention of products), bytes
    ("matmul", "bf16", ("m", M), ("n", N), ("k", K)): (2 * M * N * K, 2 * (M * K + N * K + M * N)),
    ("matmul", "int8", ("m", M), ("n", N), ("k", K)): (2 * M * N * K, M * K + N * K + 4 * M * N),
    ("matmul", "fp8", ("m", M), ("n", N), ("k", K)): (None, M * K + N * K + 2 * M * N + 4),  # one scale, for both
    ("linear", "bf16", ("m", M), ("n", N), ("k", K)): (2 * M * N * K + M * N, 2 * (M * K + N * K + N + M * N)),
    ("bmm", "bf16", ("b", 3), ("m", M), ("n", N), ("k", K)): (6 * M * N * K, 6 * (M * K + N * K + M * N)),
    ("conv2d", "bf16", ("batch", 2), ("c_in", 4), ("c_out", 8), ("kernel", 3), ("size", 8), ("stride", 2),
     ("groups", 2), ("layout", "nchw")): (2 * (2 * 8 * 16) * 18, 2 * (2 * 4 * 64 + 8 * 18 + 2 * 8 * 16)),
    **{("elementwise", "bf16", ("op", op), ("elements", 1000)): (None, 1000 * nbytes) for op, nbytes in {
        "add": 6, "scale": 4, "gelu": 4, "silu": 4, "exp": 4, "to-fp32": 6, "copy": 4, "where": 6 + 1 + 5,
    }.items()},  # of which `where` compares, and then chooses
    **{("rows", "bf16", ("op", op), ("rows", 10), ("columns", 100)): (None, nbytes) for op, nbytes in {
        "softmax": 2 * MATRIX, "layer-norm": 2 * MATRIX + ROW + 2 * 4 * 10,  # mean and 1/deviation of each row, in fp32
        "sum": MATRIX + 2 * 10, "sum-of-columns": MATRIX + ROW, "max": MATRIX + (2 + 8) * 10, "cumsum": 2 * MATRIX,
        "topk": MATRIX + 3 * (2 + 8) * 80,  # which it then sorts
        "transpose": 2 * MATRIX, "cat": 3 * MATRIX,
    }.items()},
    ("embedding", "bf16", ("tokens", 10), ("vocabulary", 100), ("width", 16)): (0, 10 * (8 + 2 * 2 * 16)),
    ("batch-norm", "bf16", ("batch", 2), ("channels", 4), ("size", 8)):  # abs of the gain; both statistics in fp32
        (None, 2 * 2 * 4 + 2 * (2 * 2 * 4 * 64 + 3 * 4) + 2 * 4 * 4),
    ("max-pool", "bf16", ("batch", 2), ("channels", 4), ("size", 8)): (0, 2 * 4 * (2 * 64 + (2 + 8) * 16)),
}  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), WORK.items(), ids=lambda each: str(each[0]))
def test_each_kind_of_kernel_does_the_work_of_its_name(said: Any, expected: Any):
    kind, dtype, *sizes = said
    flops, nbytes = work_of(Case(kind, {**dict(sizes), "dtype": dtype}))
    assert (flops, nbytes) == (flops if expected[0] is None else expected[0], expected[1])


@pytest.mark.parametrize(("cached", "causal"), [(0, False), (24, False), (0, True)])
def test_attention_reads_keys_and_values_of_new_and_cached_tokens_once(cached: int, causal: bool):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "length": 8, "cached": cached, "width": 64, "causal": causal}
    report = predict(Case("attention", {**sizes, "dtype": "bf16"}), H100).report  # which runs it twice
    queries, keys = 2 * 4 * 8 * 64, 2 * 2 * (8 + cached) * 64
    assert report.bytes_read == 2 * 2 * (queries + 2 * keys)
    assert report.macs == 2 * 2 * queries * (8 + cached)
    assert (report.executed_flops < report.flops) == causal


def test_a_decoded_token_is_the_one_that_the_whole_sequence_predicts(monkeypatch):
    """The caches hold rotated keys and values of all earlier tokens, as a program would have left them."""
    torch.manual_seed(0)
    config = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=500)
    llama, tokens, caches = Llama(config), torch.randint(0, 500, (3, 6)), []
    with torch.no_grad():
        x = llama.token(tokens)
        cos, sin = rotary_table(6, config.head_width, config.rotary_base, like=x)
        for block in llama.blocks:
            normed = block.norm1(x)
            k, v = (layer(normed).unflatten(-1, (2, -1)).transpose(1, 2)
                    for layer in (block.attention.key, block.attention.value))  # fmt: skip
            caches += [rotate(k, cos, sin), v]
            x = block(x, cos, sin)
        for each in caches:
            each[:, :, -1] = 0.0  # the last place is the new token's
        wanted = llama(tokens)[:, -1:].argmax(-1)
    monkeypatch.setattr(programs, "LLAMA_1B", config)
    monkeypatch.setattr(programs, "_small_llama", lambda layers: llama)
    monkeypatch.setattr(programs, "_filled", lambda make, module: module)
    monkeypatch.setattr(Maker, "ids", lambda self, *shape, below: tokens[:, -1:])
    made = iter(caches)
    monkeypatch.setattr(Maker, "weight", lambda self, *shape: next(each for each in made if each.shape == shape))
    (run,), _ = copies_of(Case("decode", {"batch": 3, "cached": 5, "layers": 2, "dtype": "fp32"}), "cpu", lambda _: 1)
    assert torch.equal(run(), wanted)


def test_a_model_that_is_measured_has_weights_of_two_hundredths_and_norms_of_one():
    module = programs._filled(Maker("cpu", "fp32"), torch.nn.Sequential(torch.nn.Linear(99, 99), torch.nn.LayerNorm(9)))
    spreads = [round(each.std().item(), 2) for each in module.parameters()]
    assert spreads == [0.02, 0, 0, 0]
    assert all(bool((each == 1).all()) for each in list(module.parameters())[1:])


def test_sides_of_products_are_such_as_narrow_types_take():
    """torch._int_mm takes multiples of 8, torch._scaled_mm of 16; in other types a few are odd on purpose."""
    cases = [case for case in kernel_cases("bf16", ["fp32", "tf32", "fp64", "fp8", "int8"]) if case.kind == "matmul"]
    for case in cases:
        *sides, dtype = case.inputs.values()
        multiple = {"fp8": 16, "int8": 8, "bf16": 1}.get(str(dtype), 8)
        assert all(int(side) % multiple == 0 for side in sides), case.name
    assert {case.inputs["dtype"] for case in cases} == {"bf16", "fp32", "tf32", "fp64", "fp8", "int8"}
    assert {case.inputs["dtype"] for case in cases if case.clocks == "sustained"} == {"bf16", "fp32", "tf32", "fp8"}


def test_numbers_are_normal_or_below_their_bound_and_what_cannot_be_made_says_why():
    make = Maker("cpu", "bf16")
    x, ids = make.activation(1000), make.ids(1000, below=3)
    assert (x.dtype, ids.dtype, sorted(set(ids.tolist()))) == (torch.bfloat16, torch.int64, [0, 1, 2])
    assert 0.8 < float(x.float().std()) < 1.2
    assert Maker("cpu", "int8").weight(100).dtype is torch.int8
    assert copies_of(Case("linear", {"m": 8, "n": 3, "k": 5, "dtype": "bf16"}), "meta", lambda _: 2)[1] == 2 * (
        3 * 5 + 3
    )
    nhwc = Maker("meta", "bf16").activation(2, 3, 4, 4, order=torch.channels_last)
    assert nhwc.is_contiguous(memory_format=torch.channels_last)
    square = {"m": 8, "n": 8, "k": 8, "dtype": "bf16"}
    for case, why in (
        (Case("matmul", square | {"dtype": "fp9"}), "no type of torch's is named 'fp9'"),
        (Case("gemm", square), "no case of the suite is of the kind 'gemm'; known: matmul, linear"),
        (Case("bmm", square), "bmm m=8 n=8 k=8 bf16: these are not the inputs of its kind"),
        (Case("inference", {"model": "bart", "batch": 1, "dtype": "bf16"}), "no model of the suite is named 'bart'"),
    ):
        with pytest.raises(UnknownCaseError, match=why):
            copies_of(case, "meta", lambda _: 1)


# --- clocks


class Clock:
    """It goes by what runs, and notes how long the program slept."""

    def __init__(self, monkeypatch):
        self.seconds, self.rests, self.calls = 0.0, list[float](), 0
        monkeypatch.setattr("time.perf_counter", lambda: self.seconds)
        monkeypatch.setitem(calibration.CLOCKS, "wall", lambda: self.seconds)
        monkeypatch.setattr("time.sleep", self.rests.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(stopwatch, "_between_events", lambda work: self.took(work))
        monkeypatch.setattr(stopwatch, "_on_a_side_stream", lambda around: around())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)

    def run(self, seconds: float):
        def runs():
            self.seconds += seconds
            self.calls += 1

        return runs

    def took(self, work: Callable[[], object]):
        before = self.seconds
        work()
        return self.seconds - before


class Graph:
    """Replays what ran in its context in a tenth of the time."""

    def __init__(self, clock: Clock):
        self.clock, self.recorded = clock, 0.0

    def __enter__(self):
        self.recorded = self.clock.seconds

    def __exit__(self, *_: object):
        self.recorded = self.clock.seconds - self.recorded

    def replay(self):
        self.clock.seconds += self.recorded / 10


def test_a_cpus_sample_is_of_four_milliseconds_or_two_thousand_calls(monkeypatch):
    """Three copies of 1 ms: two turns are a sample of 6 ms, and 0.6 s hold 100 of them; of 1 us at most 2000 calls."""
    clock = Clock(monkeypatch)
    watch = CpuWatch(Effort(burst_seconds=0.0599, sustained_seconds=0.05), "wall")
    reading = watch.kernel([clock.run(1e-3)] * 3, "burst")
    assert reading[3:] == (100, 6, "wall clock", None, None)
    assert reading[:3] == pytest.approx((1e-3, 1e-3, 1e-3))
    assert clock.calls == 2 * 3 + 3 + 100 * 6
    assert watch.kernel([clock.run(1e-6)] * 3, "burst").calls == 1998
    assert watch.kernel([clock.run(1e-6)] * 3, "burst").samples == 200
    program = watch.program(clock.run(0.02))
    assert (program.samples, program.calls, program.seconds) == (5, 1, pytest.approx(0.02))


def test_a_gpus_burst_is_replays_of_a_graph_with_rests_of_nine_times_their_length(monkeypatch):
    """Launched, three copies take 3 ms, so that a graph holds two turns; it takes 0.6 ms, so that a sample is seven."""
    clock = Clock(monkeypatch)
    reading = CudaWatch(Effort(burst_seconds=0.03), None).kernel([clock.run(1e-3)] * 3, "burst")
    assert reading[3:6] == (8, 42, "events around replays of a CUDA graph")
    assert reading.seconds == pytest.approx(1e-4)
    assert clock.rests == pytest.approx([9 * 4.2e-3] * 8)
    clock.rests.clear()
    assert CudaWatch(Effort(burst_seconds=0.03), None).kernel([clock.run(8.0)], "burst").samples == 5
    assert clock.rests == [1.0] * 5


def test_a_sustained_clock_is_read_amid_two_halves_after_the_heat_with_the_power_of_both(monkeypatch):
    clock = Clock(monkeypatch)
    asked: list[float] = []

    class Board:
        def energy(self):
            return EnergyCount(100 * clock.seconds, clock.seconds)

        def sm_clock_mhz(self):
            asked.append(clock.seconds)
            return 1500

    watch = CudaWatch(Effort(sustained_seconds=0.024, heat_seconds=0.02), Board())
    reading = watch.kernel([clock.run(1e-3)] * 3, "sustained")
    assert reading[3:] == (6, 42, "events around replays of a CUDA graph", pytest.approx(100), 1500)
    assert clock.seconds - asked[0] == pytest.approx(3 * 4.2e-3)
    before = clock.calls
    program = watch.program(clock.run(5e-3))
    assert program[3:] == (6, 1, "host's clock, device idle before and after", pytest.approx(100), 1500)
    assert clock.calls - before == 2 + 4 + 6
    assert CudaWatch(Effort(0.01, 0.01, 0.01), None).program(clock.run(5e-3))[6:] == (None, None)


def test_an_op_that_cannot_be_recorded_is_timed_with_its_launches(monkeypatch):
    clock = Clock(monkeypatch)

    def refuses(graph: Any):
        raise RuntimeError("it waits\n for the device")

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    reading = CudaWatch(Effort(burst_seconds=0.03), None).kernel([clock.run(1e-3)] * 3, "burst")
    assert reading[4:6] == (6, "events, launches included, for no graph: it waits for the device")
    assert reading.seconds == pytest.approx(1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_profile_has_the_longest_twenty_and_the_seconds_of_all(monkeypatch, device: Any):
    def event(number: int, microseconds: float, kind: str = "CUDA"):
        told = {"self_cpu_time_total": 0.0, "self_device_time_total": 0.0}
        told[f"self_{'cpu' if device == 'cpu' else 'device'}_time_total"] = microseconds
        return SimpleNamespace(key=f"k{number}", count=number, device_type=SimpleNamespace(name=kind), **told)

    events = [*(event(number, number) for number in range(25)), *([event(99, 99, "CPU")] if device == "cuda" else [])]
    asked: list[Any] = []

    class Profiler:
        def __init__(self, activities: Any, acc_events: bool):
            asked.extend(activities)

        def __enter__(self):
            return self

        def __exit__(self, *_: object):
            pass

        def key_averages(self):
            return events

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    seconds, kernels = stopwatch.profiled(lambda: None, device)
    assert seconds == pytest.approx(300e-6)  # 0 + 1 + ... + 24; an op of the host takes none of the device
    assert kernels == [ProfiledKernel(f"k{number}", number, 1e-6 * number) for number in range(24, 4, -1)]
    assert [each.name for each in asked] == [device.upper()]


# --- the driver


NUMBERS = {
    ("EnforcedPowerLimit",): 650_000, ("MaxClockInfo", 1): 1980, ("MaxClockInfo", 2): 2619,
    ("ApplicationsClock", 1): 1755, ("ClockInfo", 1): 1410,
}  # fmt: skip


class Driver:
    """Answers each question of NVML by its name and arguments; 0 means that it did."""

    def __init__(self, fails: str = ""):
        self.fails = fails

    def nvmlInit_v2(self):  # noqa: N802
        return int(self.fails == "Init")

    def nvmlSystemGetDriverVersion(self, text: Any, length: int):  # noqa: N802
        text.value = b"550.54"
        return int(self.fails == "version")

    def __getattr__(self, name: str):
        name = name.removeprefix("nvmlDeviceGet")
        if name == "HandleByUUID":
            return lambda uuid, handle: int(uuid != b"GPU-1")

        def answer(handle: Any, *rest: Any):
            *arguments, into = rest
            into._obj.value = NUMBERS[(name, *arguments)]
            return int(self.fails == name)

        return answer


def test_the_facts_of_a_gpu_are_the_drivers_answers():
    facts = {
        "power_limit_w": 650.0, "most_sm_clock_mhz": 1980, "most_memory_clock_mhz": 2619,
        "application_sm_clock_mhz": 1755, "driver": "550.54",
    }  # fmt: skip
    gpu = Gpu(Driver(), "GPU-1")
    assert gpu.facts() == facts
    assert gpu.sm_clock_mhz() == 1410
    assert Gpu(Driver("EnforcedPowerLimit"), "GPU-1").facts() == facts | {"power_limit_w": None}
    assert Gpu(Driver("version"), "GPU-1").facts() == facts | {"driver": None}
    for unknown in (Gpu(Driver("Init"), "GPU-1"), Gpu(Driver(), "GPU-2")):
        assert set(unknown.facts().values()) == {None}


def test_a_machine_is_described_by_torch_the_driver_and_its_environment(monkeypatch):
    found = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, total_memory=85e9, L2_cache_size=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2", "TOKEN": "secret"})
    told = {
        "type": "cuda", "name": "NVIDIA A100-SXM4-80GB", "hardware": "a100-sxm4-80gb", "last_cache_bytes": 40,
        "environment": {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2"}, "compute_capability": "8.0",
        "memory_bytes": 85e9,
    }  # fmt: skip
    assert runner._device("cuda", None) == told | {"nvml": "not found"}
    assert runner._device("cuda", Gpu(Driver(), "GPU-1"))["driver"] == "550.54"
    found.name = "Quantum 9000"
    assert runner._device("cuda", None)["hardware"] is None


# --- files, and what was measured beside what is predicted

MATMUL = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"}
READING = Reading(2e-3, 1e-3, 3e-3, 7, 2, "by hand", 500.0, 1410)
RESULTS = [
    CaseResult(
        Case("matmul", MATMUL, "sustained"), "", READING, 3, 128, 1.5e-3, (ProfiledKernel("gemm", 2, 1e-3),), "", 64
    ),
    CaseResult(Case("bmm", {"b": 1, **MATMUL}), failed="OutOfMemoryError: of 80 GB"),
    CaseResult(Case("rows", {"op": "sum", "rows": 10, "columns": 10, "dtype": "fp32"}), "", READING, not_profiled="no"),
]


def suite_run(**changes: Any) -> SuiteRun:
    facts = {"type": "cuda", "name": "a GPU", "hardware": None}
    return SuiteRun(**{
        "device": facts, "versions": {"torch": "2"}, "method": ("by hand", "twice"), "started": "today",
        "results": RESULTS, **changes,
    })  # fmt: skip


def test_a_file_holds_all_that_was_measured(tmp_path):
    path, run = tmp_path / "run.json", suite_run(finished="now", calibration="failed: no time")
    run.write(path)
    assert vars(read_run(path)) == vars(run)
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(HardwareError, match=r"known for 'a GPU', and none was measured \(failed: no time\): give one"):
        run.hardware()
    with pytest.raises(RunFileError, match="cannot be written"):
        run.write(tmp_path / "no" / "run.json")
    path.write_text('{"format": "flopmeter measure 9"}')
    with pytest.raises(RunFileError, match="has the format 'flopmeter measure 9', this version reads"):
        read_run(path)


def predicted(case: Case, device: Any, copies: int) -> Any:
    """4 ms of wall-clock, of which the device is busy for 3."""
    if case.kind == "rows":
        raise ValueError("no  such\nthing")
    return SimpleNamespace(seconds=4e-3, low=1.8e-3, high=5e-3, device_seconds=3e-3, report=None, calls=2)


def test_each_case_is_put_beside_its_prediction_in_groups_by_hand(monkeypatch):
    """A matmul of 2 ms, once short and once at sustained clocks; a program of 8 ms, 6 of them busy; two that failed."""
    monkeypatch.setattr("flopmeter.measured.suite.beside.predict", predicted)
    program = CaseResult(
        Case("decode", {"batch": 1, "dtype": "bf16"}, "sustained"), "", READING._replace(seconds=8e-3),
        profiled_seconds=6e-3,
    )  # fmt: skip
    add = CaseResult(Case("elementwise", {"op": "add", "elements": 9, "dtype": "bf16"}), "", READING)
    tiny = add._replace(reading=READING._replace(seconds=1.9e-6))
    rows, others = pairs(suite_run(results=[*RESULTS, program, add, tiny]), H100)
    assert [(row.group, row.measured, row.predicted) for row in rows] == [
        ("matmul bf16, sustained", 2e-3, 4e-3), ("programs", 8e-3, 4e-3), (BUSY, 6e-3, 3e-3), ("add", 2e-3, 4e-3)
    ]  # fmt: skip
    assert (rows[2].low, rows[2].high) == pytest.approx((1.35e-3, 3.75e-3))
    assert [tuple(other) for other in others] == [
        ("bmm b=1 m=8192 n=8192 k=8192 bf16", "not measured: OutOfMemoryError: of 80 GB"),
        ("rows op=sum rows=10 columns=10 fp32", "not predicted: no such thing"),
    ]
    matmul, decode = rows[0], rows[1]
    (line,) = table([matmul, decode, rows[2]._replace(low=0.0, high=1.0)], lambda _: "all").splitlines()[2:]
    assert line.split() == ["all", "3", "66.7", "50.0", "0.50", "67"]  # errors of 100, 50 and 50 %
    (line,) = programs_table(rows).splitlines()[2:]
    assert line.split() == ["decode", "batch=1", "bf16", "8", "4", "0.50", "no"]
    assert programs_table([decode._replace(measured=1.8e-3)]).split()[-1] == "yes"
    assert programs_table([decode._replace(measured=1.7e-3)]).split()[-1] == "no"
    assert programs_table([decode._replace(measured=5.1e-3)]).split()[-1] == "no"


def test_a_run_is_tried_again_where_it_failed_by_kinds_and_for_a_quarter_if_quick(monkeypatch, tmp_path):
    cases = [Case("matmul", {"m": 8, "n": 8, "k": k, "dtype": "fp32"}) for k in range(1, 7)]
    large = [cases[0]._replace(inputs={"m": 2**11, "n": 2**10, "k": k, "dtype": "fp32"}) for k in (1430, 1431)]
    adds = [Case("elementwise", {"op": "add", "elements": n, "dtype": "fp32"}) for n in (10, 2 * 10**7)]
    monkeypatch.setattr(runner, "_all_cases", lambda device: [*cases, *large, *adds])
    assert runner.cases_of("cpu") == [*cases, large[0], adds[0]]  # within 6 GFLOP and 200 MB
    assert runner.cases_of("cpu", quick=True) == [cases[0], cases[4], adds[0]]
    assert runner.cases_of("cpu", kinds=["elementwise"]) == adds[:1]
    assert runner.cases_of("cuda") == [*cases, *large, *adds]

    measured: list[Case] = []
    efforts: list[float] = []

    def result(case: Case, device: Any, watch: Any):
        measured.append(case)
        efforts.append(watch._effort.burst_seconds)
        return CaseResult(case, "no" if len(measured) == 2 else "", None if len(measured) == 2 else READING)

    monkeypatch.setattr(runner, "_result", result)
    monkeypatch.setattr(runner, "_calibrated", lambda *_: "failed: no time")
    path = tmp_path / "run.json"
    runner.measure(path, quick=True, kinds=["matmul"])
    assert measured == [cases[0], cases[4]]
    assert efforts == [0.02, 0.02]
    again = runner.measure(path, kinds=["matmul"], resume=True)
    assert measured[2:] == [*cases[1:], large[0]]  # the first was measured, the fifth failed
    assert efforts[2:] == [0.06] * 6
    assert [each.failed for each in again.results] == [""] * 7
    text = path.read_text()
    path.write_text(text.replace(calibration.cpu_name(), "another"))
    with pytest.raises(RunFileError, match="was measured on another: give another file"):
        runner.measure(path, resume=True)
