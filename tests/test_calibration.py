"""`flopmeter calibrate`: this machine's figures, and the profile that they make."""

import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter import HardwareError, cli, load_hardware
from flopmeter.measured import as_yaml, calibrate, calibration
from flopmeter.measured.calibration import CLOCKS, Calibration, Figure, cuda_profile


@pytest.fixture(scope="module")
def this_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SIDES", (128, 256))
        return calibrate(budget_seconds=1)


def test_the_profile_of_this_machine_is_one_that_is_read_back(this_cpu, tmp_path):
    path = tmp_path / f"{this_cpu.name}.yaml"
    path.write_text(as_yaml(this_cpu))
    assert load_hardware(path) == this_cpu
    assert load_hardware(path).is_cpu


class Machine(TorchDispatchMode):
    """Its clock goes by what runs: 2 TFLOP/s in fp32 and 4 in every other type, copies at 50 GB/s; else 1 µs a view
    and 5 an op."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def now(self):
        self.seconds += 1e-12  # two looks at a clock are never the same
        return self.seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "_int_mm"):
            (m, k), n = args[0].shape, args[1].shape[1]
            self.seconds += 2 * m * k * n / (2e12 if args[0].dtype is torch.float32 else 4e12)
        elif name == "copy_":
            self.seconds += 2 * args[0].nbytes / 50e9
        else:
            self.seconds += 1e-6 if name in ("view", "transpose", "t") else 5e-6
        return func(*args, **(kwargs or {}))


def test_a_machine_gets_the_rates_that_it_has(monkeypatch):
    machine = Machine()
    monkeypatch.setitem(CLOCKS, "wall", machine.now)
    monkeypatch.setattr(calibration, "SIDES", (128, 256))
    with machine:
        profile = calibrate(budget_seconds=0.1)
    rates = {dtype: profile.contraction_peak(dtype).flop_per_s for dtype in ("fp64", "fp32", "bf16", "int8")}
    assert rates == pytest.approx({"fp64": 4e12, "fp32": 2e12, "bf16": 4e12, "int8": 4e12}, rel=1e-3)
    assert profile.bandwidth_bytes_per_s == pytest.approx(50e9, rel=1e-3)
    host = profile.host
    assert (host.view_seconds, host.launch_seconds) == pytest.approx((1e-6, 5e-6), rel=1e-3)


def test_ops_views_and_module_calls_of_this_machine_take_time(this_cpu):
    host = this_cpu.host
    assert min(host.view_seconds, host.launch_seconds, host.module_call_seconds) > 1e-8


def test_the_profile_says_when_how_and_with_what_it_was_measured(this_cpu):
    told = " ".join([*this_cpu.sources.values(), this_cpu.host.source])
    for part in ("flopmeter calibrate, 20", f"torch {torch.__version__}", "thread", "median of at least", "quartiles"):
        assert part in told
    assert this_cpu.sm_count == torch.get_num_threads()


def test_cpu_time_stands_still_while_others_run_and_tells_of_one_thread_only():
    """0.2 s of sleep in a measured function count on the wall clock alone."""
    sleeping = {clock: calibration._Timer("cpu", now, 0).once(lambda: time.sleep(0.2)) for clock, now in CLOCKS.items()}
    assert sleeping["wall"] >= 0.2
    assert sleeping["cpu"] < 0.1
    with pytest.raises(ValueError, match="the CPU clock measures one thread on the CPU"), threads(2):
        calibrate(clock="cpu")


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_a_calibration_leaves_nothing_behind():
    before = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads(), torch.is_inference_mode_enabled()
    calibrate(budget_seconds=0.01)
    assert before == (
        torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads(), torch.is_inference_mode_enabled()
    )  # fmt: skip


# --- a GPU, from figures ------------------------------------------------------------------------------------------


def on_a_gpu(monkeypatch, name, spread=0.01):
    """The profile of a GPU that sustained 10 TFLOP/s in fp32, 250 in bf16 and 1500 GB/s."""
    found = SimpleNamespace(
        name=name, major=8, minor=0, multi_processor_count=108, total_memory=85e9, L2_cache_size=40 * 2**20
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    values = {
        "product fp32": 10e12, "product bf16": 250e12, "copy": 1500e9, "op": 5e-6, "matmul call": 25e-6, "view": 1e-6,
        "module call": 2e-6, "kernel": 2e-6,
    }  # fmt: skip
    figures = {what: Figure(value, spread, 7) for what, value in values.items()}
    return cuda_profile(Calibration(8, "wall", figures, {"fp64": "not compiled for this device"}))


def test_a_known_gpu_keeps_its_spec_and_gets_measured_fractions(monkeypatch):
    """An A100's spec: 19.5 TFLOP/s fp32, 312 bf16, 2039 GB/s."""
    gpu, spec = on_a_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB"), load_hardware("a100-sxm4-80gb")
    assert gpu.contraction_peak("bf16").flop_per_s == spec.contraction_peak("bf16").flop_per_s == 312e12
    assert gpu.contraction_peak("bf16").sustained_flop_per_s == pytest.approx(250e12, rel=1e-3)
    assert gpu.vector_peak("fp32").sustained_flop_per_s == pytest.approx(10e12, rel=1e-3)
    assert gpu.sustained_bandwidth_bytes_per_s == pytest.approx(1500e9, rel=1e-3)
    assert (gpu.kernel_floor_seconds, gpu.host.launch_seconds) == (2e-6, 5e-6)
    assert gpu.host.library_seconds == pytest.approx(20e-6)  # of a matmul's 25
    assert gpu.memory_bytes == spec.memory_bytes
    assert "flopmeter calibrate" in gpu.achieved.source
    assert "No product in fp64: not compiled for this device." in gpu.notes


def test_an_unknown_gpu_gets_a_profile_of_measured_rates(monkeypatch, tmp_path):
    gpu = on_a_gpu(monkeypatch, "Quantum 9000")
    path = tmp_path / "this-gpu.yaml"
    path.write_text(as_yaml(gpu))
    assert load_hardware(path) == gpu
    assert (gpu.title, gpu.sm_count, gpu.compute_capability) == ("Quantum 9000", 108, (8, 0))
    assert gpu.contraction_peak("bf16").sustained_flop_per_s == 250e12
    assert gpu.sustained_bandwidth_bytes_per_s == 1500e9


def test_a_profile_of_a_busy_machine_says_so(monkeypatch):
    assert "measure again" not in (on_a_gpu(monkeypatch, "Quantum 9000").notes or "")
    assert "Repeats differ by 50 %: other work ran here" in on_a_gpu(monkeypatch, "Quantum 9000", spread=0.5).notes


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_a_profile_that_other_commands_take(tmp_path):
    """In a process of its own, whose output is no terminal: it shows no progress."""
    code = (
        "import sys; from flopmeter import cli; from flopmeter.measured import calibration; "
        "calibration.SIDES = (128,); sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = ["calibrate", "-o", str(tmp_path / "mine.yaml"), "--seconds", "1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {tmp_path}/mine.yaml: use it as --hardware {tmp_path}/mine.yaml\n"
    assert cli.main(["table", "encoder-layer", "--dtype", "fp32", "--hardware", str(tmp_path / "mine.yaml")]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "mine.txt"], "mine.txt must end in .yaml"),
        (["-o", "/nowhere/mine.yaml"], "/nowhere/mine.yaml cannot be written: there is no folder /nowhere"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--seconds", "0"], "expected a positive whole number"),
    ],
)
def test_a_wrong_argument_is_one_line_and_told_before_anything_is_measured(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr("flopmeter.cli.file_commands.calibrate", lambda *_, **__: pytest.fail("it measured"))
    assert cli.main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_machine_without_a_gpu_says_so():
    with pytest.raises(HardwareError, match="torch finds no CUDA device here"):
        calibrate("cuda")
