"""How each op treats known values. Most ops are run again on the CPU; an op that needs more has one entry here. All
else follows from its schema and its tags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.known_values import collectives, stand_ins
from flopmeter.known_values.assumed import assumed_handler
from flopmeter.known_values.assumptions import Assumptions, DataDependentError
from flopmeter.known_values.custom_ops import custom
from flopmeter.known_values.data_dependent import ask, shape, suppressed
from flopmeter.known_values.indexing import GATHERS, index, index_copy, index_put, masked_select, scatter
from flopmeter.known_values.lengths import arguments_with_lengths, with_lengths
from flopmeter.known_values.replay import Handler, Invocation, Knowledge
from flopmeter.known_values.values import address, is_discrete, is_weight, no_modes, spans_storage
from flopmeter.records.ops import AVERAGES
from flopmeter.records.sparse_layouts import COMPRESSED, pointers_and_indices
from flopmeter.torch_names.operators import NAMESPACES_OF_TORCH, of_tensors
from flopmeter.torch_names.operators import aten_overloads as aten
from flopmeter.torch_names.private import graph_task


@dataclass(frozen=True, slots=True)
class ValueRule:
    """How calls of one op are answered. `always`: even if no argument is known."""

    handle: Handler
    always: bool
    writes: tuple[tuple[int, str], ...] = ()


def rule_of(func: Any, assumptions: Assumptions) -> ValueRule:
    if not isinstance(func, OpOverload):  # a higher-order op: its schema does not say what it writes to
        return ValueRule(forget_all, always=False)
    arguments = func._schema.arguments
    writes = tuple((i, a.name) for i, a in enumerate(arguments) if _is_written(a))
    if handler := assumed_handler(func, assumptions) or SPECIAL.get(func) or _BY_NAME.get(func._schema.name):
        return ValueRule(handler, True, writes)
    if arguments_with_lengths(func):
        return ValueRule(with_lengths, True, writes)
    if exchange := collectives.handler_of(func):
        return ValueRule(exchange, True)
    if func.namespace not in NAMESPACES_OF_TORCH:
        return ValueRule(custom, True, writes)
    if torch.Tag.data_dependent_output in func.tags:
        return ValueRule(ask, True, writes)
    if torch.Tag.dynamic_output_shape in func.tags:
        return ValueRule(shape, True, writes)
    if func.is_view:
        return ValueRule(view, False)
    if func.namespace != "aten" or func in NEVER_REPLAYED or torch.Tag.nondeterministic_seeded in func.tags:
        return ValueRule(Knowledge.run_unknown, False, writes)
    is_factory = not of_tensors(arguments)
    return ValueRule(factory if is_factory else Knowledge.replay, is_factory, writes)


def _is_written(argument: Any) -> bool:
    """Whether the op writes to it. Batch norms write to running statistics, which most of their schemas conceal."""
    marked = argument.alias_info is not None and argument.alias_info.is_write
    return marked or argument.name in AVERAGES


def factory(known: Knowledge, call: Invocation) -> Any:
    """Constants: torch.arange, full, ..."""
    result = call.run()
    if isinstance(result, Tensor) and result.is_meta and known.is_small(result):
        with no_modes():
            known.set(result, known.answer(call))
    return result


def drawn(known: Knowledge, call: Invocation) -> Any:
    """A permutation, which depends on no data, so any is as good as a GPU's. It is drawn apart from the program's own
    random numbers on the CPU, whose sequence stays the same."""
    result = call.run()
    if result.is_meta and known.is_small(result):
        with no_modes():
            kwargs = {**known.real(call.kwargs), "generator": known.generator}
            known.set(result, call.func.overloadpacket(*known.real(call.args), **kwargs))
    return result


def view(known: Knowledge, call: Invocation) -> Any:
    """A view shares the storage of its base, so it shares the value. A view of a weight makes the value unknown."""
    known.knows_all(call.tensors)
    return call.run()


def forget_all(known: Knowledge, call: Invocation) -> Any:
    """The op may write to any of its arguments, or give them other memory, as resize_ does."""
    known.forget(call.tensors)
    return call.run()


def to_copy(known: Knowledge, call: Invocation) -> Any:
    """A tensor that is copied to meta stays known; one that is copied from meta has to be known."""
    source = call.args[0]
    if not isinstance(source, Tensor):  # torch.vmap passes numbers as they are
        return call.run()
    target = call.kwargs.get("device") or source.device
    if source.is_meta and target.type != "meta":
        if known.values.knows(source):
            return known.answer(call)
        if known.assume.stands_in:
            return stand_ins.on_host(known, call)
        raise DataDependentError(str(call.func))
    if target.type != "meta" or (not source.is_meta and stand_ins.comes_back(known, source)):
        return call.run()
    if source.layout in (torch.sparse_coo, *COMPRESSED) and not source.is_meta:
        return _sparse_on_meta(source, call.kwargs.get("dtype") or source.dtype)
    to_discrete = (dtype := call.kwargs.get("dtype")) is not None and not dtype.is_floating_point
    return known.replay(call) if source.is_meta or to_discrete or _brings_values(source) else call.run()


def _sparse_on_meta(source: Tensor, dtype: torch.dtype) -> Tensor:
    """A sparse copy on meta with its elements, which torch's own copy loses."""
    with no_modes():
        if source.layout is torch.sparse_coo:
            indices, values = source._indices().to("meta"), source._values().to("meta", dtype)
            return torch.sparse_coo_tensor(
                indices, values, source.shape, is_coalesced=source.is_coalesced(), check_invariants=False
            )
        pointers, indices = (part.to("meta") for part in pointers_and_indices(source))
        values, shape = source.values().to("meta", dtype), list(source.shape)
        return torch.sparse_compressed_tensor(
            pointers, indices, values, shape, layout=source.layout, check_invariants=False
        )


def _brings_values(source: Tensor) -> bool:
    """Whether a copy to meta keeps the value: not of weights, and not of sparse tensors, which have no storage."""
    return bool(address(source)) and not is_weight(source)


def overwrite(known: Knowledge, call: Invocation) -> Any:
    """copy_, fill_, zero_: if a small tensor is overwritten completely, its value is known."""
    target, *sources = call.args[:2]
    sources = [source for source in sources if isinstance(source, Tensor)]
    if not target.is_meta:
        return ask_copy(known, call) if any(source.is_meta for source in sources) else call.run()
    from_host = [source for source in sources if not source.is_meta]
    is_lost = any(
        stand_ins.comes_back(known, source) or (source.dim() and not _brings_values(source)) for source in from_host
    )
    if is_lost or target.layout is not torch.strided:
        return known.run_unknown(call)
    can_become_known = known.is_small(target) and spans_storage(target) and not is_weight(target)
    if not known.values.knows(target) and can_become_known and known.knows_all(sources):
        _start_blank(known, target)
    return known.replay(call)


def ask_copy(known: Knowledge, call: Invocation) -> Any:
    """copy_ from meta to a CPU tensor."""
    if known.knows_all(call.tensors):
        known.answer(call)
        return call.args[0]
    if known.assume.stands_in:
        return stand_ins.into_host(known, call)
    raise DataDependentError(str(call.func))


def blank(known: Knowledge, call: Invocation) -> Any:
    """torch.empty of integers: a program writes each element before it reads it, so any initial value will do."""
    result = call.run()
    if result.is_meta and is_discrete(result) and known.is_small(result):
        _start_blank(known, result)
        known.values.cells[address(result)].is_blank = True
    return result


def _start_blank(known: Knowledge, tensor: Tensor) -> None:
    with no_modes():
        memory = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu")
        known.set(tensor, memory.as_strided(tensor.shape, tensor.stride()))


def filled(known: Knowledge, call: Invocation) -> Any:
    """zeros_like, new_full, ...: constants, which depend only on the tensor argument's shape. Floats become masks
    (zeros like the scores, ones where an expert was picked). Values of the backward pass, except in what it recomputes,
    and of states shaped like a weight are not kept, since no program asks for them."""
    result = call.run()
    if not result.is_meta or result.layout is not torch.strided:
        return result
    name = call.func.overloadpacket.__name__
    fill = _FILLS[name] if name in _FILLS else call.argument(2 if name == "new_full" else 1, "fill_value")
    if is_discrete(result) and known.is_small(result):
        _start_blank(known, result)
        known.values.read(result).fill_(fill)
    elif _may_be_mask(result, call.args[0]):
        with no_modes():
            known.values.spread(result, torch.tensor(fill, dtype=result.dtype, device="cpu"))
    return result


def _may_be_mask(result: torch.Tensor, model: torch.Tensor) -> bool:
    is_asked_for = torch.is_grad_enabled() or graph_task() == -1
    return result.dtype.is_floating_point and is_asked_for and not isinstance(model, torch.nn.Parameter)


def fill(known: Knowledge, call: Invocation) -> Any:
    """A GPU accepts a 0-dim value on the CPU, the meta kernel refuses it: pass it as a number."""
    target, *where, value = call.args
    if target.is_meta and not value.is_meta:
        call = known.rewritten(call, BY_NUMBER[call.func], (target, *where, value.item()))
    return known.replay(call)


def histogram(known: Knowledge, call: Invocation) -> Any:
    """On a GPU the op takes integers; the CPU kernel takes floats only."""
    result = call.run()
    source = call.args[0]
    if known.values.knows(source) and known.is_small(source):
        with no_modes():
            counts = known.values.read(source).double().histc(*call.args[1:])
            known.set(result, counts.to(result.dtype))
    return result


_BY_NAME: dict[str, Handler] = {"torchvision::nms": suppressed}  # the op is there once a program has imported it
BY_NUMBER = {
    aten.masked_fill.Tensor: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill_.Scalar,
    aten.index_fill.int_Tensor: aten.index_fill.int_Scalar,
    aten.index_fill_.int_Tensor: aten.index_fill_.int_Scalar,
}
_FILLS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}

SPECIAL: dict[OpOverload, Handler] = {
    aten.masked_select.default: masked_select,
    aten._ctc_loss_backward.default: shape,
    aten._ctc_loss_backward.Tensor: shape,
    aten.is_nonzero.default: ask,
    aten._to_copy.default: to_copy,
    **dict.fromkeys(BY_NUMBER, fill),
    aten.histc.default: histogram,
    aten.resize_.default: forget_all,
    # A tensor that is given another storage has the values of that one, and neither storage is written to.
    **dict.fromkeys(
        (
            aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor,
            aten.set_.source_Tensor_storage_offset,
        ),
        view,
    ),
    **dict.fromkeys((aten.randperm.default, aten.randperm.generator), drawn),
    **dict.fromkeys(stand_ins.COMPARISONS, stand_ins.compared),
    **dict.fromkeys(GATHERS, index),
    **dict.fromkeys(
        (
            aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
            aten._unsafe_index_put.default,
        ),
        index_put,
    ),
    **dict.fromkeys((aten.scatter.src, aten.scatter_.src), scatter),
    **dict.fromkeys((aten.index_copy.default, aten.index_copy_.default), index_copy),
    **dict.fromkeys((aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default), overwrite),
    **dict.fromkeys(
        (
            aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default, aten.empty_like.default,
            aten.new_empty.default, aten.new_empty_strided.default,
        ),
        blank,
    ),
    **dict.fromkeys(
        (
            aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
            aten.new_ones.default, aten.new_full.default,
        ),
        filled,
    ),
}  # fmt: skip

# Matmuls and convolutions: their results steer no program, and they take long on the CPU.
NEVER_REPLAYED = frozenset((
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_mm.default,
))  # fmt: skip
