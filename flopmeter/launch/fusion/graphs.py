"""Which kernels torch.compile would put into one graph: nothing fuses or moves across its bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable

import torch

from flopmeter.records import UNCOUNTED, Call, Kernel, Op, Phase
from flopmeter.torch_names.operators import aten

CompiledRegion = Callable[[Op], Hashable | None]
"""Names the compiled region that an op belongs to; None for what runs eagerly."""

_GRAPH_BREAKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_RECURRENT = (aten._cudnn_rnn, aten._cudnn_rnn_backward)
_MASKS = (torch.bool, torch.uint8)


def whole_program(op: Op) -> Hashable | None:
    """Everything but the optimizer is compiled, if the program marks no region; and but copies of batches to the
    device, which the loop around the model makes."""
    given, made = ({spec.device for spec in specs} for specs in (op.call.inputs, op.call.outputs))
    takes_batch = not op.module and given == {"cpu"} and bool(made - given)
    return None if op.phase == "optimizer" or takes_batch else "program"


def graphs_of(
    kernels: list[Kernel], region: CompiledRegion = whole_program, *, is_traced: bool = True
) -> list[int | None]:
    """The number of each kernel's graph, counted in order; None for a kernel that runs eagerly.

    A graph ends where the region ends, where forward turns into backward (or back) or into the optimizer, and at a
    graph break: an op whose result decides what runs next (`item`, `nonzero`) or that no rule covers, and where Dynamo
    traces (not where a CUDA graph is captured) an RNN, LSTM or GRU, which it leaves to run eagerly unless
    torch._dynamo.config.allow_rnn is set. A checkpoint's recomputation is part of the backward graph.
    Fusing changes neither the number of graphs nor their order.
    """
    breaks = functools.cache(_breaks_graph)  # calls are compared by identity
    return numbered(
        None if breaks(kernel.op.call) or (is_traced and kernel.op.packet in _RECURRENT) else _place(kernel, region)
        for kernel in kernels
    )


def numbered(places: Iterable[Hashable | None]) -> list[int | None]:
    """The number of each run of equal places, counted in order; None where there is none."""
    numbers: list[int | None] = []
    number, previous = -1, None
    for place in places:
        number += place is not None and place != previous
        numbers.append(None if place is None else number)
        previous = place
    return numbers


def pass_of(op: Op) -> Phase:
    """The pass whose graph holds the op: what a checkpoint computes again belongs to the backward graph."""
    return "backward" if op.phase == "recompute" else op.phase


def tensors_of(kernels: list[Kernel], graphs: list[int | None]) -> dict[int, int]:
    """How many tensors each graph takes and returns. A tensor that only its own kernels touch stays inside."""
    users: dict[int, set[int | None]] = {}
    taken: dict[int, set[int]] = {}
    made: dict[int, set[int]] = {}
    for kernel, graph in zip(kernels, graphs, strict=True):
        for op in kernel.ops:
            for storage in op.storages:
                users.setdefault(storage, set()).add(graph)
            if graph is not None:
                own = made.setdefault(graph, set())
                taken.setdefault(graph, set()).update(op.reads - own)
                own.update(op.makes - op.reads)
    return {
        graph: len(read) + sum(len(users[storage]) > 1 for storage in made[graph] - read)
        for graph, read in taken.items()
    }


def _place(kernel: Kernel, region: CompiledRegion) -> Hashable | None:
    name = None if kernel.cost.op_class == UNCOUNTED else region(kernel.op)
    return None if name is None else (name, pass_of(kernel.op))


def _breaks_graph(call: Call) -> bool:
    """Whether the values decide what runs next. torch's tags do not tell an index by a mask from others, whose result
    has its shape from the indices, nor a repeat_interleave whose caller gives its length."""
    if call.func.overloadpacket is aten.index:
        return any(spec.dtype in _MASKS for spec in call.inputs[1:])
    if call.func.overloadpacket is aten.repeat_interleave and call.argument("output_size") is not None:
        return False
    return any(tag in call.func.tags for tag in _GRAPH_BREAKS)
