"""What the error that ended a script means here, and what can be done, in one line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from flopmeter.distributed.errors import WorldError
from flopmeter.known_values import DataDependentError
from flopmeter.run.device import OtherDeviceError
from flopmeter.run.own_code import is_own
from flopmeter.run.script import Ending, Script, is_there
from flopmeter.run.shims import SHIMS, compiled_parts
from flopmeter.run.synthetic import is_absent
from flopmeter.trace.mixed_devices import MixedDevicesError


def what_to_do(script: Script, ending: Ending, guessed: Sequence[str], absent: Sequence[str] = ()) -> str:
    """One line about a script that ended in an error: what it means here, and what can be done. `guessed`: the lines
    that read values for which flopmeter stood in. `absent`: what was said of weights that are not here."""
    error, head = _telling(ending.error), f"{script.name} ended with {type(ending.error).__name__}"
    if error is None:
        return head
    if isinstance(error, KeyboardInterrupt):
        return f"{script.name} was interrupted: the report is of what ran until then"
    if isinstance(error, SystemExit):
        head = f"{script.name} left with exit code {ending.code}{_stray_options(script)}"
        reported = _telling(error.__context__)  # as Hydra does: it prints the error, and exits
        if not isinstance(reported, Exception):
            return head
        known = _by_class(reported) or _not_to_be_had(reported, script)
        return f"{head} after {type(reported).__name__}" + (f": {known}" if known else "")
    if known := _by_class(error) or _not_to_be_had(error, script):
        return f"{head}: {known}"
    if guessed:
        lines = ", ".join(guessed[-MOST_LINES_TOLD:])
        return (
            f"{head}: its traceback is above. It read values that are not known, and was told others ({lines}): if the "
            "error hangs on one of them, leave out what reads it, by the script's arguments"
        )
    if absent:
        return f"{head}: its traceback is above. If the error hangs on what is in this file, bring it: {absent[-1]}"
    return f"{head}, which is not flopmeter's: its traceback is above"


def _by_class(error: BaseException) -> str | None:
    """Advice for an error whose class says what happened; None for others."""
    return next((advice.format(error) for kind, advice in BY_CLASS.items() if isinstance(error, kind)), None)


def _not_to_be_had(error: BaseException, script: Script) -> str | None:
    """Advice for what the script, or a library, asks for and does not get here; None for other errors."""
    if compiler := _asks_the_driver(error):
        return (
            f"kernels of {compiler} go to CUDA's driver by themselves, which is not here (flopmeter sees those that go "
            "through torch): take the script's way without them, if it has one"
        )
    if isinstance(error, ImportError):
        return _about_import(error, script)
    if isinstance(error, subprocess.CalledProcessError) and (words := _python_words(error.cmd)):
        return f"it starts another Python, which is not metered: flopmeter run {words}"
    if library := next((name for text, name in OTHER_BUILDS.items() if text in str(error)), None):
        return f"{library} is built for another torch: install the two of one release, both for the CPU"
    if "torch.utils.cpp_extension" in _modules_of(error):
        return "it compiles kernels for CUDA, which needs its compiler and a GPU: run its path without them"
    if isinstance(error, KeyError) and str(error).strip("'") in OF_A_LAUNCHER:
        launched = f"torchrun --nproc-per-node 1 {'-m ' * script.is_module}{script.target}"
        return f"a launcher sets {error.args[0]}: flopmeter run ... -- {launched} ..."
    if asked := re.search(MORE_GPUS, str(error)):
        return f"it asks for several GPUs: flopmeter run --gpus {len(asked[1].split(','))} ..."
    if "wandb" in _packages_of(error):
        return "wandb asks for a login, or for its server: WANDB_MODE=disabled flopmeter run ..."
    if ("kernels.load", "get_kernel") in _functions_of(error):
        return "kernels of the hub are compiled for a GPU: let flopmeter stand in with --shim kernels"
    if "FlashAttention only supports" in str(error):
        return (
            "the package has no kernels for fp32, on a GPU either. Autocast runs RMS norms in fp32 in newer releases "
            "of torch (in 2.13, not in 2.11): take the torch that the script was written for"
        )
    if missing := _about_what_is_missing(error):
        return missing
    if isinstance(error, AttributeError) and is_absent(error.obj):
        return (
            f"{type(error.obj).__name__} is not here, and the samples of --synthetic have no {error.name!r}: "
            "the script needs its data"
        )
    if isinstance(error, NotImplementedError) and (raised_in := _modules_of(error)[-1]).startswith("flopmeter."):
        who = "flopmeter's shim" if raised_in.startswith("flopmeter.run.shims") else "the device named cuda"
        return f"{who} does not do this; leave it out of the script, or skip it by its arguments"
    if op := _without_kernel(error):
        return op
    if package := next((each for each in SHIMS if each in _packages_of(error) and each != "kernels"), None):
        options = " ".join(f"--shim {each}" for each in compiled_parts(package))
        return f"{package} does not run without a GPU: let flopmeter stand in with {options}"
    return None


def _asks_the_driver(error: BaseException) -> str | None:
    """The package that compiles kernels of its own and asked CUDA's driver for a GPU, as its traceback tells."""
    if isinstance(error, ModuleNotFoundError):
        return None
    modules = tuple(_modules_of(error))
    return next(
        (each for each in OF_ITS_OWN_DRIVER if any(f"{name}.".startswith(f"{each}.") for name in modules)), None
    )


def _telling(error: BaseException | None) -> BaseException | None:
    """The error that tells what happened: libraries wrap it, as a pipeline does what happens in a stage."""
    cause = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, DataDependentError, MixedDevicesError, WorldError)):
            return cause
        cause = cause.__cause__
    while isinstance(error, ImportError) and error.name is None and error.__cause__ is not None:
        error = error.__cause__
    return error


def _without_kernel(error: BaseException) -> str | None:
    """Advice for an op that torch does not run on tensors without memory; None for other errors."""
    if "NestedTensorImpl" in str(error):
        return "nested tensors of the strided layout do not run without a GPU: make them with layout=torch.jagged"
    op = re.search(r"\w+::\w+", str(error))
    if op is None or not any(text in str(error) for text in OF_MISSING_KERNELS):
        return None
    if op[0].startswith("aten::"):
        without = next((way for part, way in WITHOUT_KERNEL.items() if part in op[0]), "leave it out of the script")
        return f"{op[0]} does not run without a GPU, and flopmeter does not emulate it: {without}"
    return (
        f"{op[0]} does not run without a GPU: give it a fake kernel (torch.library.register_fake), and a cost "
        "(flopmeter.register_cost)"
    )


def _stray_options(script: Script) -> str:
    stray = [word for word in script.arguments if word.partition("=")[0] in OPTIONS_OF_OURS]
    return f" ({stray[0]} went to the script: options of flopmeter run come before its name)" if stray else ""


def _named_shim(message: str) -> str | None:
    """The package that a library says it wants, in words of its own: flash_attn, flash-attn, FlashAttention2 or 4."""
    words = message.lower()
    for version, package in (("[ -]?3", "flash_attn_interface"), ("[ -]?4", "flash_attn_4"), ("", "flash_attn")):
        words = re.sub(rf"flash[ -]?attention{version}", package, words)
    words = words.replace("-", "_")
    named = (each for each in SHIMS if each != "kernels")  # a common word
    return next((each for each in named if re.search(rf"(?<![a-z]){each}(?![a-z_])", words)), None)


def _about_import(error: ImportError, script: Script) -> str:
    if _modules_of(error)[-1:] == ["flopmeter.run.shims"]:
        return "flopmeter's shim does not have it: run the script's path without it, by its arguments"
    if "relative import" in str(error):
        return "it is a part of a package: run it as flopmeter run -m package.module, in the folder of the package"
    cause = error.__context__
    if error.name is None and isinstance(cause, ImportError) and (cause.name or "").partition(".")[0] in SHIMS:
        return _about_import(cause, script)  # a library put words of its own in its place
    if error.name is None and (shim := _named_shim(str(error))):
        return f"{shim} does not run without a GPU: let flopmeter stand in with --shim {shim}"
    if error.name is None:
        return "its message is above; what it names is to be installed in the environment that runs flopmeter"
    name = error.name.partition(".")[0]
    if "partially initialized" in str(error) and os.path.basename(error.path or "") == f"{name}.py":
        return f"{error.path} hides a package that is called {name} too: rename the file"
    if error.name.startswith("flash_attn.cute"):
        return f"{error.name} is compiled for CUDA: {CUDA_EXTENSIONS['flash_attn_4']}"
    if name in SHIMS and name != error.name:  # its package was there
        return f"flopmeter's shim has no {error.name}: run the script's path without it, by its arguments"
    if name in CUDA_EXTENSIONS:
        return f"{name} is compiled for CUDA, and not installed: {CUDA_EXTENSIONS[name]}"
    if isinstance(error, ModuleNotFoundError) and not is_there(name):
        if builder := _compiled_by(script, name):
            return f"{builder} compiles {name} for CUDA: take the script's way in Python, if it has one"
        if folder := _folder_above(script, name):
            return f"{name} is in {folder}, above the script: PYTHONPATH={folder} flopmeter run ..."
        package = NAMED_OTHERWISE.get(name, name)
        return f"install it in the environment that runs flopmeter (pip install {package})"
    if isinstance(error, ModuleNotFoundError) and name == error.name:
        return f"{name} is in this folder, not in the script's: PYTHONPATH=. flopmeter run ..., or run it with -m"
    if name in sys.stdlib_module_names:
        return f"it comes with a newer Python than this one ({sys.version_info.major}.{sys.version_info.minor})"
    if name == "torch" and (package := _importing_package(error)):
        return f"{package} wants another torch than {torch.__version__}: install one that fits it"
    if name == "torch":
        return "the script wants another torch than this one: change that import as torch's release notes say"
    if "shared object" in str(error) or "undefined symbol" in str(error):
        return "it is compiled for another build of torch: uninstall it, or install the one for the CPU"
    return f"this version of {name or 'the package'} does not have it: install the version that the script wants"


def _importing_package(error: ImportError) -> str:
    """The installed package whose import failed; '' if it is the script's own."""
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [(each.get("__name__", ""), each.get("__file__") or "") for each in frames]
    name, file = next((each for each in reversed(names) if not each[0].startswith("importlib")), ("", ""))
    return "" if is_own(name, file) else name.partition(".")[0]


def _compiled_by(script: Script, module: str) -> str:
    """The setup.py of a checkout that makes the module of CUDA sources, as seen from here; '' if there is none."""
    folders = {Path.cwd()} if script.is_module else {Path.cwd(), Path(script.target).resolve().parent}
    depths = range(MOST_FOLDERS_BELOW + 1)
    for file in (file for folder in folders for depth in depths for file in folder.glob("*/" * depth + "setup.py")):
        text = file.read_text(errors="replace")
        if "CUDAExtension" in text and re.search(rf"\b{module}\b", text):
            return os.path.relpath(file)
    return ""


def _folder_above(script: Script, module: str) -> str:
    """The folder of a checkout that has the module, as seen from here; '' if there is none."""
    above = [] if script.is_module else list(Path(script.target).resolve().parents[1 : 1 + MOST_FOLDERS_ABOVE])
    folders = (folder for each in above for folder in (each, each / "src"))
    has_it = (each for each in folders if (each / f"{module}.py").is_file() or any((each / module).glob("*.py")))
    return next(map(os.path.relpath, has_it), "")


def _python_words(command: Any) -> str:
    """What a command has another Python run; nothing if it starts something else."""
    words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
    return shlex.join(words[1:]) if os.path.basename(words[0]).startswith("python") else ""


def _about_what_is_missing(error: BaseException) -> str | None:
    """Advice for a file, a program or data that the script looks for; None for other errors."""
    if isinstance(error, FileNotFoundError) and "evaluate.loading" in _modules_of(error):
        return "evaluate downloads each metric as a script: give its folder, or run where it was loaded once"
    if isinstance(error, FileNotFoundError) and "subprocess" in _modules_of(error):
        return f"the script starts {error.filename}, which is not installed here: install it"
    if isinstance(error, FileNotFoundError) and _fails_in(error, ("mkdir",)):
        return f"the script makes the folder {error.filename} within one that is not here: make that one"
    if isinstance(error, ValueError) and "num_samples=0" in str(error):  # torch's RandomSampler
        return "the data set is empty: the script needs its data, or --synthetic"
    if isinstance(error, (ValueError, IndexError)) and _makes_a_data_set(error):
        return "its data set cannot be made of what is here: the script needs its data, or --synthetic"
    asserts = _asserts_a_file(error)
    if not (asserts or isinstance(error, OSError) or any(text in str(error) for text in OF_TORCHVISION)):
        return None
    what = getattr(error, "filename", None) or "what it reads or downloads"
    if "torch.serialization" in _modules_of(error):
        return f"{what} is not here; if it is weights, --without-weights leaves the model as it was made"
    otherwise = ", or --synthetic for data sets"
    if asserts:
        otherwise = (
            " (it looks by itself: an empty file of that name may do, beside --synthetic for data sets and "
            "--without-weights for weights)"
        )
    return f"{what} is not here; the script needs its data and weights{otherwise}"


def _makes_a_data_set(error: BaseException) -> bool:
    """Whether it was raised while a data set was made, as where one joins the files that it found, and found none."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(each.f_code.co_name == "__init__" and isinstance(each.f_locals.get("self"), Dataset) for each in frames)


def _asserts_a_file(error: BaseException) -> bool:
    """Whether it is an assertion such as `assert os.path.exists(path)`."""
    return isinstance(error, AssertionError) and _fails_in(error, TESTS_OF_FILES)


def _fails_in(error: BaseException, functions: Iterable[str]) -> bool:
    """Whether the line that raised it calls one of these functions."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(f"{name}(" in (frames[-1].line or "") for name in functions)


def _modules_of(error: BaseException) -> list[str]:
    """The modules of the frames that the error went through, the innermost last."""
    return [module for module, _ in _functions_of(error)]


def _functions_of(error: BaseException) -> list[tuple[str, str]]:
    """(module, function) of the frames that the error went through, the innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame, _ in frames]


def _packages_of(error: BaseException) -> set[str]:
    return {module.partition(".")[0] for module in _modules_of(error)}


MOST_LINES_TOLD = 3
MOST_FOLDERS_ABOVE = 3  # a script of a repository lies no deeper in it, mostly
MOST_FOLDERS_BELOW = 3  # nor do its extensions

NAMED_OTHERWISE = {
    "PIL": "pillow", "_cffi_backend": "cffi", "absl": "absl-py", "attr": "attrs", "bs4": "beautifulsoup4",
    "cutlass": "nvidia-cutlass-dsl", "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil", "deprecate": "pyDeprecate", "dotenv": "python-dotenv", "faiss": "faiss-cpu",
    "fitz": "pymupdf", "git": "GitPython", "google": "protobuf", "hydra": "hydra-core",
    "open_clip": "open-clip-torch", "opentelemetry": "opentelemetry-sdk", "ot": "POT", "patoolib": "patool",
    "pkg_resources": "'setuptools<81'", "skimage": "scikit-image", "sklearn": "scikit-learn", "skvideo": "sk-video",
    "serial": "pyserial", "tap": "typed-argument-parser", "umap": "umap-learn", "warp": "warp-lang",
    "websocket": "websocket-client", "yaml": "PyYAML", "zmq": "pyzmq",
}  # fmt: skip
"""What pip calls a package whose modules have another name. Source: the metadata of each on the package index."""


BY_CLASS: dict[type[BaseException], str] = {
    torch.OutOfMemoryError: (
        "by the model of the device's memory it does not fit; --oom=report goes on, and tells how much it needs and "
        "what would make it fit"
    ),
    DataDependentError: (
        "state what share of such a mask holds (--mask-fraction 0.5), and leave out --strict-values where it is given"
    ),
    MixedDevicesError: "as on a GPU, all of them have to be on one device; the one named cuda is called meta above",
    WorldError: "what flopmeter cannot tell of ranks that do not run: {}",
    OtherDeviceError: "flopmeter run meters one GPU of a process; one process for each GPU is a torchrun (--gpus N)",
}
"""What to do about errors whose class says what happened."""

MORE_GPUS = r"requested gpu: \[([\d, ]+)\]\s+But your machine only has"
"""What Lightning says of a Trainer or a Fabric with more devices than there are."""

OF_ITS_OWN_DRIVER = ("numba.cuda", "numba_cuda", "cupy", "cupy_backends", "pycuda")
"""Packages and modules that launch kernels on a GPU without torch."""

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets."""

OPTIONS_OF_OURS = (
    "--hardware",
    "--step-marker",
    "--oom",
    "--strict-values",
    "--mask-fraction",
    "--shim",
    "--synthetic",
    "--without-weights",
)
"""Options of flopmeter run that few scripts have."""

TESTS_OF_FILES = ("exists", "isfile", "isdir", "is_file", "is_dir")
"""Functions of os.path and pathlib that a script asserts."""

OTHER_BUILDS = {
    "operator torchvision::": "torchvision",
    "Couldn't load custom C++ ops": "torchvision",
    "Could not load this library": "the package of this library",
}
"""What errors say of compiled ops that do not fit torch, and whose they are."""

OF_MISSING_KERNELS = ("with Meta tensors", "from the 'Meta' backend", "no fake impl registered")
"""What errors say of an op without a kernel on meta: one of torch, of a C++ extension, a custom op in Python."""

WITHOUT_KERNEL = {
    "_cslt": "run the dense weights (2:4 sparsity is not predicted)",
    "sparse_semi_structured": "run the dense weights (2:4 sparsity is not predicted)",
    "_to_sparse": "make the tensor sparse on the CPU, and move it",
}
"""Parts of the names of ops that are left out, and what to do without them."""

OF_TORCHVISION = ("ataset not found", "Error downloading", "there is no internet connection")
"""What its RuntimeErrors say where a data set is missing, and torch.hub's where a repository is."""

CUDA_EXTENSIONS = {
    **{package: f"let flopmeter stand in with --shim {package}" for package in SHIMS},
    "triton": "pip install triton, which works without a GPU",
    "deepspeed": "pip install deepspeed, whose engine runs without its kernels, or use DDP or FSDP2",
    **dict.fromkeys(
        ("rotary_emb", "xentropy_cuda_lib", "dropout_layer_norm", "fused_dense_lib", "fused_softmax_lib"),
        "it is a part of flash_attn's repository that a script has to do without here (--shim flash_attn has what "
        "newer releases put in its place)",
    ),
    "vllm": "use flopmeter serve, which predicts what a server of a model costs",
}
"""Packages of compiled kernels, and what to do without them."""
