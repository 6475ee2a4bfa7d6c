"""From a kernel back to the ops of the program: FLOPs, class, module and source line of each node of its FX graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload

from flopmeter.compiler import flex
from flopmeter.compiler.known import before
from flopmeter.compiler.regions import Sizes, looks_up
from flopmeter.costs import RULES, costs_of
from flopmeter.costs.arithmetic import normalization, softmax
from flopmeter.costs.contractions import matmul
from flopmeter.costs.traffic import is_view
from flopmeter.known_values import DataDependentError
from flopmeter.records import (
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    UNCOUNTED,
    Call,
    Origin,
)
from flopmeter.records.collectives import WAIT_OPS
from flopmeter.torch_names.compiler import MEMORY_DEP
from flopmeter.torch_names.operators import aten, of_tensors, traced_size
from flopmeter.trace.process_groups import with_groups
from flopmeter.trace.tensor_specs import build_call

_ROOT = re.compile(r"^L\['\w+'\]\.?|^G\['[^']+'\]\.?")
_NAME = re.compile(r"\w+")
_FUNCTION_PARTS = ("__self__", "__func__", "__closure__", "cell_contents")  # through which a function holds a module
_WRAPPERS = ("_modules", "__dict__", "_orig_mod", "_checkpoint_wrapped_module")  # between a module and those in it
_FUNCTIONS = f"torch{os.sep}nn{os.sep}"
_SHIMS = os.path.join("flopmeter", "run", "shims", "")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SCATTERS = aten.present(
    "index_put", "index_put_", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add",
    "scatter", "scatter_add", "scatter_reduce",
)  # fmt: skip
ASSOCIATIVE_SCAN = "associative_scan"  # of the operators that take functions, the one that inductor writes kernels of


def own_node(operation: Any) -> Any:
    """The FX node that a library call is of; None where inductor made it up. Inductor notes the last node that has the
    buffer for its result, which may be a view that changes nothing (`expand`, between two batched matmuls), or, after
    a collective on a product's result, that collective or the wait for it."""
    own, overload = operation.get_origin_node(), getattr(operation, "op_overload", None)
    while own is not None and not _runs_as(own.target, overload) and _passes_on(own.target):
        own = own.args[0]
    if own is None or not _runs_as(own.target, overload):
        # The last one, since it also notes the ops whose results it has to have for the call.
        own = max((node for node in operation.origins if _runs_as(node.target, overload)), default=own)
    return own if own is not None and isinstance(own.target, OpOverload) else None


def _runs_as(target: Any, overload: Any) -> bool:
    """Whether inductor calls the op by that overload: of the same op (`mm.out`), or of its form that works in place,
    after a copy."""
    if not isinstance(target, OpOverload) or not isinstance(overload, OpOverload):
        return False
    name: str = target._schema.name
    return overload._schema.name in (name, name + "_")


def _passes_on(target: Any) -> bool:
    """Whether the op returns the memory that it is given."""
    return isinstance(target, OpOverload) and (is_view(target) or target._schema.name in WAIT_OPS)


def op_without_node(operation: Any) -> OpOverload | None:
    """The op of a library call that one of inductor's patterns put in place of the program's ops, such as the matmul
    with int8 weights. None if aten has no such op, if it takes lists of tensors, or if it writes into one that it does
    not return."""
    found = getattr(operation, "op_overload", None)
    if found is None:
        name = (getattr(operation, "python_kernel_name", None) or "").rpartition(".")[2]
        found = getattr(getattr(torch.ops.aten, name, None), "default", None) if name else None
    if not isinstance(found, OpOverload) or (found._schema.is_mutable and not returned_arguments(found)):
        return None
    tensors = [argument.type for argument in of_tensors(found._schema.arguments)]
    return found if all(isinstance(kind, torch.TensorType) for kind in tensors) else None


def returned_arguments(op: OpOverload) -> set[str]:
    """The names of the arguments that an op writes into and returns, as `copy_` does."""
    returned = [each.alias_info.before_set for each in op._schema.returns if each.alias_info is not None]
    return {
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        if any(argument.alias_info.before_set & each for each in returned)
    }


def is_work(node: Any) -> bool:
    """Whether the node is an op other than a view, or a scan."""
    if isinstance(node.target, HigherOrderOperator):
        return bool(node.target.name() == ASSOCIATIVE_SCAN)
    return isinstance(node.target, OpOverload) and not is_view(node.target)


def reads_nothing(node: Any) -> bool:
    return not any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)


def least_steps(node: Any, origin: Origin, sizes: Callable[[Any], int]) -> int:
    """How many steps loops need for all of the op's work: one for each element of its result or, unless it picks some
    elements, of its largest tensor."""
    picks = origin.op_class in (INDEXING, MOVEMENT)
    held = [node.meta.get("val"), *(() if picks else (each.meta.get("val") for each in node.all_input_nodes))]
    return max((prod(map(sizes, value.shape)) for value in held if isinstance(value, torch.Tensor)), default=0)


def origin_without_node(call: Call) -> Origin:
    """The origin of a library call that no node of the graph stands for: its module and source line are not known."""
    nbytes = sum(spec.nbytes for spec in call.outputs)
    return Origin(call.name, *_by_rule(call), "", None, nbytes, is_recomputed=False)


def uncounted_origin(operation: Any) -> Origin:
    """The origin of a library call without an op. The report lists it, since its FLOPs are not known."""
    name = getattr(operation, "python_kernel_name", None) or type(operation).__name__
    return Origin(name, UNCOUNTED, (), 0, "", None, 0, is_recomputed=False)


def origin_of(node: Any, call: Call | None, *, is_backward: bool) -> Origin:
    """The origin of a node's work. `call` is the node's call, if the caller has it."""
    work = _work(node, call)
    if work.op_class not in (CONTRACTION, UNCOUNTED):
        work = _work_of_original(node, work)
    return _origin_with(node, work, is_backward=is_backward)


class _NodeWork(NamedTuple):
    """The work of a node: its class, and FLOPs by class."""

    op_class: str
    flops: tuple[tuple[str, int], ...] = ()
    transcendentals: int = 0


def _origin_with(node: Any, work: _NodeWork, *, is_backward: bool) -> Origin:
    """An origin at the node's place in the program, with this work."""
    is_recomputed = is_backward and node.meta.get("partitioner_tag") == "is_forward"
    return Origin(
        op_name(node),
        *work,
        _module(node),
        _source(node),
        _result_bytes(node),
        is_recomputed,
        _drawn(node),
        _path(node),
    )


def _drawn(node: Any) -> int:
    """How many random numbers the node draws."""
    draws = isinstance(node.target, OpOverload) and node.target._schema.name in _RANDOM_OPS
    return traced_size(node.meta["val"].numel()) if draws else 0


# By which inductor replaces all ops that draw random numbers in its kernels (_inductor/fx_passes/replace_random.py).
_RANDOM_OPS = {"prims::inductor_random", "prims::inductor_randint"}

# FLOPs and transcendentals for each element of the largest input, and class, of the ops that inductor adds
# (torch/_inductor/inductor_prims.py). Random bits and maxima are no FLOPs; an online softmax subtracts, exponentiates
# and adds up.
_INDUCTORS_OWN = {
    "inductor_seed": (RANDOM, 0, 0),
    "inductor_seeds": (RANDOM, 0, 0),
    "inductor_lookup_seed": (RANDOM, 0, 0),
    "inductor_random": (RANDOM, 0, 0),
    "inductor_randint": (RANDOM, 0, 0),
    "prepare_softmax_online": (NORMALIZATION, 3, 1),
    "_low_memory_max_pool_with_offsets": (REDUCTION, 0, 0),
    "_low_memory_max_pool_offsets_to_indices": (INDEXING, 0, 0),
}


def _own_work(node: Any) -> _NodeWork | None:
    known = _INDUCTORS_OWN.get(node.target.overloadpacket.__name__) if node.target.namespace == "prims" else None
    if known is None:
        return None
    op_class, flops, functions = known
    inputs = [each.meta.get("val") for each in node.all_input_nodes]
    most = max((traced_size(value.numel()) for value in inputs if isinstance(value, torch.Tensor)), default=0)
    return _NodeWork(op_class, ((op_class, flops * most),), functions * most)


def _work(node: Any, call: Call | None) -> _NodeWork:
    """The work of a node by the rules of `costs`. Views are element-wise and free."""
    if call is None and isinstance(node.target, HigherOrderOperator):
        return _scanned(node)
    own = _own_work(node)
    if own is not None:
        return own
    try:
        return _by_rule(call or _call(node))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, DataDependentError):
        if reads_nothing(node):
            return _NodeWork(MOVEMENT)
        return _NodeWork(UNCOUNTED)  # an op of the compiler, in a form that no rule knows


def _scanned(node: Any) -> _NodeWork:
    """The work of a scan, which combines each element once with what came before it, as a cumulative sum adds."""
    combine = getattr(node.graph.owning_module, node.args[0].target)
    work = [_work(each, None) for each in combine.graph.nodes if is_work(each)]
    if any(each.op_class == UNCOUNTED for each in work):
        return _NodeWork(UNCOUNTED)
    (combined, *_), (slice_of_it, *_) = node.meta["val"], combine.graph.output_node().args[0]
    length = traced_size(combined.numel()) // max(1, traced_size(slice_of_it.meta["val"].numel()))
    flops = sum(count for each in work for _, count in each.flops)
    return _NodeWork(REDUCTION, ((REDUCTION, length * flops),), length * sum(each.transcendentals for each in work))


def _by_rule(call: Call) -> _NodeWork:
    costs = costs_of(call)
    if not costs:
        return _NodeWork(ELEMENTWISE)
    main = max(costs, key=lambda cost: cost.flops)
    counted: dict[str, int] = {}
    for cost in costs:
        for name, flops in cost.flops_by_class:
            counted[name] = counted.get(name, 0) + flops
    return _NodeWork(main.op_class, tuple(counted.items()), sum(cost.transcendentals for cost in costs))


def _call(node: Any) -> Call:
    """The node's call, by the fake values that it was traced with."""
    numbers: dict[int, int] = {}

    def held(value: Any) -> Any:
        return value.meta["val"] if isinstance(value, torch.fx.Node) else value

    args, kwargs = torch.fx.node.map_aggregate(node.args, held), torch.fx.node.map_aggregate(node.kwargs, held)
    return build_call(
        node.target,
        with_groups(node.target, args),
        kwargs,
        node.meta.get("val"),  # an op that returns nothing may have none
        lambda tensor: numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers)),
    )


def _result_bytes(node: Any) -> int:
    value = node.meta.get("val")
    held = value if isinstance(value, (list, tuple)) else (value,)
    return sum(traced_size(each.numel()) * each.dtype.itemsize for each in held if isinstance(each, torch.Tensor))


def _work_of_original(node: Any, work: _NodeWork) -> _NodeWork:
    """The parts of a decomposed op keep its class: a layer norm's mean is normalization. Inductor writes a contraction
    of one row (with coordinate descent tuning), of vectors, or over one element, as a product and its sum: the product
    has the multiply-adds of both."""
    original = node.meta.get("original_aten")
    found = RULES.get(original) or RULES.get(original.overloadpacket) if isinstance(original, OpOverload) else None
    if found is None:
        return work
    if found.__module__ in (normalization.__name__, softmax.__name__):
        return work._replace(op_class=NORMALIZATION, flops=tuple((NORMALIZATION, count) for _, count in work.flops))
    if found.__module__ != matmul.__name__ or node.meta["val"].is_complex():
        return work
    if node.target.overloadpacket is aten.sum:
        return _NodeWork(CONTRACTION)
    if node.target.overloadpacket is aten.mul and all(isinstance(each, torch.fx.Node) for each in node.args):
        return _NodeWork(CONTRACTION, ((CONTRACTION, 2 * traced_size(node.meta["val"].numel())),))
    return work


def op_name(node: Any) -> str:
    """The name of the program's op, before it was decomposed."""
    original = node.meta.get("original_aten")
    op = original if isinstance(original, OpOverload) else node.target
    if isinstance(op, HigherOrderOperator):
        return str(op.name())
    name: str = op.overloadpacket.__name__
    return name if op.namespace in ("aten", "prims") else f"{op.namespace}::{name}"


def _module(node: Any) -> str:
    """The path of the node's module below the one that was compiled."""
    stack = _stack(node)
    if not stack:
        return ""
    path, _ = stack[-1]
    return _joined(_names(_ROOT.sub("", path)))


def _path(node: Any) -> str:
    """The path of the node's module from the outermost one that the compiled function called, by its class."""
    stack = _stack(node)
    if not stack:
        return ""
    (outermost, kind), (path, _) = stack[0], stack[-1]
    return _joined([getattr(kind, "__name__", str(kind)), *_names(path.removeprefix(outermost))])


def _stack(node: Any) -> list[tuple[str, Any]]:
    """The modules that led to the node, each with how it is reached and its class, from the outermost one on."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values()) if stack else []


def _names(path: str) -> list[str]:
    """The attributes on the way, from the function on that holds a module, if one does."""
    names = _NAME.findall(path)
    below = max((place + 1 for place, name in enumerate(names) if name in _FUNCTION_PARTS), default=0)
    return names[below:]


def _joined(names: list[str]) -> str:
    return ".".join(name for name in names if name not in _WRAPPERS)


def _source(node: Any) -> str | None:
    """The innermost line of the program that led to the node; torch's functions for models, and stand-ins for packages
    of kernels, are no lines of it."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    of_program = [frame for frame in frames if _FUNCTIONS not in frame[0] and _SHIMS not in frame[0]] or frames
    return ":".join(of_program[-1]) if frames else None


def origins_of(
    parts: Iterable[Any], sizes: Sizes, is_backward: bool, elsewhere: Set[Any] = frozenset()
) -> tuple[Origin, ...]:
    """The ops of the graph that these parts of a kernel compute, in the graph's order; without views. A library
    computes those `elsewhere`: a kernel that changes the layout of a convolution's image, or adds its bias, stems from
    the convolution too.

    Inductor names an op at every loop that stems from it: also at the second stage of its split reduction, and where
    its result is set to zero first, or is a copy of what it adds to.
    """
    found: dict[Any, Origin] = {}
    for part in parts:
        if part.node is None:
            continue
        loops = getattr(part, "group", None)  # a library call has none
        steps = prod(sizes(size) for group in loops[1] for size in _as_tuple(group)) if loops else 0
        masked = flex.flex_node(part.node) if part.is_reduction() else None
        if masked is not None and masked not in elsewhere:
            found[masked] = _row_sums(masked, steps, is_backward)
            elsewhere = elsewhere | before(flex.mask_reads([masked]))  # named with all that the template reads
        for fx in part.node.origins:
            if fx not in found and fx not in elsewhere and is_work(fx):
                origin = origin_of(fx, None, is_backward=is_backward)
                if _works_on(fx, part, steps, least_steps(fx, origin, sizes)):
                    found[fx] = origin
    return tuple(found[fx] for fx in sorted(found))


def _works_on(fx: Any, part: Any, steps: int, least: int) -> bool:
    """Whether the part's loops do the op's work, rather than prepare it or end it. They are long enough, unless the op
    scatters: its result may be of any size, but its loops look up where they write."""
    if reads_nothing(fx):
        return True
    if getattr(fx.target, "overloadpacket", None) in _SCATTERS:
        places = [dep for dep in part.read_writes.writes if isinstance(dep, MEMORY_DEP.value)]
        return not places or any(map(looks_up, places))  # a library's kernel tells none
    return (bool(part.read_writes.reads) or _follows_from_nothing(fx)) and steps >= least


def _follows_from_nothing(fx: Any) -> bool:
    """Whether none of what it is computed from comes from outside of the graph, as an angle's sine by a place."""
    return all(each.op == "call_function" for each in before([fx]))


def _row_sums(fx: Any, steps: int, is_backward: bool) -> Origin:
    """The part of flex_attention that its template leaves to other kernels: the sum of the rows of out * grad_out, or
    the combination of the parts of the keys. Both multiply and add."""
    origin = _origin_with(fx, _NodeWork(REDUCTION, ((REDUCTION, 2 * steps),)), is_backward=is_backward)
    return origin._replace(op=f"{fx.target.name()}: row sums")


def _as_tuple(group: Any) -> tuple[Any, ...]:
    return tuple(group) if isinstance(group, (list, tuple)) else (group,)


def names_of(node: Any) -> list[str]:
    """The names of the ops behind a kernel without work of its own, such as the second stage of a reduction."""
    nodes = {fx: None for part in node.get_nodes() if part.node is not None for fx in part.node.origins}
    return [op_name(fx) for fx in sorted(nodes) if is_work(fx)]
