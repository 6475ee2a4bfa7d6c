"""The ops that DTensor runs only to learn shapes are not metered.

Works around: DTensor runs each op on fake tensors of the global shape. That is done on the host and once for each
shape; no kernel does it, but the dispatch modes that are on see it.
Until: DTensor switches these modes off for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flopmeter.known_values import KnownValues
from flopmeter.torch_names.private import PROPAGATE, no_dispatch_modes

_lock = threading.Lock()
_patch: Any = None
_users = 0


@contextmanager
def unseen_propagation(_known: KnownValues) -> Iterator[None]:
    """In this context no dispatch mode sees the ops that DTensor runs to find shapes."""
    global _patch, _users
    if not (PROPAGATE.loaded and PROPAGATE.present()):  # a program without DTensors need not pay for their import
        yield
        return
    class_name, method = PROPAGATE.attribute.split(".")
    propagator = getattr(PROPAGATE.owner, class_name)
    with _lock:
        if not _users:
            _patch = mock.patch.object(propagator, method, _without_modes(PROPAGATE.value))
            _patch.start()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _patch.stop()


def _without_modes(method: Any) -> Any:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch_modes():
            return method(*args, **kwargs)

    return run
