"""The words before a script on a command line: python, torchrun, deepspeed, accelerate launch. Only rank 0 runs, here.

A launcher is one entry of LAUNCHERS: from its words to a CommandLine.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flopmeter.run.script import Script


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A script, and the world that it is started in: `nodes` of `gpus_per_node` processes each, one for a GPU.

    `environment` holds variables that the launcher sets beside torchrun's own.
    """

    script: Script
    nodes: int = 1
    gpus_per_node: int | None = None  # None: there is no launcher
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int | None:
        return None if self.gpus_per_node is None else self.nodes * self.gpus_per_node


def launch_of(words: Sequence[str], gpus: int) -> CommandLine:
    """The script and the world that a command line starts. `gpus` is for launchers that use all GPUs.

    Raises ValueError where no script is named, or for a launcher that cannot be followed.
    """
    words = _without_python(list(words))
    if not words:
        raise ValueError("name a script: flopmeter run train.py, or flopmeter run -m package.module")
    name = os.path.basename(words[0])
    _refuse_what_is_no_script(words)
    if words[0] == "-m" and words[1:] and words[1] in _MODULES:
        return _MODULES[words[1]](words[2:], gpus)
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _accelerate(words[2:], gpus)
    if name in LAUNCHERS and not os.path.exists(words[0]):
        return LAUNCHERS[name](words[1:], gpus)
    if words[0] == "-m":
        if len(words) < 2:
            raise ValueError("-m needs the name of a module: flopmeter run -m package.module")
        return CommandLine(Script(words[1], tuple(words[2:]), is_module=True))
    return CommandLine(Script(_installed(words[0]), tuple(words[1:])))


def plain(words: Sequence[str]) -> list[str]:
    """The words of a command that a program starts as a person would write them: python, torchrun, without a path."""
    command = os.path.basename(words[0])
    return ["python", *_without_python(list(words))] if command.startswith("python") else [command, *words[1:]]


def is_launcher(words: Sequence[str]) -> bool:
    """Whether these plain words start ranks."""
    if words[0] == "python":
        return words[1:2] == ["-m"] and words[2:3] != [] and words[2] in _MODULES
    return words[0] in LAUNCHERS or list(words[:2]) == ["accelerate", "launch"]


def _installed(name: str) -> str:
    """The path of a command that a package has installed, where it is a Python script; else the name as it is."""
    found = None if _is_ours(name) else shutil.which(name)
    if found is None:
        return name
    with open(found, "rb") as file:
        first = file.readline()
    if first.startswith(b"#!") and b"python" in first:
        return found
    raise ValueError(f"{name} is no Python script: give flopmeter run the script that it starts")


def _is_ours(name: str) -> bool:
    """Whether it is a script in this folder, or a folder that runs; a command may have the name of another folder."""
    return os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py"))


def _refuse_what_is_no_script(words: Sequence[str]) -> None:
    """Raises ValueError for words that people write in place of a script, and says what to write."""
    word, name = words[0], os.path.basename(words[0])
    if "=" in word and word.partition("=")[0].isidentifier():
        raise ValueError(f"{word} sets a variable: put it before flopmeter ({word} flopmeter run ...)")
    if word == "-c":
        raise ValueError("python -c: put the code into a file, or use flopmeter.cuda")
    if name in _STARTERS and not os.path.exists(word):
        raise ValueError(f"{name} {_STARTERS[name]}")
    if os.path.isdir(word) and not _is_ours(word) and shutil.which(word) is None:
        raise ValueError(f"{word} is a folder: name the script in it")
    advice = _NO_SCRIPTS.get(os.path.splitext(name)[1])
    if advice is not None and os.path.exists(word):
        raise ValueError(f"{word} is no Python script: {advice}")


_STARTERS = {
    **dict.fromkeys(("bash", "sh", "zsh"), "runs a shell script: give flopmeter run the command in it instead"),
    **dict.fromkeys(
        ("srun", "mpirun", "mpiexec", "horovodrun"),
        "starts processes in a way that is not followed: flopmeter run -- torchrun --nproc-per-node 8 train.py",
    ),
    **dict.fromkeys(
        ("uv", "poetry", "pipenv", "hatch", "conda", "pdm"),
        "comes first: for example `uv run flopmeter run train.py`, with flopmeter in that environment",
    ),
}
"""What starts scripts and is no launcher of ranks, each with what to do."""

_NO_SCRIPTS = {
    ".ipynb": "make one with `jupyter nbconvert --to script`, or use `with flopmeter.cuda(...)` in the notebook",
    ".sh": "give flopmeter run the command in it (python train.py ..., torchrun ... train.py)",
    **dict.fromkeys((".yaml", ".yml", ".json", ".toml"), "name the script that reads it, and then the file"),
}
"""By the ending of a file's name: what to do instead."""


def _without_python(words: list[str]) -> list[str]:
    if words and os.path.basename(words[0]).startswith("python"):
        words = words[1:]
        while words and words[0] in ("-u", "-O", "-B"):
            words = words[1:]
    return words


def _parsed(launcher: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What the launcher's own parser makes of its words. Raises ValueError in the place of its usage."""

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{launcher} would stop with: {message}; write {launcher} [its options] train.py ...")

    parser.error = fail  # type: ignore[method-assign]
    return parser.parse_args(list(words))


def _torchrun(words: Sequence[str], gpus: int) -> CommandLine:
    from torch.distributed.run import get_args_parser

    options = _parsed("torchrun", get_args_parser(), words)
    nodes = int(str(options.nnodes).partition(":")[2] or options.nnodes)
    a_node = str(options.nproc_per_node)
    script = Script(options.training_script, tuple(options.training_script_args), is_module=options.module)
    return CommandLine(script, nodes, int(a_node) if a_node.isdigit() else max(gpus // nodes, 1))


def _accelerate(words: Sequence[str], gpus: int) -> CommandLine:
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("accelerate is not installed here: pip install accelerate")
    commands: Any = importlib.import_module("accelerate.commands.launch")
    options = _parsed("accelerate launch", commands.launch_command_parser(), words)
    nodes, processes = options.num_machines or 1, options.num_processes or gpus
    for feature in ("use_deepspeed", "use_megatron_lm", "tpu"):
        if getattr(options, feature, False):
            raise ValueError(f"accelerate launch --{feature}: flopmeter run does not follow it; use DDP or FSDP")
    environment = {"ACCELERATE_MIXED_PRECISION": str(options.mixed_precision or "no").lower()}
    if options.gradient_accumulation_steps:
        environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(options.gradient_accumulation_steps)
    if options.use_fsdp:
        names = [name for name in vars(options) if name.startswith("fsdp_")]
        environment |= {name.upper(): str(value) for name in names if (value := getattr(options, name)) is not None}
        environment["ACCELERATE_USE_FSDP"] = "true"
    script = Script(options.training_script, tuple(options.training_script_args), is_module=options.module)
    return CommandLine(script, nodes, max(processes // nodes, 1), environment)


def _deepspeed(words: Sequence[str], gpus: int) -> CommandLine:
    """Options of deepspeed/launcher/runner.py. (Its own parser is not asked: DeepSpeed looks for the GPU as soon as it
    is imported.)"""
    parser = argparse.ArgumentParser(prog="deepspeed", allow_abbrev=False)
    for name in ("num_nodes", "num_gpus"):
        parser.add_argument(f"--{name}", type=int, default=-1)
    parser.add_argument("-i", "--include", default="")
    for name in ("module", "no_local_rank", *_DEEPSPEED_SWITCHES):
        parser.add_argument(f"--{name}", action="store_true")
    for names in (("-H", "--hostfile"), ("-e", "--exclude"), *((f"--{name}",) for name in _DEEPSPEED_OPTIONS)):
        parser.add_argument(*names)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = _parsed("deepspeed", parser, words)
    hosts = [host.partition(":")[2].split(",") for host in options.include.split("@") if ":" in host]
    nodes = max(options.num_nodes, len(hosts), 1)
    a_node = len(hosts[0]) if hosts else options.num_gpus if options.num_gpus > 0 else max(gpus // nodes, 1)
    script = Script(options.script, tuple(options.arguments), options.module, not options.no_local_rank)
    return CommandLine(script, nodes, a_node)


def _deepspeed_on_a_node(words: Sequence[str], gpus: int) -> CommandLine:
    """What `deepspeed` starts on each node: options of deepspeed/launcher/launch.py. The world is told in base64, by
    the name of each host the numbers of its GPUs."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", allow_abbrev=False)
    parser.add_argument("--world_info", default="")
    for name in ("module", "no_local_rank", "no_python", "enable_elastic_training", "bind_cores_to_rank"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("node_rank", "master_addr", "master_port", "min_elastic_nodes", "max_elastic_nodes", "save_pid",
                 "enable_each_rank_log", "bind_core_list", "log_level"):  # fmt: skip
        parser.add_argument(f"--{name}")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = _parsed("deepspeed.launcher.launch", parser, words)
    hosts = list(json.loads(base64.urlsafe_b64decode(options.world_info) or "{}").values())
    script = Script(options.script, tuple(options.arguments), options.module, not options.no_local_rank)
    return CommandLine(script, max(len(hosts), 1), len(hosts[0]) if hosts else gpus)


_DEEPSPEED_SWITCHES = ("no_python", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "bind_cores_to_rank")
_DEEPSPEED_OPTIONS = ("master_port", "master_addr", "node_rank", "launcher", "launcher_args", "enable_each_rank_log",
                      "autotuning", "bind_core_list", "ssh_port", "venv_script", "log_level")  # fmt: skip

LAUNCHERS: Mapping[str, Callable[[Sequence[str], int], CommandLine]] = {"torchrun": _torchrun, "deepspeed": _deepspeed}
_MODULES: Mapping[str, Callable[[Sequence[str], int], CommandLine]] = {
    "torch.distributed.run": _torchrun,
    "accelerate.commands.launch": _accelerate,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed.launcher.launch": _deepspeed_on_a_node,
}
"""The same behind `python -m`."""
