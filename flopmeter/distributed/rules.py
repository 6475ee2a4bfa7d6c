"""The ops of FSDP2: copies into and out of the buffers of its collectives."""

from __future__ import annotations

import torch.distributed.fsdp  # noqa: F401  (it defines the ops)

from flopmeter.costs.rules import FREE, make_cost, rule
from flopmeter.records import MOVEMENT, Call, Cost, Region
from flopmeter.torch_names.operators import Packets

fsdp = Packets("fsdp")


@rule(fsdp.all_gather_copy_in)
def all_gather_copy_in(call: Call) -> Cost:
    """Copies the shards into this rank's part of the buffer; the op's result is two views."""
    shards = call.argument("all_gather_inputs")
    part = Region(call.argument("all_gather_output"), sum(shard.nbytes for shard in shards))
    return make_cost(call, MOVEMENT, read=shards, written=(part,))


@rule(fsdp.split_with_sizes_copy)
def split_with_sizes_copy(call: Call) -> Cost:
    """Copies the gathered buffer out, parameter by parameter."""
    return make_cost(call, MOVEMENT, read=(call.argument("all_gather_output"),), written=call.argument("out"))


@rule(fsdp.chunk_cat)
def chunk_cat(call: Call) -> Cost:
    """Copies gradients into the buffer of a reduce-scatter, with a cast if the dtypes differ."""
    return make_cost(call, MOVEMENT, read=call.argument("tensors"), written=(call.argument("out"),))


@rule(fsdp.chunk_cat_mixed_dtype)
def chunk_cat_mixed_dtype(call: Call) -> tuple[Cost, ...]:
    """The same, one kernel for each type of gradient; the padding is written by the first."""
    tensors, out = call.argument("tensors"), call.argument("out")
    kinds = [[spec for spec in tensors if spec.dtype == dtype] for dtype in dict.fromkeys(s.dtype for s in tensors)]
    written = [sum(spec.numel for spec in kind) * out.dtype.itemsize for kind in kinds]
    written[0] += out.nbytes - sum(written)
    return tuple(
        make_cost(call, MOVEMENT, read=read, written=(Region(out, part),))
        for read, part in zip(kinds, written, strict=True)
    )


@rule(fsdp.record_grad_output_stream)
def record_grad_output_stream(call: Call) -> tuple[Cost, ...]:
    """Does nothing on CUDA. It is for backends that give memory back to the device."""
    return FREE


@rule(fsdp.copy_)
def copy(call: Call) -> Cost:
    """Overwrites a tensor."""
    return make_cost(call, MOVEMENT, read=(call.argument("data"),), written=(call.argument("tensor"),))
