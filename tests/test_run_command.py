"""`flopmeter run`: the script's own output and exit code, the report beside it, and one line for what went wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from flopmeter.cli import main

PROGRAMS = Path(__file__).parent / "programs"
TRAINS = """
import sys, torch
print("arguments", sys.argv[1:], __name__)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    print("step", step)
"""
WITHOUT_A_FAKE = (  # as an op in C++ looks that is compiled for CUDA
    "import torch; ops = torch.library.Library('script', 'DEF'); ops.define('no_fake(Tensor x) -> Tensor'); "
    "torch.ops.script.no_fake(torch.ones(1, device='cuda'))"
)
STARTS_PYTHON = "import subprocess, sys; subprocess.run([sys.executable, 'nowhere.py', '--x'], check=True)"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def test_the_output_is_the_scripts_own_and_the_report_goes_to_stderr(script, capsys, tmp_path):
    assert main(["run", script(TRAINS), "--batch_size", "64", "-o", "mine"]) == 0
    out, err = capsys.readouterr()
    assert out == "arguments ['--batch_size', '64', '-o', 'mine'] __main__\nstep 0\nstep 1\n"
    assert err.startswith("train.py: one steady step, the last of 3 (marked by optimizer.step())")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_report_may_go_to_a_file_in_any_format(script, capsys, tmp_path):
    assert main(["run", "--format", "json", "-o", "report.json", "--steps", "2", script(TRAINS)]) == 0
    assert capsys.readouterr().err == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["steps"] == 2
    assert report["totals"]["macs"] == 2 * 8 * 64 * 64
    assert set(report["run"]["parts"]) == {"setup", "first step", "steady step"}


def test_a_module_runs_with_m(script, capsys, tmp_path, monkeypatch):
    script(TRAINS, "trains_as_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "-m", "trains_as_module", "--x"]) == 0
    assert "arguments ['--x'] __main__" in capsys.readouterr().out


def test_packages_of_a_module_are_imported_when_its_arguments_are_there(tmp_path, capsys, monkeypatch):
    """torchtitan's settings are read where its package is imported."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "reads_its_arguments"
    package.mkdir()
    (package / "__init__.py").write_text("import sys, torch\nfound = sys.argv[1:], torch.cuda.is_available()")
    (package / "train.py").write_text(TRAINS + "\nfrom reads_its_arguments import found\nprint(found)")
    assert main(["run", "--steps", "20", "-m", "reads_its_arguments.train", "--x"]) == 0
    assert "(['--x'], True)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nosuch.py"], "no such script: nosuch.py"),
        ([], "name a script: flopmeter run train.py"),
        (["-m", "no.such.module"], "no module named no.such.module: install it here"),
        (["--hardware", "h100", __file__], "h100-sxm5-80gb"),
        (["--steps", "0", "x.py"], "--steps"),
        (["BATCH=8", "python", "train.py"], "put it before flopmeter"),
        (["bash", "train.sh"], "give flopmeter run the command in it"),
        (["srun", "python", "train.py"], "torchrun --nproc-per-node 8"),
        (["uv", "run", "train.py"], "uv run flopmeter run train.py"),
        (["python", "-c", "print()"], "put the code into a file"),
        (["ls"], "ls is no Python script"),
        ([str(PROGRAMS)], "is a folder: name the script in it"),
    ],
)
def test_what_cannot_run_ends_in_one_line(arguments, told, capsys):
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_module_of_an_installed_package_is_found_beside_a_clone_of_its_repository(tmp_path, script, monkeypatch):
    """The clone has the package's name, and no `__init__.py`: Python takes the installed one, from any folder."""
    (tmp_path / "site" / "axe").mkdir(parents=True)
    (tmp_path / "site" / "axe" / "__init__.py").touch()
    (tmp_path / "site" / "axe" / "train.py").write_text(TRAINS)
    (tmp_path / "axe" / "docs").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert main(["run", "-m", "axe.train"]) == 0


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("print('on the CPU only')", 2, "ran no op on the device named cuda: move its model"),
        ("import no_such_package", 1, "pip install no_such_package"),
        ("import flash_attn_3_nowhere", 1, "pip install"),
        ("import apex", 1, "apex is compiled for CUDA, and not installed: let flopmeter stand in with --shim apex"),
        ("import rotary_emb", 1, "rotary_emb is compiled for CUDA, and not installed: it is a part of flash_attn's"),
        ("raise ImportError('Please install Flash Attention: pip install flash-attn')", 1, "with --shim flash_attn"),
        ("raise ImportError('the package for FlashAttention2 is not there')", 1, "with --shim flash_attn"),
        ("raise ImportError('the package for FlashAttention3 is not there')", 1, "with --shim flash_attn_interface"),
        ("raise ImportError('the package for FlashAttention4 is not there')", 1, "with --shim flash_attn_4"),
        ("raise ImportError('it requires bitsandbytes')", 1, "stand in with --shim bitsandbytes"),
        ("raise ImportError('no kernels, and no apexes')", 1, "what it names is to be installed"),
        ("import transformer_engine.pytorch", 1, "let flopmeter stand in with --shim transformer_engine"),
        ("from os import nothing_there", 1, "it comes with a newer Python than this one (3."),
        ("from yaml import nothing_there", 1, "does not have it: install the version that the script wants"),
        ("from train import nothing_there", 1, "train.py hides a package that is called train too: rename the file"),
        ("import yaml.nothing_there", 1, "this version of yaml does not have it"),
        ("import sys; sys.exit(2)", 2, "--synthetic went to the script: options of flopmeter run come before its name"),
        ("open('data/train.bin')", 1, "data/train.bin is not here; the script needs its data"),
        ("assert __import__('os').path.exists('train.txt')", 1, "is not here; the script needs its data and weights"),
        ("assert __import__('os').path.isdir('data')", 1, "an empty file of that name may do"),
        ("import os; os.environ['LOCAL_RANK']", 1, "-- torchrun --nproc-per-node 1 "),
        ("assert 1 == 2", 1, "AssertionError, which is not flopmeter's"),
        ("raise RuntimeError('Dataset not found.')", 1, "or --synthetic for data sets"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", 1, "install the two of one release"),
        ('raise RuntimeError("Couldn\'t load custom C++ ops.")', 1, "install the two of one release"),
        ("raise OSError('Could not load this library: x.so')", 1, "package of this library is built for another torch"),
        ("raise RuntimeError('Error downloading train-images')", 1, "or --synthetic for data sets"),
        ("raise RuntimeError('there is no internet connection')", 1, "the script needs its data and weights"),
        ("import cv2_nowhere", 1, "(pip install cv2_nowhere)"),
        ("raise ModuleNotFoundError('', name='patoolib.x')", 1, "(pip install patool)"),
        ("raise ModuleNotFoundError('', name='serial')", 1, "(pip install pyserial)"),
        ("import subprocess; subprocess.run(['no-such-program'])", 1, "starts no-such-program, which is not installed"),
        (STARTS_PYTHON, 1, "starts another Python, which is not metered: flopmeter run nowhere.py --x"),
        ("from .config import width", 1, "flopmeter run -m package.module, in the folder of the package"),
        ("import torch; [torch.zeros(1).cuda(i) for i in range(2)]", 1, "each GPU is a torchrun (--gpus N)"),
        ("raise ImportError('get thing first')", 1, "its message is above; what it names is to be installed"),
        ("from torch._six import inf", 1, "the script wants another torch than this one"),
        ("import torch; torch.cuda.temperature()", 1, "the device named cuda does not do this"),
        ("import torch; torch.empty(1 << 40, device='cuda')", 1, "--oom=report goes on"),
        ("import torch; x = torch.randn(4, device='cuda'); x[x > 0]", 1, "--mask-fraction 0.5"),
        ("import torch; torch.ones(4, 4, device='cuda') @ torch.ones(4, 4)", 1, "all of them have to be on one device"),
        (
            "import torch; torch.ones(4, 4, device='cuda').to_sparse_csr()",
            1,
            "make the tensor sparse on the CPU, and move it",
        ),
        ("import torch; torch._cslt_compress(torch.ones(4, 4, device='cuda'))", 1, "2:4 sparsity is not predicted"),
        ("import torch; torch.nested.nested_tensor([torch.ones(2)], device='cuda')", 1, "layout=torch.jagged"),
        (WITHOUT_A_FAKE, 1, "script::no_fake does not run without a GPU: give it a fake kernel"),
        ("raise SystemExit(7)", 7, "left with exit code 7"),
        ("raise ValueError('mine')", 1, "ended with ValueError"),
    ],
)
def test_a_script_that_fails_shows_its_own_traceback_and_one_line(script, capsys, text, code, told):
    assert main(["run", script(text), "--synthetic", "first"]) == code
    err = capsys.readouterr().err
    assert told in err.splitlines()[-1]
    if "Traceback" in err:
        assert "runpy" not in err
        assert err.split("\n")[1].endswith('train.py", line 1, in <module>')


def test_of_a_package_that_fails_within_a_folder_of_its_own_the_first_rank_tells_what_is_missing(
    script, tmp_path, capsys, monkeypatch
):
    """Python forgets the package, and keeps the folder without an `__init__.py` that it had imported from it."""
    (tmp_path / "half" / "folder").mkdir(parents=True)
    (tmp_path / "half" / "__init__.py").write_text("import half.folder.part\nimport no_such_package\n")
    (tmp_path / "half" / "folder" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", "--", "torchrun", "--nproc-per-node", "2", script("import half")]) == 1
    assert "pip install no_such_package" in capsys.readouterr().err.splitlines()[-1]


def test_a_script_that_reports_its_error_itself_and_exits_is_told_what_to_do_about_the_error(script, capsys):
    """As Hydra's programs do, which print the traceback and exit with 1."""
    exits = "import sys\ntry:\n    main()\nexcept Exception:\n    print('my own words')\n    sys.exit(3)\n"
    guesses = "import torch\ndef main():\n    x = torch.randn(4, device='cuda')\n    x[x > 0]\n"
    assert main(["run", script(guesses + exits)]) == 3
    told = capsys.readouterr().err.splitlines()[-1]
    assert "train.py left with exit code 3 after DataDependentError: " in told
    assert "--mask-fraction 0.5" in told
    assert main(["run", script("def main():\n    raise ValueError\n" + exits)]) == 3
    assert capsys.readouterr().err.splitlines()[-1].endswith("train.py left with exit code 3 after ValueError")


def test_an_error_without_a_key_is_the_scripts_own(script, capsys):
    assert main(["run", script("raise KeyError")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("its traceback is above")


def test_a_metric_that_evaluate_cannot_download_is_no_data_set(script, tmp_path, capsys):
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "__init__.py").write_text("from .loading import load\n")
    (tmp_path / "evaluate" / "loading.py").write_text("def load(name):\n    raise FileNotFoundError(name)\n")
    assert main(["run", script("import evaluate; evaluate.load('accuracy')")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("evaluate downloads each metric as a script: give its folder, or run where it was loaded once")


@pytest.mark.parametrize("makes", ["import os; os.mkdir('a/b')", "import pathlib; pathlib.Path('a/b').mkdir()"])
def test_a_folder_that_cannot_be_made_is_no_data_that_is_missing(script, capsys, makes):
    assert main(["run", script(makes)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("the script makes the folder a/b within one that is not here: make that one")


@pytest.mark.parametrize("error", ["OSError('no net')", "ValueError('not in the cache')"])
def test_a_kernel_of_the_hub_that_cannot_be_loaded_has_a_shim(script, tmp_path, capsys, error):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from kernels.load import get_kernel\n")
    (tmp_path / "kernels" / "load.py").write_text(f"def get_kernel(name):\n    raise {error}\n")
    assert main(["run", script("import kernels; kernels.get_kernel('any/flash-attn3')")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("let flopmeter stand in with --shim kernels")


def test_a_module_that_the_repository_compiles_for_cuda_is_nothing_to_install_by_pip(script, tmp_path, capsys):
    (tmp_path / "models" / "ops").mkdir(parents=True)
    builds = "setup(ext_modules=[CUDAExtension('DeformableThing', ['a.cu'])])"
    (tmp_path / "models" / "ops" / "setup.py").write_text(builds)
    assert main(["run", script("import DeformableThing")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "pip install DeformableThing" not in told
    assert f"{os.path.join('models', 'ops', 'setup.py')} compiles DeformableThing for CUDA" in told


def test_a_logger_that_wants_a_login_is_told_to_be_off(script, tmp_path, capsys):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("def init():\n    raise Exception('No API key configured.')\n")
    assert main(["run", script("import wandb; wandb.init()")]) == 1
    assert "WANDB_MODE=disabled flopmeter run ..." in capsys.readouterr().err.splitlines()[-1]


def test_an_installed_package_of_cuda_kernels_that_fails_is_told_by_its_shim(script, tmp_path, capsys):
    (tmp_path / "bitsandbytes.py").write_text("import torch\n\ntorch._C._no_such_stream\n")
    assert main(["run", script("import bitsandbytes")]) == 1
    assert capsys.readouterr().err.endswith("let flopmeter stand in with --shim bitsandbytes\n")


def test_an_error_over_weights_that_could_not_be_downloaded_names_them(script, capsys, monkeypatch, tmp_path):
    """As a perceptual loss checks that its file has a weight for each layer."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    reads = "import torch\nw = torch.hub.load_state_dict_from_url('http://localhost:1/lpips.pt')\nassert len(w) == 5\n"
    assert main(["run", script(reads)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "If the error hangs on what is in this file, bring it: http://localhost:1/lpips.pt cannot be" in told


def test_what_a_shim_lacks_is_told_behind_a_library_that_asks_for_the_package_in_its_own_words(script, capsys):
    asks = "try:\n    import pynvml.absent\nexcept ImportError:\n    raise ImportError('install pynvml')\n"
    assert main(["run", "--shim", "pynvml", script(asks)]) == 1
    assert "flopmeter's shim has no pynvml.absent" in capsys.readouterr().err.splitlines()[-1]


def test_an_installed_package_whose_python_runs_is_told_the_shims_of_its_compiled_parts(script, tmp_path, capsys):
    (tmp_path / "mamba_ssm.py").write_text("causal_conv1d_fn = None\n\ncausal_conv1d_fn()\n")
    assert main(["run", script("import mamba_ssm")]) == 1
    assert capsys.readouterr().err.endswith("--shim causal_conv1d --shim selective_scan_cuda\n")


@pytest.mark.parametrize("raised", ["ImportError", "RuntimeError"])  # numba's own error is an ImportError
def test_kernels_that_ask_cudas_driver_by_themselves_are_not_told_to_be_installed(script, capsys, monkeypatch, raised):
    launches = types.ModuleType("cupy")
    exec(f"def launch(): raise {raised}('CUDA driver library cannot be found.')", launches.__dict__)
    monkeypatch.setitem(sys.modules, "cupy", launches)
    assert main(["run", script("import cupy\ncupy.launch()")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "kernels of cupy go to CUDA's driver by themselves" in told
    assert "installed" not in told


def test_an_import_that_a_library_makes_late_is_told_by_the_package_that_was_missing(script, capsys):
    """transformers imports what it is asked for, and raises an ImportError of its own."""
    text = (
        "try:\n    import nowhere_at_all\nexcept ImportError as error:\n    raise ImportError('not there') from error"
    )
    assert main(["run", script(text)]) == 1
    assert capsys.readouterr().err.endswith("(pip install nowhere_at_all)\n")


def test_what_a_shim_does_not_have_is_not_told_as_something_to_install(script, capsys):
    text = "from flash_attn import fused_softmax"
    assert main(["run", "--shim", "flash_attn", script(text)]) == 1
    assert "flopmeter's shim does not have it" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_shim_leaves_out_and_the_device_does_not_do_are_told_apart(script, capsys):
    shimmed = "from flash_attn.flash_attn_interface import _get_block_size_n\n_get_block_size_n(1)"
    assert main(["run", "--shim", "flash_attn", script(shimmed)]) == 1
    assert "flopmeter's shim does not do this" in capsys.readouterr().err.splitlines()[-1]


def test_attention_in_fp32_is_told_to_be_the_packages_limit_and_why_queries_may_be_in_fp32(script, capsys):
    """A program whose queries go through RMS norms under autocast ran with torch 2.9, and does not with 2.13."""
    text = "import torch, flash_attn\nx = torch.ones(1, 8, 2, 64, device='cuda')\nflash_attn.flash_attn_func(x, x, x)"
    assert main(["run", "--shim", "flash_attn", script(text)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "no kernels for fp32, on a GPU either. Autocast runs RMS norms in fp32" in told


def test_a_trainer_that_asks_for_more_devices_is_told_by_how_many_gpus_to_run(script, capsys):
    """The words are Lightning's, of its Trainer and its Fabric with devices=4."""
    text = "raise ValueError('You requested gpu: [0, 1, 2, 3]\\n But your machine only has: [0]')"
    assert main(["run", script(text)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("flopmeter run --gpus 4 ...")


def test_a_script_that_tells_its_options_is_not_told_that_it_ran_nothing(script, capsys):
    text = "import argparse; argparse.ArgumentParser(description='what it does').parse_args()"
    assert main(["run", script(text), "--help"]) == 0
    out, err = capsys.readouterr()
    assert "what it does" in out
    assert err == ""


def test_an_error_after_stand_ins_names_the_lines_that_read_them(script, capsys):
    """The index of the largest of unknown numbers is no more than a guess."""
    text = "import torch\nindex = torch.rand(8, device='cuda').argmax().item()\nprint(1 // index)"
    assert main(["run", script(text)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("flopmeter: train.py ended with ZeroDivisionError")
    assert "train.py:2): if the error hangs on one of them, leave out what reads it" in last


def test_a_package_beside_the_script_that_only_this_folder_has_is_told(script, capsys, tmp_path, monkeypatch):
    (tmp_path / "helpers_here").mkdir()
    (tmp_path / "helpers_here" / "__init__.py").touch()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["run", script("import helpers_here", "below/train.py")]) == 1
    assert "PYTHONPATH=. flopmeter run" in capsys.readouterr().err.splitlines()[-1]


def test_a_module_in_a_folder_above_the_script_is_found_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkout" / "theirs_alone").mkdir(parents=True)
    (tmp_path / "checkout" / "theirs_alone" / "model.py").touch()
    (tmp_path / "checkout" / "tools").mkdir()
    (tmp_path / "checkout" / "tools" / "train.py").write_text("import theirs_alone.model")
    assert main(["run", "checkout/tools/train.py"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "theirs_alone is in checkout, above the script: PYTHONPATH=checkout flopmeter run" in last


def test_nvidia_smi_names_the_gpu_of_the_profile(script, capfd):
    text = "import subprocess\nsubprocess.run(['nvidia-smi'])\n" + TRAINS
    assert main(["run", "--hardware", "l4", script(text)]) == 0
    assert "GPU 0: NVIDIA L4 (flopmeter predicts it; no GPU runs)" in capfd.readouterr().out


def test_programs_may_ask_how_busy_the_gpu_is(script, capsys):
    assert main(["run", script("import torch\nassert torch.cuda.utilization() == 0\n" + TRAINS)]) == 0
    assert "torch.cuda.utilization was answered 0 %: no GPU runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("run.sh", "the command in it"), ("lab.ipynb", "nbconvert"), ("small.yaml", "name the script")]
)
def test_a_file_that_is_no_script_is_told(script, capsys, name, told):
    assert main(["run", script("{}", name)]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_an_option_of_flopmeters_behind_the_script_is_told(script, capsys):
    script("import argparse; argparse.ArgumentParser().parse_args()")
    assert main(["run", "train.py", "--hardware", "l4"]) == 2
    assert "--hardware stands after train.py, so the script would get it" in capsys.readouterr().err


def test_a_command_that_a_package_installed_runs_by_its_name(script, capsys, tmp_path, monkeypatch):
    script("#!/usr/bin/env python\n" + TRAINS, "trainer")
    (tmp_path / "trainer").chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["run", "trainer", "--x"]) == 0
    assert "arguments ['--x'] __main__" in capsys.readouterr().out


def test_a_marker_that_names_no_function_is_told(script, capsys):
    assert main(["run", "--step-marker", "os.path:nothing", script(TRAINS)]) == 2
    assert "the step marker 'os.path:nothing' names no function" in capsys.readouterr().err


def test_interrupted_it_reports_what_ran(script):
    script(TRAINS.replace("range(10)", "range(1000000)"))
    environment = {**os.environ, "PYTHONPATH": str(PROGRAMS.parents[1]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "flopmeter", "run", "--steps", "100000000", "train.py"]
    heeds_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as no job in the background
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heeds_interrupts
    )  # fmt: skip
    assert process.stdout is not None
    while "step 3" not in process.stdout.readline():
        time.sleep(0)
    err = ""
    for _ in range(6):  # Python drops an interrupt that comes while an object is finalized; a person presses again
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, err = process.communicate(timeout=20)
            break
    assert process.returncode == 130
    assert "was interrupted" in err
    assert "one steady step" in err


MODULE_THAT_IS_IMPORTED_AT_ITS_FIRST_USE = """
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError("what is behind it is not installed")

sys.modules["integrations_nowhere"] = Lazy("integrations_nowhere")
"""


def test_a_module_that_the_program_puts_off_importing_is_not_imported_by_the_run(script, capsys, monkeypatch):
    """As packages do for what they can do without (speechbrain's integrations)."""
    monkeypatch.setitem(sys.modules, "integrations_nowhere", None)  # taken out at the end: no other test may meet it
    assert main(["run", script("import sys, types\n" + MODULE_THAT_IS_IMPORTED_AT_ITS_FIRST_USE + TRAINS)]) == 0
    assert "one steady step" in capsys.readouterr().err


def test_a_package_of_weights_that_cannot_be_imported_here_hinders_no_program_that_does_not_use_it(
    script, tmp_path, capsys, monkeypatch
):
    """As a huggingface_hub of which a part is not installed."""
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("def __getattr__(name): import nowhere_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    assert main(["run", script(TRAINS)]) == 0
    assert "one steady step" in capsys.readouterr().err


def test_the_package_of_websocket_has_another_name(script, capsys, monkeypatch):
    """As importlib.metadata says of it where it is installed: `websocket` on the package index is another one."""
    monkeypatch.setattr("flopmeter.run.diagnosis.is_there", lambda name: False)
    assert main(["run", script("raise ModuleNotFoundError('', name='websocket')")]) == 1
    assert "(pip install websocket-client)" in capsys.readouterr().err


def test_a_package_that_is_older_than_torch_is_named_and_not_the_script(script, tmp_path, capsys, monkeypatch):
    (tmp_path / "site-packages" / "quantizes_nowhere").mkdir(parents=True)
    package = tmp_path / "site-packages" / "quantizes_nowhere" / "__init__.py"
    package.write_text("from torch._six import inf\n")
    monkeypatch.syspath_prepend(str(package.parents[1]))
    assert main(["run", script("import quantizes_nowhere")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith(f"quantizes_nowhere wants another torch than {torch.__version__}: install one that fits it")


def test_a_module_below_src_of_the_checkout_is_found(script, tmp_path, capsys, monkeypatch):
    (tmp_path / "src" / "series_nowhere").mkdir(parents=True)
    (tmp_path / "src" / "series_nowhere" / "__init__.py").write_text("")
    (tmp_path / "scripts" / "training").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "scripts" / "training")
    (tmp_path / "scripts" / "training" / "train.py").write_text("import series_nowhere")
    assert main(["run", "train.py"]) == 1
    assert (
        "series_nowhere is in ../../src, above the script: PYTHONPATH=../../src flopmeter run"
        in capsys.readouterr().err
    )
