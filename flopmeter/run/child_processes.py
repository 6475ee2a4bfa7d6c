"""Processes that a script starts by spawn or forkserver: Pythons that import the script's main module anew, and with it
the packages of CUDA kernels that it names at its top. They get the same shims."""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flopmeter.run.patches import Patch, applied
from flopmeter.run.shims import importable

_ROOT = str(Path(__file__).parents[2])
_until_the_process_ends = ExitStack()


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
