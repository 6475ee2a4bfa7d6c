"""What a dispatch mode never sees: while a KnownValues is open, these ways in and out of meta tensors lead to it.

Works around: torch builds constants on meta, and reads tensors for numpy and f-strings, without an op.
Until: each of these ways is an op that a dispatch mode sees.

`torch.tensor` and its kin build meta tensors without an op; `.numpy()` and f-strings read without one; up to 2.14 torch
makes of the number in `x[...] = 0` a tensor of the host if x is on CUDA, but one on meta if x is there
(THPVariable_setitem in torch/csrc/autograd/python_variable_indexing.cpp). They are patched, because a TorchFunctionMode
would turn off torch's fast paths. (`Tensor.__getitem__` must not be: that makes every tensor a sequence to CPython, for
good, and `torch.tensor([t, t])` fails; see index_lists.py.)
`.item()`, and with it `bool(t)`, `int(t)`, `x[t]` and `range(t)`, raises on meta in a composite; a kernel on
AutogradMeta sends it on to `_local_scalar_dense`, as on CUDA. All is undone when the last one closes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flopmeter.known_values.replay import Knowledge
from flopmeter.known_values.values import is_weight, no_modes
from flopmeter.torch_names.around import around
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten_overloads as aten
from flopmeter.torch_names.private import device_constructors, get_unwrapped, is_wrapped, peek_interpreter_stack
from flopmeter.torch_names.shared_patch import SharedPatch


class _Open(threading.local):
    """The KnownValues that are open in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Knowledge] = []


_open = _Open()


def open_ones() -> list[Knowledge]:
    return _open.stack


def note_assumption(rule: str, func: Any) -> None:
    """Tells the innermost meter that the rule was used; without a meter there is nobody to tell."""
    for known in open_ones()[-1:]:
        known.assume.note(rule, func)


def open_for(known: Knowledge) -> None:
    _patches.__enter__()
    _open.stack.append(known)


def close_for(known: Knowledge) -> None:
    _open.stack.remove(known)
    _patches.__exit__()


@contextmanager
def known_in_this_thread(known: Iterable[Knowledge]) -> Iterator[None]:
    """In this context these, which another thread has opened, answer in this thread too."""
    before = _open.stack
    _open.stack = [*before, *known]
    try:
        yield
    finally:
        _open.stack = before


@contextmanager
def as_torch_has_them() -> Iterator[tuple[Any, ...]]:
    """In this context the patched functions are torch's own again, so that Dynamo can trace them. Yields them."""
    patched = [(owner, name, getattr(owner, name)) for owner, name, _ in _originals]
    try:
        for owner, name, original in _originals:
            setattr(owner, name, original)
        yield tuple(original for _, _, original in _originals)
    finally:
        for owner, name, wrapper in patched:
            setattr(owner, name, wrapper)


_originals: list[tuple[Any, str, Any]] = []  # what is patched now, as torch has it


def _install() -> ExitStack:
    device_constructors()  # it caches torch.tensor at its first call, which must see the function of torch
    with ExitStack() as undo:
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        library.impl("item", _item, "AutogradMeta")
        for owner, name, data in (
            (torch, "tensor", "data"),
            (torch, "as_tensor", "data"),
            (torch, "asarray", "obj"),
            (Tensor, "new_tensor", "data"),
        ):
            _originals.append((owner, name, getattr(owner, name)))
            patched = _constructor(data, int(owner is Tensor), getattr(owner, name))
            undo.enter_context(mock.patch.object(owner, name, patched))
        wraps = {"__format__": _formatting, "numpy": _to_numpy}
        if running_version() < (2, 15):
            wraps["__setitem__"] = _put
        for name, wrap in wraps.items():
            _originals.append((Tensor, name, getattr(Tensor, name)))
            undo.enter_context(mock.patch.object(Tensor, name, wrap(getattr(Tensor, name))))
        scripting = scripting_inside(as_torch_has_them, torch.jit.script)
        undo.enter_context(mock.patch.object(torch.jit, "script", scripting))
        undo.callback(_originals.clear)
        return undo.pop_all()


_patches = SharedPatch(_install)


def scripting_inside(around: Callable[[], AbstractContextManager[Any]], script: Callable[..., Any]) -> Any:
    """torch.jit.script inside of `around`: it only knows torch's own functions. It looks names up in the frame of its
    caller, which is one further away. For each function that the program's calls, torch calls it again."""
    is_inside = False

    @functools.wraps(script)
    def scripting(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return script(obj, optimize, _frames_up + 1, *args, **kwargs)
        is_inside = True
        try:
            with around():
                return script(obj, optimize, _frames_up + 1, *args, **kwargs)
        finally:
            is_inside = False

    return scripting


def _item(tensor: Tensor) -> Any:
    return aten.item.default.decompose(tensor)


def _knower(tensor: Any) -> Knowledge | None:
    """The KnownValues to ask about a meta tensor; None for other tensors."""
    return _open.stack[-1] if _open.stack and isinstance(tensor, Tensor) and tensor.is_meta else None


@around
def _constructor(name: str, position: int, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`name` and `position` of the argument that holds the values."""
    data = args[position] if position < len(args) else kwargs.get(name)
    if isinstance(data, (list, tuple)) and _open.stack and _open.stack[-1].assume.stands_in:
        if position < len(args):
            args = (*args[:position], _read(data), *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: _read(data)}
    try:
        result = original(*args, **kwargs)
    except RuntimeError:
        if not _open.stack or peek_interpreter_stack() is None:
            raise
        # Under torch.func.grad torch cannot build constants on meta, but it can on the CPU.
        return original(*args, **{**kwargs, "device": "cpu"}).to("meta")
    if (known := _knower(result)) is not None and not isinstance(data, Tensor):
        tensor = _bare(result)
        if not _is_array(data):  # these are copied by an op, on meta too
            known.on_new(tensor)
        if not known.values.knows(tensor) and not is_weight(tensor):
            _remember(known, tensor, data)
    return result


def _is_array(data: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(data, numpy.ndarray)


def _read(data: Any) -> Any:
    """The nested lists, with tensors of the host in place of those on meta, each of which torch reads by an `.item()`
    that no mode sees."""
    if isinstance(data, (list, tuple)):
        return [_read(item) for item in data] if any(isinstance(item, (Tensor, list, tuple)) for item in data) else data
    if _knower(data) is None or data.numel() != 1:
        return data
    return _true_tensor(data.item(), dtype=data.dtype, device="cpu")


def _bare(tensor: Tensor) -> Tensor:
    """The tensor that owns the storage, without wrappers of torch.func. (Constants have these since torch 2.15.)"""
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _remember(known: Knowledge, tensor: Tensor, data: Any) -> None:
    if not known.is_small(tensor):
        return
    try:
        numbers = list(_numbers(known, data))
    except LookupError:
        return
    with no_modes():
        known.set(tensor, _true_tensor(numbers, dtype=tensor.dtype, device="cpu").reshape(tensor.shape))


_true_tensor = torch.tensor


def _numbers(known: Knowledge, data: Any) -> Iterator[Any]:
    """The numbers in nested lists and tensors, one after another: beside numbers torch takes tensors of one element for
    numbers, whatever their shape. Raises LookupError if a tensor's value is not known."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _numbers(known, item)
    elif isinstance(data, Tensor):
        if not known.values.knows(data):
            raise LookupError
        with no_modes():
            yield from known.values.read(data).flatten().tolist()
    else:
        yield data


@around
def _formatting(original: Callable[..., str], tensor: Tensor, spec: str) -> str:
    known = _knower(tensor)
    if known is not None and not tensor.dim() and (known.assume.stands_in or known.values.knows(tensor)):
        return format(tensor.item(), spec)
    return original(tensor, spec)


@around
def _put(original: Callable[..., None], tensor: Tensor, index: Any, value: Any) -> None:
    if (known := _knower(tensor)) is not None and isinstance(value, (bool, int, float, complex)):
        with no_modes():
            value = torch.scalar_tensor(value, dtype=tensor.dtype, device="cpu")
        known.on_numbers(value)
    original(tensor, index, value)


@around
def _to_numpy(original: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Any:
    if (known := _knower(tensor)) is not None and known.values.knows(tensor):
        with no_modes():
            return original(known.values.read(tensor).clone(), **kwargs)
    return original(tensor, **kwargs)
