"""The ops that DTensor runs only to learn shapes are not metered.

Works around: DTensor runs each op on fake tensors of the global shape. That is done on the host and once for each
shape; no kernel does it, but the dispatch modes that are on see it.
Until: DTensor switches these modes off for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

from flopmeter.known_values import KnownValues
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PROPAGATE, no_dispatch_modes
from flopmeter.torch_names.shared_patch import SharedPatch


def unseen_propagation(_known: KnownValues) -> AbstractContextManager[None]:
    """In this context no dispatch mode sees the ops that DTensor runs to find shapes."""
    # A program without DTensors need not pay for their import.
    return _patch if PROPAGATE.loaded and PROPAGATE.present() else nullcontext()


def _install() -> ExitStack:
    undo = ExitStack()
    method = PROPAGATE.attribute.rpartition(".")[2]
    undo.enter_context(mock.patch.object(PROPAGATE.parent, method, _without_modes(PROPAGATE.value)))
    return undo


_patch = SharedPatch(_install)


@around
def _without_modes(method: Any, *args: Any, **kwargs: Any) -> Any:
    with no_dispatch_modes():
        return method(*args, **kwargs)
