"""What a program registers with libraries for the life of its process: undone where it runs again, as another rank or
from its start.

Works around: operators of torch.library and resolvers of OmegaConf, of a name only one at a time.
Until: each rank has a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from flopmeter.run.own_code import is_own
from flopmeter.run.patches import Patch, applied
from flopmeter.torch_names.around import around
from flopmeter.torch_names.frames import callers
from flopmeter.torch_names.imported import entered_once_imported


@contextmanager
def registered_until_here() -> Iterator[None]:
    """What the program's own code registers in this context is removed after it. Registrations of installed packages,
    which are imported once, stay."""
    with ExitStack() as undo:
        init = torch.library.Library.__init__
        patch = Patch(torch.library.Library, "__init__", _undone(undo, _destroy, init), "another rank registers it too")
        undo.enter_context(applied([patch]))
        undo.enter_context(entered_once_imported("omegaconf", _no_resolvers_behind))
        yield


@contextmanager
def _no_resolvers_behind() -> Iterator[None]:
    config: Any = sys.modules["omegaconf"].OmegaConf
    with ExitStack() as undo:
        register = _undone(undo, config.clear_resolver, config.register_new_resolver)
        patch = Patch(config, "register_new_resolver", staticmethod(register), "another rank registers it too")
        undo.enter_context(applied([patch]))
        yield


@around
def _undone(
    undo: ExitStack,
    undo_it: Callable[[Any], Any],
    register: Callable[..., Any],
    what: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """What the program itself registers, not an installed package, is undone."""
    result = register(what, *args, **options)
    if _is_of_own_code():
        undo.callback(undo_it, what)
    return result


def _is_of_own_code() -> bool:
    for frame in callers():
        module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if module.partition(".")[0] not in _IN_BETWEEN:
            return is_own(module, file)
        if frame.f_code.co_name == "<module>":
            return False  # one of torch's own is imported, which happens once
    return False


def _destroy(library: Any) -> None:
    library._destroy()


_IN_BETWEEN = {"torch", "flopmeter", "functools"}  # packages between the program's call and what it registers with
