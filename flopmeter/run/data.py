"""Processes that the program forks: workers of a DataLoader, and those that prepare data. They are not metered.

Works around: a forked process inherits dispatch modes, and would record what nobody reads.
Until: dispatch modes end at a fork.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

from flopmeter.run.patches import Patch
from flopmeter.torch_names.private import no_dispatch_modes

_open_runs = 0
_left = ExitStack()  # contexts of a forked process, which are never left


@contextmanager
def forks_unmetered() -> Iterator[None]:
    """Processes that are forked inside run without this process' modes."""
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
            return rebuild(*args, **kwargs)

    yield Patch(reductions, rebuild.__name__, unmetered, "a worker's batch was made there")


def _leave_modes() -> None:
    if _open_runs:
        _left.enter_context(no_dispatch_modes())  # for good


os.register_at_fork(after_in_child=_leave_modes)
