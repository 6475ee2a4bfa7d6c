"""Launchers of ranks that a script starts by itself: commands such as axolotl's, trl's and gpt-neox' deepy.py start
torchrun, accelerate or deepspeed, whose Python would run without the device named cuda. The script ends there, and what
it starts is metered in its place."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

from flopmeter.run.launchers import is_launcher, plain
from flopmeter.run.patches import Patch
from flopmeter.run.script import GivesWay
from flopmeter.torch_names.frames import callers

_OF_LAUNCHERS = ("accelerate.commands.", "deepspeed.launcher.", "torch.distributed.elastic.")
_OF_SHELLS = {"&&", "||", "|", ";", "&", ">", ">>", "<"}  # a line of a shell that does more than one thing
_FRAMES_LOOKED_AT = 8  # from Popen up; torch's launcher has five between


class StartsLauncher(GivesWay):
    """The script starts these words, as they may follow `flopmeter run --`, in this environment and folder."""

    def __init__(self, words: list[str], environment: Mapping[str, str] | None, folder: str | None) -> None:
        super().__init__(
            f"it starts another command, which is to be metered alone: flopmeter run -- {shlex.join(words)}"
        )
        self.words, self.environment, self.folder = words, dict(environment or os.environ), folder


def patches() -> Iterator[Patch]:
    reason = "a launcher that the script starts is metered in its place"
    begin = subprocess.Popen.__init__
    for name in ("execv", "execve"):  # the other ways of os to replace the process end in these
        yield Patch(os, name, _replacing(getattr(os, name)), reason)

    def start(process: Any, args: Any, *more: Any, **options: Any) -> None:
        _look_at(args, options.get("env"), options.get("cwd"))
        begin(process, args, *more, **options)

    yield Patch(subprocess.Popen, "__init__", start, reason)


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace(path: Any, words: Any, *environment: Any) -> Any:
        _look_at(words, environment[0] if environment else None, None)
        return original(path, words, *environment)

    return replace


def _look_at(command: Any, environment: Mapping[str, str] | None, folder: str | None) -> None:
    """Raises StartsLauncher if the command is a launcher, or the Python of a rank that a launcher starts."""
    try:
        words = plain(shlex.split(command) if isinstance(command, str) else [os.fsdecode(word) for word in command])
    except (TypeError, ValueError, IndexError):  # a path alone, a line that only a shell can read, or nothing
        return
    if _OF_SHELLS.intersection(words):
        return
    if is_launcher(words):
        raise StartsLauncher(words, environment, folder)
    if words[:1] == ["python"] and any(map(_is_a_launchers, islice(callers(), _FRAMES_LOOKED_AT))):
        raise StartsLauncher([*_torchrun_of(environment or {}), *words], environment, folder)


def _is_a_launchers(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OF_LAUNCHERS)


def _torchrun_of(environment: Mapping[str, str]) -> list[str]:
    """The launcher of a rank, by the variables that it is given."""
    world, a_node = (int(environment.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return ["torchrun", f"--nnodes={world // a_node}", f"--nproc-per-node={a_node}"] if world > 1 else []
