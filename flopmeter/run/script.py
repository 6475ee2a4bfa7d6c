"""Runs a script as Python would: by path or with -m, with its own arguments, output, traceback and exit code."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flopmeter.known_values.messages import NotSentYet
from flopmeter.run.session import ScriptSession
from flopmeter.run.steps import StepsDone


@dataclass(frozen=True, slots=True)
class Script:
    """`target` is a path, or with `is_module` a module's name; `arguments` are the script's own, after a
    `--local_rank` where its launcher puts one."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_told_its_rank: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)

    def check(self) -> None:
        """Raises ValueError if there is no such script."""
        if self.is_module:
            if not is_there(self.target):
                raise ValueError(f"no module named {self.target}: install it here, or run this in its folder")
        elif not os.path.exists(self.target):
            raise ValueError(
                f"no such script: {self.target} (arguments of flopmeter run come before the script's name)"
            )


def is_there(module: str) -> bool:
    """Looks for the file, in this folder first, without importing the packages that the module is in: they are the
    program's, and may look at its arguments and at the GPU when they are imported. A folder without an `__init__.py`
    (the clone of a package that is installed) gives way to a package elsewhere, as in Python."""
    package, *below = module.split(".")
    in_path = importlib.machinery.PathFinder.find_spec
    try:
        found = in_path(package, [os.getcwd(), *sys.path]) or importlib.util.find_spec(package)
    except ValueError:
        return False
    for name in below:
        if found is None or found.submodule_search_locations is None:
            return False
        found = in_path(name, list(found.submodule_search_locations))
    return found is not None


class GivesWay(BaseException):
    """Ends a script that starts what is metered in its place."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script ended: its exit code, and the exception that ended it, if it was not the last step."""

    code: int
    error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an error ended it; Ctrl-C does not count as one."""
        return self.error is not None and not isinstance(self.error, KeyboardInterrupt)


def run(script: Script, session: ScriptSession) -> Ending:
    """Run the script in the open session. Its traceback is printed as Python would print it."""
    with _as_program(script, session.rank % session.gpus_per_node):
        try:
            if script.is_module:
                runpy.run_module(script.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.target, run_name="__main__")
        except StepsDone:
            return Ending(0)
        except KeyboardInterrupt as stop:
            return Ending(130, stop)  # 128 + SIGINT, as a shell tells it
        except SystemExit as stop:
            return Ending(_exit_code(stop), stop if _exit_code(stop) else None)
        except GivesWay as start:
            return Ending(1, start)
        except NotSentYet:
            raise
        except BaseException as error:
            _print_own_traceback(error)
            return Ending(1, error)
    return Ending(0)


@contextmanager
def _as_program(script: Script, local_rank: int) -> Iterator[None]:
    """sys.argv and sys.path as Python sets them; no bytecode is written next to the script."""
    argv, path, writes = sys.argv, list(sys.path), sys.dont_write_bytecode
    told = [f"--local_rank={local_rank}"] if script.is_told_its_rank else []
    sys.argv = [script.target, *told, *script.arguments]
    sys.path.insert(0, os.getcwd() if script.is_module else os.path.dirname(os.path.abspath(script.target)))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.dont_write_bytecode = argv, path, writes


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _print_own_traceback(error: BaseException) -> None:
    """The traceback from the script's first line on, without flopmeter's frames."""
    frames = error.__traceback__
    while frames is not None and _is_of_the_runner(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    getattr(sys.stderr, "go_on", lambda: None)()  # the stream of a rank that started again (ranks.py)
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _is_of_the_runner(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__
