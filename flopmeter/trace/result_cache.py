"""Results of ops on meta tensors, made without running the op again.

torch finds the shapes of results on meta in Python, which takes 10 to 500 µs an op. A second call with the same shapes
has the same result. This holds only for ops that do nothing but return their result: not for views, not if the result
does not fill a new storage, not for ops of other libraries, whose kernels may do anything, and not for sparse tensors,
which differ in more than shapes (whether they are coalesced).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.records.memory_format import torch_strides
from flopmeter.torch_names.private import dispatch_modes, peek_interpreter_stack

ResultMaker = Callable[[Sequence[Tensor]], Any]  # from the call's tensor arguments, in order, to its result

_NUMBERS = (int, float, bool, type(None))  # not their subclasses


def reaches_kernel_directly() -> bool:
    """Whether an op that is called now goes straight to its kernel: no other dispatch mode (such as FakeTensorMode or
    another meter) and no transform of torch.func is active."""
    return not dispatch_modes() and peek_interpreter_stack() is None


def result_maker(func: OpOverload, inputs: Sequence[Tensor], result: Any) -> ResultMaker | None:
    """A function that makes the result for calls of the same geometry, or None. `inputs` are all tensor arguments."""
    if not _is_cacheable(func) or not all(map(is_dense_meta, inputs)):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return _maker(result, inputs, storages)


def once_for_each_geometry(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The result of a foreach op, which does to the tensors at one place of its lists what the op of single tensors
    does: of places with equal shapes, strides and types only the first runs, and none where the op writes in place and
    has nothing to refuse, since all tensors there are floats of one geometry. All tensors are dense and on meta."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    if len({len(each) for each in lists}) != 1:
        return func(*args, **kwargs)  # torch has an error to raise
    first: dict[Any, int] = {}
    firsts = [
        first.setdefault(tuple(map(_geometry, place)), number) for number, place in enumerate(zip(*lists, strict=True))
    ]
    if not func._schema.returns:
        first = {place: number for place, number in first.items() if not _are_floats_alike(place)}
        if not first:
            return None

    def chosen(value: Any) -> Any:
        return [value[number] for number in first.values()] if isinstance(value, (list, tuple)) else value

    result = func(*map(chosen, args), **{name: chosen(value) for name, value in kwargs.items()})
    if result is None:  # written in place
        return None
    made = dict(zip(first.values(), result, strict=True))
    return [made[like] if like == number else torch.empty_like(made[like]) for number, like in enumerate(firsts)]


def _geometry(value: Any) -> Any:
    return (value.shape, torch_strides(value), value.dtype) if isinstance(value, Tensor) else type(value)


def _are_floats_alike(place: Sequence[Any]) -> bool:
    tensors = {each for each in place if isinstance(each, tuple)}
    return len(tensors) == 1 and next(iter(tensors))[2].is_floating_point


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_dense_meta(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.is_meta and tensor.layout is torch.strided


@functools.cache
def _is_cacheable(func: OpOverload) -> bool:
    changes_more = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    has_out = any(argument.is_out for argument in func._schema.arguments)
    return func.namespace == "aten" and not (func.is_view or has_out or changes_more & set(func.tags))


def _maker(result: Any, inputs: Sequence[Tensor], storages: set[int]) -> ResultMaker | None:
    if isinstance(result, Tensor):
        for position, tensor in enumerate(inputs):
            if tensor is result:  # written in place
                return itemgetter(position)
        return _tensor_maker(result, storages)
    if type(result) in (list, tuple):
        makers = [_maker(item, inputs, storages) for item in result]
        known = [maker for maker in makers if maker is not None]
        kind = type(result)
        return (lambda tensors: kind([make(tensors) for make in known])) if len(known) == len(makers) else None
    return (lambda _: result) if type(result) in _NUMBERS else None


def _tensor_maker(tensor: Tensor, taken: set[int]) -> ResultMaker | None:
    """A maker for a plain meta tensor that fills a storage of its own; None for others. `taken`: the storages of other
    tensors."""
    if type(tensor) is not Tensor or not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    is_special = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or tensor.storage_offset()
    if is_special or storage._cdata in taken or storage.nbytes() != _span(tensor) * tensor.element_size():
        return None
    taken.add(storage._cdata)
    make = functools.partial(
        torch.empty_strided, tensor.size(), torch_strides(tensor), dtype=tensor.dtype, device="meta"
    )
    return lambda _: make()


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last, gaps included: torch.empty_strided allocates that many."""
    steps = zip(tensor.size(), torch_strides(tensor), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
