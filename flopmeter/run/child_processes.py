"""Processes that a program starts: none of them is metered.

Works around: a forked process (a worker of a DataLoader) inherits dispatch modes, and would record what nobody reads. A
process that spawn or forkserver starts imports the script's main module afresh, and with it the packages of CUDA
kernels that it names at its top: it needs the same shims.
Until: dispatch modes end at a fork; for shims never.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

from flopmeter.run.patches import Patch, applied
from flopmeter.run.shims import importable
from flopmeter.torch_names.private import no_dispatch_modes

_ROOT = str(Path(__file__).parents[2])
_open_runs = 0
_until_the_process_ends = ExitStack()  # contexts of a child process, which are never left


@contextmanager
def forks_unmetered() -> Iterator[None]:
    """In this context forked processes run without this process' dispatch modes."""
    global _open_runs
    _open_runs += 1
    try:
        yield
    finally:
        _open_runs -= 1


def patches() -> Iterator[Patch]:
    """What another process hands over is no work of this one, and no new tensor of its step."""
    rebuild = reductions.rebuild_tensor

    @functools.wraps(rebuild)
    def unmetered(*args: Any, **kwargs: Any) -> Tensor:
        with no_dispatch_modes():
            return rebuild(*args, **kwargs)  # type: ignore[no-untyped-call]

    yield Patch(reductions, rebuild.__name__, unmetered, "a worker's batch was made there")


def _leave_modes() -> None:
    if _open_runs:
        _until_the_process_ends.enter_context(no_dispatch_modes())


os.register_at_fork(after_in_child=_leave_modes)


@contextmanager
def with_shims(packages: Collection[str]) -> Iterator[None]:
    """In this context processes that multiprocessing starts have the shims of these packages."""
    given = multiprocessing.spawn.get_preparation_data

    def and_shims(name: str) -> dict[str, Any]:
        return {"shims": _EntersShims(packages), **given(name)}

    reason = "what a child unpickles first, before it imports the main module"
    with applied([Patch(multiprocessing.spawn, "get_preparation_data", and_shims, reason)] if packages else []):
        yield


class _EntersShims:
    """Unpickled, it calls `_enter`. Written as code, since flopmeter may lie where this process alone looks for it."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = tuple(packages)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        own = f"from {__name__} import _enter; _enter({self._packages!r})"
        return exec, (f"import sys; sys.path.append({_ROOT!r}); {own}",)


def _enter(packages: Collection[str]) -> None:
    _until_the_process_ends.enter_context(importable(packages, lambda note: None))
