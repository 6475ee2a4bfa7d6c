"""How each op treats known values. Most ops are run again on the CPU; an op that needs more has one entry here. All
else follows from its schema and its tags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from flopmeter.known_values import collectives, stand_ins
from flopmeter.known_values.assumptions import Assumptions, DataDependentError
from flopmeter.known_values.index_lists import index_lists
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import address, is_discrete, is_weight, no_modes, spans_storage
from flopmeter.torch_names.operators import aten_overloads as aten

Handler = Callable[[Knowledge, Invocation], Any]


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
    aliased = [(i, a.name, a.alias_info) for i, a in enumerate(arguments) if a.alias_info is not None]
    writes = tuple((i, a.name) for i, a in enumerate(arguments) if _is_written(a))
    if handler := _assumed(func, assumptions) or SPECIAL.get(func):
        return ValueRule(handler, True, writes)
    if exchange := collectives.handler_of(func):
        return ValueRule(exchange, True)
    if torch.Tag.data_dependent_output in func.tags:
        return ValueRule(ask, True, writes)
    if torch.Tag.dynamic_output_shape in func.tags:
        return ValueRule(shape, True, writes)
    if aliased and not writes:
        return ValueRule(view, False)
    if func.namespace != "aten" or func in NEVER_REPLAYED or torch.Tag.nondeterministic_seeded in func.tags:
        return ValueRule(opaque, False, writes)
    is_factory = not any("Tensor" in str(argument.type) for argument in arguments)
    return ValueRule(factory if is_factory else replay, is_factory, writes)


def _is_written(argument: Any) -> bool:
    """Batch norms write to their running statistics, which most of their schemas do not say."""
    marked = argument.alias_info is not None and argument.alias_info.is_write
    return marked or argument.name in ("running_mean", "running_var")


def _assumed(func: OpOverload, assumptions: Assumptions) -> Handler | None:
    if assumptions.routing and func in ROUTES:
        return route
    if assumptions.checks_hold:
        return CHECKS.get(func) or (is_finite if func in FINITE_CHECKS else None)
    return None


# --- ops without a rule of their own


def replay(known: Knowledge, call: Invocation) -> Any:
    return known.replay(call)


def factory(known: Knowledge, call: Invocation) -> Any:
    """Constants: torch.arange, full, ..."""
    result = call.run()
    if isinstance(result, Tensor) and result.is_meta and known.is_small(result):
        with no_modes():
            known.set(result, known.answer(call))
    return result


def view(known: Knowledge, call: Invocation) -> Any:
    """A view shares the storage of its base, so it shares the value. A view of a weight makes the value unknown."""
    known.knows_all(call.tensors)
    return call.run()


def opaque(known: Knowledge, call: Invocation) -> Any:
    """Random numbers, contractions, ops of other libraries: the result is unknown."""
    known.forget(call.written())
    return call.run()


def grouped(known: Knowledge, call: Invocation) -> Any:
    """The work of a grouped matmul depends on the lengths of its groups. If they are unknown, they are assumed
    equal."""
    place = [argument.name for argument in call.func._schema.arguments].index("offs")
    ends = call.argument(place, "offs")
    if ends is None:  # batched: no groups
        return opaque(known, call)
    if known.values.knows(ends) and not isinstance(ends, FakeTensor):
        with no_modes():
            places = known.values.read(ends).tolist()
        known.groups = tuple(max(end - start, 0) for start, end in pairwise((0, *places)))
    else:
        known.assume.note("groups of equal length", call.func)
    return opaque(known, call)


def forget_all(known: Knowledge, call: Invocation) -> Any:
    known.forget(call.tensors)
    return call.run()


# --- ops that answer with data: a Python value, or the shape of their result


def ask(known: Knowledge, call: Invocation) -> Any:
    """.item(), bool(t), equal, allclose: the result is a Python value."""
    if all(not tensor.is_meta for tensor in call.tensors):
        return call.run()
    if known.knows_all(call.tensors):
        return known.answer(call)
    if known.assume.stands_in and call.func in (aten._local_scalar_dense.default, aten.is_nonzero.default):
        is_condition = call.func is aten.is_nonzero.default
        return stand_ins.note(known, torch.bool if is_condition else call.tensors[0].dtype, call.func)
    raise DataDependentError(str(call.func))


def shape(known: Knowledge, call: Invocation) -> Any:
    """nonzero, unique, bincount: the shape of the result depends on the data."""
    if all(not tensor.is_meta for tensor in call.tensors):
        return call.run()
    _assume_mask(known, call, call.tensors[0])
    if known.knows_all(call.tensors):
        return known.lift(known.answer(call))
    if call.func is aten.repeat_interleave.Tensor and call.kwargs.get("output_size") is None:
        raise DataDependentError(str(call.func))
    try:
        return call.run()
    except NotImplementedError:
        raise DataDependentError(str(call.func)) from None


def masked_select(known: Knowledge, call: Invocation) -> Any:
    """If the mask is known, the features need not be: the call becomes an index."""
    features, mask = call.args
    _assume_mask(known, call, mask)
    if not features.is_meta or not known.values.knows(mask) or known.values.knows(features):
        return shape(known, call)
    with no_modes():
        features, mask = torch.broadcast_tensors(features, mask)
    return index(known, call._replace(func=aten.index.Tensor, args=(features, [mask])))


def index(known: Knowledge, call: Invocation) -> Any:
    """If a bool mask is known, the call becomes one with the positions of its true elements."""
    features, indices = call.args[:2]
    if not features.is_meta:
        return call.run()
    masks = [item for item in indices if item is not None and item.dtype in (torch.bool, torch.uint8)]
    if not masks:
        _read_index_lists(known, call)
        return known.replay(call)
    for mask in masks:
        _assume_mask(known, call, mask)
    if known.knows_all(masks):
        positions: list[Tensor | None] = []
        for item in indices:
            positions += _positions(known, item) if any(item is mask for mask in masks) else [item]
        call = _rewrite(known, call, call.func, (features, positions, *call.args[2:]))
    elif not call.writes and call.func in _GATHERS:
        raise DataDependentError(str(call.func))
    return known.replay(call)


def index_put(known: Knowledge, call: Invocation) -> Any:
    """If several elements are written to the same position, torch does not say which one stays: the result is
    unknown."""
    target, indices, values = call.args[:3]
    given = [(item, size) for item, size in zip(indices, target.shape, strict=False) if item is not None]
    are_places = all(item.dtype not in (torch.bool, torch.uint8) for item, _ in given)
    adds_up = call.argument(3, "accumulate", False) or values.numel() == 1
    if are_places and not adds_up and known.knows_all(call.tensors):
        with no_modes():
            columns = torch.broadcast_tensors(*(known.values.read(item) % size for item, size in given))
            places = torch.stack([column.flatten() for column in columns], 1)
            if len(places.unique(dim=0)) < len(places):
                return opaque(known, call)
    return index(known, call)


def scatter(known: Knowledge, call: Invocation) -> Any:
    """scatter and index_copy: as index_put."""
    dim, places = call.argument(1, "dim"), call.argument(2, "index")
    if known.knows_all(call.tensors):
        with no_modes():
            along = dim if places.dim() > 1 else 0
            in_order = torch.atleast_1d(known.values.read(places)).sort(along).values
            if bool((in_order.diff(dim=along) == 0).any()):
                return opaque(known, call)
    return known.replay(call)


def _read_index_lists(known: Knowledge, call: Invocation) -> None:
    """Index tensors that torch made from lists of numbers become known, if the indexed tensor is known."""
    if not known.values.knows(call.args[0]):
        return
    unknown = [item for item in call.args[1] if item is not None and not known.values.knows(item)]
    if not unknown:
        return
    lists = index_lists()
    if [(len(numbers),) for numbers in lists] == [tuple(item.shape) for item in unknown]:
        for item, numbers in zip(unknown, lists, strict=True):
            with no_modes():
                known.set(item, torch.tensor(numbers, dtype=item.dtype, device="cpu"))


def _positions(known: Knowledge, mask: Tensor) -> list[Tensor]:
    with no_modes():
        value = known.values.read(mask)
        columns = (value if value.dim() else value.reshape(1)).nonzero().unbind(1)
    return [known.lift(column.contiguous()) for column in columns]


def _rewrite(known: Knowledge, call: Invocation, func: Any, args: tuple[Any, ...]) -> Invocation:
    tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg]) if isinstance(item, Tensor)]
    known.ran = ((func, args, call.kwargs),)
    return call._replace(func=func, args=args, tensors=tensors)


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
    if target.type != "meta":
        return call.run()
    to_discrete = (dtype := call.kwargs.get("dtype")) is not None and not dtype.is_floating_point
    return known.replay(call) if source.is_meta or to_discrete or _brings_values(source) else call.run()


def _brings_values(source: Tensor) -> bool:
    """Whether a copy to meta keeps the value: not of weights, of sparse tensors (they have no storage) and of complex
    numbers, which no program was seen to ask for."""
    return bool(address(source)) and not (source.dtype.is_complex or is_weight(source))


def overwrite(known: Knowledge, call: Invocation) -> Any:
    """copy_, fill_, zero_: if a small tensor is overwritten completely, its value is known."""
    target, *sources = call.args[:2]
    sources = [source for source in sources if isinstance(source, Tensor)]
    if not target.is_meta:
        return ask_copy(known, call) if any(source.is_meta for source in sources) else call.run()
    if any(not source.is_meta and source.dim() and not _brings_values(source) for source in sources):
        return opaque(known, call)
    if not known.values.knows(target) and _can_become_known(known, target) and known.knows_all(sources):
        _start_blank(known, target)
    return known.replay(call)


def _can_become_known(known: Knowledge, target: Tensor) -> bool:
    return known.is_small(target) and spans_storage(target) and not is_weight(target)


def ask_copy(known: Knowledge, call: Invocation) -> Any:
    """copy_ from meta to a CPU tensor."""
    if known.knows_all(call.tensors):
        known.answer(call)
        return call.args[0]
    if known.assume.stands_in:
        return stand_ins.into_host(known, call)
    raise DataDependentError(str(call.func))


def blank(known: Knowledge, call: Invocation) -> Any:
    """torch.empty of integers: a correct program writes each element before it reads it, so any initial value is
    right."""
    result = call.run()
    if result.is_meta and is_discrete(result) and known.is_small(result):
        _start_blank(known, result)
        known.values.cells[address(result)].is_blank = True
    return result


def _start_blank(known: Knowledge, tensor: Tensor) -> None:
    with no_modes():
        known.set(tensor, torch.zeros_like(tensor, device="cpu"))


def filled(known: Knowledge, call: Invocation) -> Any:
    """zeros_like, new_full, ...: constants; of the tensor argument only the shape matters."""
    result = call.run()
    if result.is_meta and is_discrete(result) and known.is_small(result):
        _start_blank(known, result)
        name = call.func.overloadpacket.__name__
        fill = call.argument(2, "fill_value") if name == "new_full" else call.argument(1, "fill_value")
        known.values.read(result).fill_(_FILLS.get(name, fill))
    return result


def masked_fill(known: Knowledge, call: Invocation) -> Any:
    """A GPU accepts a 0-dim value on the CPU, the meta kernel refuses it: pass it as a number."""
    target, mask, value = call.args
    if target.is_meta and not value.is_meta:
        scalar = aten.masked_fill.Scalar if call.func is aten.masked_fill.Tensor else aten.masked_fill_.Scalar
        call = _rewrite(known, call, scalar, (target, mask, value.item()))
    return known.replay(call)


def histogram(known: Knowledge, call: Invocation) -> Any:
    """On a GPU the op takes integers; the CPU kernel takes floats only."""
    result = call.run()
    source = call.args[0]
    if known.values.knows(source) and known.is_small(source):
        with no_modes():
            counts = known.values.read(source).double().histc(*call.args[1:], **call.kwargs)
            known.set(result, counts.to(result.dtype))
    return result


def reshaped(known: Knowledge, call: Invocation) -> Any:
    """resize_ and set_ give a tensor other memory."""
    known.forget(call.tensors)
    return call.run()


# --- assumptions


def route(known: Knowledge, call: Invocation) -> Any:
    """Unknown scores pick experts by the law that the user stated."""
    scores, law = call.args[0], known.assume.routing
    assert law is not None
    if not scores.is_meta or not scores.is_floating_point() or known.values.knows(scores):
        return known.replay(call)
    result = call.run()
    chosen = result if isinstance(result, Tensor) else result[1]
    position = ROUTES[call.func]
    dim = -1 if position is None else call.argument(position, "dim", -1)
    if dim is None or not scores.dim() or not chosen.numel() or not known.is_small(chosen):
        return result
    with no_modes():
        kept = chosen.dim() == scores.dim()
        k = chosen.shape[dim] if kept else 1
        picks = law.picks(chosen.numel() // k, k, scores.shape[dim])
        shape = list(chosen.shape)
        if kept:
            del shape[dim]
        value = picks.view(*shape, k).movedim(-1, dim) if kept else picks.view(shape)
        known.set(chosen, value.to(chosen.dtype))
    # Count the assumption only when the choice is read: a softmax takes a maximum, too, but ignores its position.
    known.values.tell_of_read(chosen, known.assume.noter(law.text, call.func))
    return result


def is_finite(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": unknown values are neither NaN nor infinite.

    torch's isfinite(x) arrives as (x == x) * (x.abs() != inf). A comparison with -inf is not such a check, since masks
    contain -inf.
    """
    source, other = call.args[0], call.argument(1, "other")
    is_itself, is_infinity = other is source, isinstance(other, float) and other == torch.inf
    is_check = other is None or is_itself or is_infinity
    if not is_check or not source.is_meta or not source.is_floating_point() or known.values.knows(source):
        return known.replay(call)
    result = call.run()
    with no_modes():
        known.set_all(result, is_itself if call.func in _EQUALS else call.func in _DIFFERS and is_infinity)
    known.assume.note('checks="hold"', call.func)
    return result


def holds(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": all(), equal() and allclose() of unknown values are True."""
    if known.knows_all(call.tensors):
        return ask(known, call) if torch.Tag.data_dependent_output in call.func.tags else known.replay(call)
    known.assume.note('checks="hold"', call.func)
    if torch.Tag.data_dependent_output in call.func.tags:
        return True
    result = call.run()
    with no_modes():
        known.set(result, torch.ones_like(result, device="cpu"))
    return result


def gradients_finite(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": GradScaler finds no inf in the gradients, so its flag does not change."""
    known.assume.note('checks="hold"', call.func)
    return call.run()


def _assume_mask(known: Knowledge, call: Invocation, mask: Tensor) -> None:
    """mask_fraction: of an unknown mask, round(fraction * n) elements are true, evenly spread. Where the mask is a part
    of a larger one, all of that one is assumed so; not where the part skips elements, which may be the true ones."""
    fraction = known.assume.mask_fraction
    if fraction is None or mask.dtype is not torch.bool or known.values.knows(mask):
        return
    if not mask.is_contiguous():
        return
    if not spans_storage(mask):
        with no_modes():
            storage = mask.untyped_storage()
            whole = torch.empty(0, dtype=torch.bool, device="meta")
            mask = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    if not known.is_small(mask):
        return
    n = mask.numel()
    with no_modes():
        steps = torch.arange(n + 1, device="cpu") * round(fraction * n) // max(n, 1)
        known.set(mask, (steps[1:] > steps[:-1]).view(mask.shape))
    known.assume.note(f"mask_fraction={fraction:g}", call.func)


_GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")  # the last since torch 2.10
_GATHERS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_FILLS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}

SPECIAL: dict[OpOverload, Handler] = {
    aten.masked_select.default: masked_select,
    aten._ctc_loss_backward.default: shape,
    aten._ctc_loss_backward.Tensor: shape,
    aten.is_nonzero.default: ask,
    aten._to_copy.default: to_copy,
    aten.masked_fill.Tensor: masked_fill,
    aten.masked_fill_.Tensor: masked_fill,
    aten.histc.default: histogram,
    aten.resize_.default: reshaped,
    **{getattr(aten, name).default: grouped for name in _GROUPED if hasattr(aten, name)},
    **dict.fromkeys(_GATHERS, index),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default), index_put),
    **dict.fromkeys((aten.scatter.src, aten.scatter_.src, aten.index_copy.default, aten.index_copy_.default), scatter),
    **dict.fromkeys((aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default), overwrite),
    **dict.fromkeys(
        (
            aten.empty.memory_format,
            aten.empty_strided.default,
            aten.empty_permuted.default,
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ),
        blank,
    ),
    **dict.fromkeys(
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
        ),
        filled,
    ),
}

# The result of a matmul or a convolution is data, and it takes long to run on the CPU.
NEVER_REPLAYED = frozenset(
    (
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_mm.default,
    )
)

# Ops that pick an expert or a token, and the position of their argument dim (None: the last dimension).
ROUTES: dict[OpOverload, int | None] = {
    aten.topk.default: 2,
    aten.argmax.default: 1,
    aten.max.dim: 1,
    aten.multinomial.default: None,
}

_EQUALS = (aten.eq.Tensor, aten.eq.Scalar)
_DIFFERS = (aten.ne.Tensor, aten.ne.Scalar)
_FINITE = (aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default)
FINITE_CHECKS = (*_FINITE, *_EQUALS, *_DIFFERS)

CHECKS: dict[OpOverload, Handler] = {
    aten.all.default: holds,
    aten._is_all_true.default: holds,
    aten.equal.default: holds,
    aten.allclose.default: holds,
    aten._amp_foreach_non_finite_check_and_unscale_.default: gradients_finite,
}
