"""`flopmeter measure`: the suite on a machine whose speed is known, on a pretended GPU, and what its file survives."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_calibration import Machine

import flopmeter
from flopmeter import cli, load_hardware
from flopmeter.device.schema import plain
from flopmeter.measured.calibration import CLOCKS
from flopmeter.measured.suite import runner, stopwatch
from flopmeter.measured.suite.beside import pairs
from flopmeter.measured.suite.cases import Case, Maker
from flopmeter.measured.suite.kernels import KERNELS, kernel_cases
from flopmeter.measured.suite.nvml import Gpu
from flopmeter.measured.suite.prediction import CASES, copies_of, predict, work_of
from flopmeter.measured.suite.programs import PROGRAMS, cpu_program_cases, program_cases
from flopmeter.measured.suite.run_file import CaseResult, SuiteRun, read_run
from flopmeter.measured.suite.stopwatch import CudaWatch, Effort

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import validate_measured

SQUARE = Case("matmul", {"m": 256, "n": 256, "k": 256, "dtype": "fp32"})
ADD = Case("elementwise", {"op": "add", "elements": 1000, "dtype": "fp32"})
SUM = Case("rows", {"op": "sum", "rows": 10, "columns": 100, "dtype": "fp32"})
BROKEN = {"elements": 10, "dtype": "fp32"}
BRIEF = Effort(burst_seconds=0.001, sustained_seconds=0.01, heat_seconds=0.01)


@pytest.fixture
def small(monkeypatch):
    """A suite of three cases, in no time, beside the profile of a machine of 2 TFLOP/s and 50 GB/s."""
    profile = load_hardware("cpu-epyc-9654").replace(
        title="a machine", vector_tflop_per_s={"fp32": 2}, memory_bandwidth_gb_per_s=50, kernel_floor_us=0.01,
        l2_cache_mb=None, achieved={"vector": 1.0, "memory": 1.0, "source": "this test"},
        host={"launch_seconds": 5e-6, "library_seconds": 0},
    )  # fmt: skip
    monkeypatch.setattr(runner, "_calibrated", lambda *rest: plain(profile))
    monkeypatch.setattr(runner, "Effort", lambda: BRIEF)
    monkeypatch.setattr(stopwatch, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(runner, "_all_cases", lambda device: [SQUARE, ADD, SUM])


def test_on_a_machine_of_known_speed_that_speed_is_measured_and_predicted(small, monkeypatch, tmp_path):
    machine = Machine()  # a product at 2 TFLOP/s, any other op in 5 µs
    monkeypatch.setitem(CLOCKS, "wall", machine.now)
    with machine:
        run = runner.measure(tmp_path / "run.json")
    seconds = {result.case.name: result.reading.seconds for result in run.results}
    assert seconds[SQUARE.name] == pytest.approx(2 * 256**3 / 2e12, rel=1e-3)
    assert seconds[ADD.name] == pytest.approx(5e-6, rel=1e-3)
    rows, others = pairs(run, run.hardware())
    assert not others
    predicted = {row.result.case.name: row.predicted for row in rows}
    assert predicted[ADD.name] == pytest.approx(5e-6, rel=0.1)  # 12 kB more, at 50 GB/s
    assert predicted[SQUARE.name] > seconds[SQUARE.name]  # its operands are packed, too


def test_a_file_that_was_written_is_read_back_as_it_was(small, tmp_path):
    run = runner.measure(tmp_path / "run.json")
    assert vars(read_run(tmp_path / "run.json")) == vars(run)
    document = json.loads((tmp_path / "run.json").read_text())
    assert {"format", "device", "versions", "method", "started", "finished", "calibration"} <= set(document)
    for case in document["cases"]:
        assert case["seconds_min"] <= case["seconds"] <= case["seconds_max"]
        assert case["samples"] >= 5


def test_what_was_measured_survives_a_crash_and_is_not_measured_again(small, monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    real = runner._measured

    def crashes_at_the_third(case, *rest):
        if case == SUM:
            raise KeyboardInterrupt
        return real(case, *rest)

    monkeypatch.setattr(runner, "_measured", crashes_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        runner.measure(path)
    left = read_run(path)
    assert [result.case for result in left.results] == [SQUARE, ADD]
    assert left.finished is None
    measured = []
    monkeypatch.setattr(runner, "_measured", lambda case, *rest: measured.append(case) or real(case, *rest))
    assert runner.measure(path, resume=True).finished is not None
    assert measured == [SUM]
    assert read_run(path).results[:2] == left.results


def test_a_case_that_cannot_run_says_why_and_the_rest_goes_on(small, monkeypatch, tmp_path):
    def broken(make, elements):
        x = make.activation(elements)
        return lambda: x.cuda() if make.device == "cpu" else x + 1

    monkeypatch.setitem(CASES, "broken", broken)
    monkeypatch.setattr(runner, "_all_cases", lambda device: [ADD._replace(kind="broken", inputs=BROKEN), ADD])
    run = runner.measure(tmp_path / "run.json")
    failed, added = run.results
    assert failed.reading is None
    assert "Error" in failed.failed  # torch's own words for a build without CUDA
    assert added.reading is not None
    _, others = pairs(run, run.hardware())
    assert [other.name for other in others] == ["broken elements=10 fp32"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "-o runs/this-gpu.json"),
        (["-o", "there.json"], "there.json is there already: resume it (--resume)"),
        (["-o", "nowhere/run.json"], "there is no folder nowhere"),
        (["-o", "run.json", "--cases", "gemm"], "no case is of the kind gemm; there are matmul"),
        (["-o", "run.json", "--device", "cuda"], "torch finds no CUDA device here"),
        (["-o", "run.json", "--hardware", "h1000"], "h1000"),
        (["--show", "missing.json"], "missing.json cannot be read"),
        (["--show", "there.json"], "there.json is no file of `flopmeter measure`"),
        (["--show", "there.json", "--quick"], "--show measures nothing: leave --quick out"),
    ],
)
def test_a_wrong_use_is_one_line_that_says_what_to_do(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("{}")
    assert cli.main(["measure", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_the_command_shows_measured_beside_predicted(small, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert cli.main(["measure", "-o", str(path)]) == 0
    assert cli.main(["measure", "--show", str(path)]) == 0
    for printed in capsys.readouterr().out.split("measured on ")[1:]:
        lines = [line.split() for line in printed.splitlines()]
        for kind in ("matmul", "add", "sum"):
            assert any(line[:1] == [kind] for line in lines), kind
    assert cli.main(["measure", "--show", str(path), "--hardware", "h100-sxm5-80gb"]) == 2
    assert "measured on a CPU, but h100-sxm5-80gb is a GPU" in capsys.readouterr().err


# --- the cases


def test_weights_are_others_in_each_copy_and_activations_the_same():
    case = Case("matmul", {"m": 8, "n": 64, "k": 64, "dtype": "fp32"})
    touched = []
    real = Maker._filled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Maker, "_filled", lambda self, shape, *rest: touched.append(shape) or real(self, shape, *rest))
        runs, weight_bytes = copies_of(case, "cpu", lambda nbytes: 3)
    assert (len(runs), weight_bytes) == (3, 64 * 64 * 4)
    assert sorted(touched) == [(8, 64), (64, 64), (64, 64), (64, 64)]


def test_copies_fill_the_cache_twice_where_sixteen_of_them_do():
    mb = 2**20
    assert [runner._copies(nbytes, 32 * mb) for nbytes in (0, mb, 4 * mb, 24 * mb, 100 * mb)] == [1, 1, 16, 3, 1]


def test_the_work_of_a_case_is_that_of_its_op():
    assert work_of(SQUARE) == (2 * 256**3, 3 * 256**2 * 4)
    assert work_of(ADD) == (1000, 3 * 1000 * 4)


def first_of_each_kind(cases):
    return list({case.inputs.get("op", case.kind): case for case in reversed(cases)}.values())


@pytest.mark.parametrize(
    "case", first_of_each_kind(kernel_cases("bf16", ["fp32", "fp8", "int8"])), ids=lambda case: case.name
)
def test_each_kind_of_kernel_is_predicted_for_a_gpu(case):
    prediction = predict(case, load_hardware("h100-sxm5-80gb"), copies=2)
    assert not prediction.report.uncounted
    assert 0 < prediction.low < prediction.seconds < prediction.high


def test_a_gpu_runs_ten_programs_and_a_cpu_their_like():
    of_gpu, of_cpu = program_cases("bf16"), cpu_program_cases()
    assert len(of_gpu) == len(of_cpu) == 10
    assert [case.kind for case in of_gpu] == [case.kind for case in of_cpu]
    names = [case.name for case in (*kernel_cases("bf16", ["fp16", "fp32", "tf32", "fp64", "fp8", "int8"]), *of_gpu)]
    assert len(names) == len(set(names))
    assert set(CASES) == set(KERNELS) | set(PROGRAMS)


def test_a_decoding_step_reads_weights_and_cached_tokens_once():
    case = Case("decode", {"batch": 1, "cached": 1023, "layers": 1, "dtype": "bf16"}, "sustained")
    report = predict(case, load_hardware("h100-sxm5-80gb")).report
    width, hidden, kv_width, vocabulary = 2048, 5632, 256, 32000
    weights = width * (2 * width + 2 * kv_width + 3 * hidden + vocabulary)
    matmuls = sum(row.bytes_read for row in report.rows("class") if row.name.endswith("tensor contraction"))
    assert matmuls == pytest.approx(2 * weights, rel=0.01)  # two bytes each; the activations are next to nothing


# --- a GPU


def test_watts_are_the_energy_counters_millijoules_over_the_time(monkeypatch):
    class Driver:
        millijoules = 5_000_000

        def nvmlInit_v2(self):  # noqa: N802
            return 0

        def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
            return 0 if uuid == b"GPU-1" else 6

        def nvmlDeviceGetTotalEnergyConsumption(self, handle, answer):  # noqa: N802
            answer._obj.value = self.millijoules
            return 0

        def nvmlDeviceGetEnforcedPowerLimit(self, handle, answer):  # noqa: N802
            answer._obj.value = 700_000
            return 0

    driver, times = Driver(), iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    gpu = Gpu(driver, "GPU-1")
    before = gpu.energy()
    driver.millijoules += 1_000_000  # a kilojoule in two seconds
    assert gpu.energy().watts_since(before) == 500
    assert gpu.sm_clock_mhz() is None  # this driver has no such question
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "_driver", lambda self: None)
        assert gpu.facts()["power_limit_w"] == 700
    assert Gpu(driver, "MIG-1").energy() is None


def test_on_a_pretended_gpu_events_around_a_graph_tell_the_predicted_time():
    """Its events tell what flopmeter predicts: so this is whether the stopwatch divides and repeats as it says."""
    case = Case("matmul", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"}, "sustained")
    device = load_hardware("h100-sxm5-80gb")
    with flopmeter.cuda(device):
        result = runner._result(case, "cuda", CudaWatch(BRIEF, None))
    assert result.failed == ""
    assert result.reading.method == "events around replays of a CUDA graph"
    assert result.reading.seconds == pytest.approx(predict(case, device, result.copies).seconds, rel=0.05)


def test_a_run_under_another_power_limit_is_predicted_under_it(monkeypatch):
    case = Case("matmul", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"}, "sustained")
    reading = SimpleNamespace(seconds=2e-3, calls=2)
    run = SimpleNamespace(results=[SimpleNamespace(case=case, reading=reading, copies=1)], is_cpu=False)
    device = load_hardware("h100-sxm5-80gb")
    seconds = []
    for limit in (700.0, 300.0):
        run.device = {"power_limit_w": limit}
        ((row,), _) = pairs(run, device)
        seconds.append(row.predicted)
    assert seconds[1] > 1.3 * seconds[0]
    assert seconds[0] == predict(case, device).seconds


def test_a_sample_that_is_too_long_for_a_burst_is_predicted_at_sustained_clocks():
    case = Case("matmul", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"}, "burst")
    device = load_hardware("h100-sxm5-80gb")
    predicted = []
    for calls in (5, 50):  # of 2 ms each
        result = SimpleNamespace(case=case, reading=SimpleNamespace(seconds=2e-3, calls=calls), copies=1)
        run = SimpleNamespace(results=[result], is_cpu=False, device={})
        ((row,), _) = pairs(run, device)
        predicted.append(row.predicted)
    assert predicted == [
        predict(case, device).seconds,
        predict(case._replace(clocks="sustained"), device).seconds,
    ]
    assert predicted[1] > 1.05 * predicted[0]


def test_validate_reads_a_gpus_file_and_compares_seconds_watts_and_memory(tmp_path):
    """Half of what is predicted, so that each error is 100 %."""
    device = load_hardware("h100-sxm5-80gb")
    kernel = Case("matmul", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"}, "sustained")
    program = Case("decode", {"batch": 1, "cached": 1023, "layers": 1, "dtype": "bf16"}, "sustained")
    results = []
    for case in (kernel, program):
        found = predict(case, device)
        reading = stopwatch.reading_of([found.seconds / 2], 1, "by hand", found.report.watts / 2)
        is_program = case is program
        results.append(CaseResult(
            case, "", reading, profiled_seconds=found.device_seconds / 2,
            peak_memory_bytes=found.report.peak_memory_bytes // 2 if is_program else None,
        ))  # fmt: skip
    facts = {"type": "cuda", "name": device.title, "hardware": device.name}
    calibrated = plain(device.replace(host={"relative_time": 3.0}))
    path = tmp_path / "h100.json"
    SuiteRun(facts, {"torch": "2"}, ("by hand",), "today", "today", calibrated, results).write(path)
    tables = dict(validate_measured.measured_suite(path, None))
    assert set(tables) == {
        "measured kernels", "measured programs", "measured watts", "measured peak memory",
        "measured programs, with the calibrated host",
    }  # fmt: skip
    for title, rows in tables.items():
        for row in rows:
            assert row.error == pytest.approx(1.0, rel=1e-6) or title.endswith("host"), (title, row)
    (own,) = tables["measured programs, with the calibrated host"]
    assert own.error > 2  # this program waits for the host, which takes three times as long there


def test_tf32_is_on_for_the_cases_named_so_and_for_no_others():
    case = Case("matmul", {"m": 4096, "n": 4096, "k": 4096, "dtype": "tf32"})
    device = load_hardware("a100-sxm4-80gb")
    plain = predict(case._replace(inputs={**case.inputs, "dtype": "fp32"}), device)
    assert predict(case, device).seconds < plain.seconds / 4  # 156 TFLOP/s against 19.5
    assert not torch.backends.cuda.matmul.allow_tf32
