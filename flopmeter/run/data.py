"""Data that the program feeds: real tensors of the host, from loaders with worker processes, or synthetic ones.

Works around: worker processes of a DataLoader, which would inherit the meter, and record what nobody reads.
Until: dispatch modes end at a fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flopmeter.run.patches import Patch
from flopmeter.torch_names.private import data_utils, no_dispatch_modes

_work = data_utils.worker._worker_loop


def _unmetered(*args: Any, **kwargs: Any) -> None:
    with no_dispatch_modes():
        _work(*args, **kwargs)


def patches() -> Iterator[Patch]:
    yield Patch(data_utils.worker, "_worker_loop", _unmetered, "worker processes are not metered")
