"""Mixed precision that was asked for before the emulation opened.

Works around: without CUDA, torch forgets what was asked for.
Until: torch keeps it, and turns it off only on entry.

Without CUDA, torch.autocast("cuda") and GradScaler("cuda") turn themselves off in their constructors, with a warning,
and do not remember that they were meant to be on. So flopmeter watches both from its import on (WATCHED). What torch
turned off is turned on while an emulation is open, and off again afterwards. Without an emulation nothing changes.

A program that picks its device type by torch.cuda.is_available(), as accelerate and Lightning Fabric do, picks "cpu"
here and "cuda" on a GPU. So on meta tensors torch.autocast("cpu") counts as torch.autocast("cuda").
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher, private
from flopmeter.torch_names.around import around

WATCHED = {
    private.NO_AMP.path: "only what is to be on asks it when it is made: tells what torch turns off for want of CUDA",
    "autocast.__enter__": "tells which contexts are open around an emulation that opens",
    "autocast.__exit__": "which no longer are",
}
"""What is wrapped when flopmeter is imported, for the rest of the process, and why. A wrapper only takes a note."""

_AUTOCAST = torch.amp.autocast_mode.autocast
_GRAD_SCALER = torch.amp.GradScaler

_turned_off: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Objects that torch turned off although the program wanted them on, with the arguments of their constructors."""
_unknown: WeakSet[Any] = WeakSet()
"""Objects that are off for an unknown reason: they are older than the import of flopmeter, or of a subclass."""


class _EnteredAutocasts(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Any] = []  # the autocasts that this thread has entered, the innermost last
        self.twins: list[tuple[Any, Any]] = []  # some of them, each with the autocast("cuda") that it counts as


_open = _EnteredAutocasts()


def watch() -> None:
    """Wrap what WATCHED lists. About objects that exist already it is only known that they are off."""
    if dispatcher.missing(private.AUTOCAST):
        return
    kinds = _subclasses(_AUTOCAST) | _subclasses(_GRAD_SCALER)
    instances = (found for found in gc.get_referrers(*kinds) if type(found) in kinds)
    _unknown.update(filter(dispatcher.is_cuda_amp_off, instances))
    owner, name = private.NO_AMP.owner, private.NO_AMP.attribute
    setattr(owner, name, _noting_who_asks(private.NO_AMP.value))
    _AUTOCAST.__enter__ = _then(lambda entered: _open.contexts.append(entered), _AUTOCAST.__enter__)  # type: ignore[method-assign]
    _AUTOCAST.__exit__ = _noting_exit(_AUTOCAST.__exit__)  # type: ignore[method-assign]


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _noting_who_asks(is_amp_unavailable: Any) -> Any:
    """Notes which constructor asks. (If the constructors were wrapped, torch's warning would point at the wrapper.)"""

    @functools.wraps(is_amp_unavailable)
    def wrapper() -> bool:
        unavailable: bool = is_amp_unavailable()
        constructor = sys._getframe(1)
        made = constructor.f_locals.get("self")
        if unavailable and (isinstance(made, _AUTOCAST) or type(made) in (_GRAD_SCALER, torch.cuda.amp.GradScaler)):
            parameters = constructor.f_code.co_varnames[1 : constructor.f_code.co_argcount]
            _turned_off[made] = {name: constructor.f_locals[name] for name in parameters}
        elif unavailable and isinstance(made, _GRAD_SCALER):
            _unknown.add(made)
        return unavailable

    return wrapper


@around
def _then(note: Callable[[Any], None], method: Any, self: Any, *args: Any) -> Any:
    """The method, followed by a note of the object."""
    result = method(self, *args)
    note(self)
    return result


@around
def _noting_exit(exit_: Any, self: Any, *exception: Any) -> Any:
    if self in _open.contexts:
        _open.contexts.remove(self)
    if _open.twins and _open.twins[-1][0] is self:
        _leave_twin()
    return exit_(self, *exception)


# --- while an emulation is open ------------------------------------------------------------------------------------


def grant(scope: Emulation) -> None:
    """Turn on what torch turned off, add notes about unknown objects, and let "cpu" count as "cuda"."""
    for made, arguments in list(_turned_off.items()):
        if isinstance(made, _AUTOCAST):
            made._enabled = True
            scope.on_close(setattr, made, "_enabled", False)
        else:
            scope.on_close(setattr, made, "__dict__", dict(vars(made)))
            _GRAD_SCALER.__init__(made, **arguments)
    _follow(scope)
    if dispatcher.autocast_nesting() > len(_open.contexts):  # flopmeter was imported inside of one
        scope.note(_unknown_text("autocast"))
    for context in list(_open.contexts):
        if context.device == "cuda" or _counts_as_cuda(context):
            _enter_twin(scope, context)


def _follow(scope: Emulation) -> None:
    """Note contexts that are entered, and scalers that scale."""

    def entered(context: Any) -> None:
        if context in _unknown:
            scope.note(_unknown_text("autocast"))
        if _counts_as_cuda(context):
            _enter_twin(scope, context)

    def scaled(scaler: Any) -> None:
        if scaler in _unknown:
            scope.note(_unknown_text("GradScaler"))

    scope.patch(_AUTOCAST, "__enter__", _then(entered, _AUTOCAST.__enter__))
    scope.patch(_GRAD_SCALER, "scale", _then(scaled, _GRAD_SCALER.scale))
    scope.on_close(_leave_twins)


def _counts_as_cuda(context: Any) -> bool:
    """Whether this autocast("cpu") is or was on. A checkpoint restores the state of both devices: its
    autocast("cpu") that stays off says nothing about "cuda"."""
    return context.device == "cpu" and bool(context.prev or context._enabled)


def _enter_twin(scope: Emulation, context: Any) -> None:
    """Let `context` act on meta tensors like an autocast("cuda") with the same settings."""
    is_on, dtype = context._enabled, context.fast_dtype
    if context.device == "cpu" and is_on:
        scope.note(
            f"torch.autocast('cpu', {dtype}) was taken for torch.autocast('cuda', {dtype}) where tensors are on meta: "
            "a program that looks for CUDA finds none and picks 'cpu'"
        )
    twin = _AUTOCAST("cuda", dtype, is_on, torch.is_autocast_cache_enabled())
    twin.__enter__()
    _open.twins.append((context, twin))


def _leave_twin() -> None:
    _, twin = _open.twins.pop()
    twin.__exit__(None, None, None)


def _leave_twins() -> None:
    while _open.twins:
        _leave_twin()


def _unknown_text(what: str) -> str:
    return (
        f"off, and perhaps meant to be on: a torch {what} for 'cuda' that was made before flopmeter was imported. "
        "Without CUDA torch turns it off and does not keep the wish: import flopmeter first, or make it inside the "
        "meter"
    )
