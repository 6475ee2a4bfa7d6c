"""Memory that ops ask torch's allocator for in addition to the tensors that they return. It belongs to no tensor of the
program, but torch.cuda.max_memory_allocated() counts it.

Two of these are large and follow from torch's source: the workspace of cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp;
which torch keeps it was read from the CUDA builds of 2.11, 2.12, 2.14 and 2.15) and the sums of FlashAttention-2's
backward pass (mha_bwd in flash_attn/flash_api.cpp). What cuDNN asks for is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from flopmeter.device.hardware import Hardware
from flopmeter.records import BEFORE, DEFAULT_STREAM, Call, Trace
from flopmeter.torch_names.dispatcher import running_version

# CUBLAS_WORKSPACE_CONFIG as torch chooses it: 8 buffers of 4096 KiB on these majors, else 2 of them and 8 of 16 KiB.
_WIDE_MAJORS, _WIDE_WORKSPACE_BYTES, _WORKSPACE_BYTES = (9, 10, 12), 2**25, 2**23 + 2**17
_OF_CUBLAS = frozenset((
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_int_mm",
    "_scaled_mm",
))  # fmt: skip
# Since then each call asks for a workspace and gives it back; before, each thread keeps one for each stream.
_FRESH_SINCE = (2, 15)
_FLASH_BACKWARD = frozenset(("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"))
_ROUNDED_QUERIES, _ROUNDED_HEAD, _SUM_BYTES = 128, 32, 4


class Scratch(NamedTuple):
    """Memory of an op's own, from op `born` until before op `died`; BEFORE and None: from the start, to the end."""

    nbytes: int
    born: int
    died: int | None
    stream: int


def scratch_of(trace: Trace, steps: int, device: Hardware, *, repeats: bool = False) -> Iterator[Scratch]:
    """Scratch memory of the first `steps` ops. `repeats`: the program ran before; what a thread keeps is there."""
    workspace = workspace_bytes(device)
    if not workspace:
        return
    keeps, kept = running_version() < _FRESH_SINCE, set[tuple[bool, int]]()
    for place, op in enumerate(trace.ops[:steps]):
        name, stream = op.call.name, trace.stream_use.streams.get(place, DEFAULT_STREAM)
        if name in _FLASH_BACKWARD:
            yield Scratch(_flash_backward_bytes(op.call), place, place + 1, stream)
        if name not in _OF_CUBLAS:
            continue
        holder = op.phase in ("backward", "recompute"), stream  # autograd runs backward passes in a thread of its own
        if not keeps:
            yield Scratch(workspace, place, place + 1, stream)
        elif holder not in kept:
            kept.add(holder)
            yield Scratch(workspace, BEFORE if repeats else place, None, stream)


def workspace_bytes(device: Hardware) -> int:
    """Bytes of cuBLAS's workspace for a thread and stream; 0 for other vendors' libraries, which differ."""
    if device.compute_capability is None:
        return 0
    return _WIDE_WORKSPACE_BYTES if device.compute_capability[0] in _WIDE_MAJORS else _WORKSPACE_BYTES


def kept_bytes(trace: Trace, device: Hardware) -> int:
    """Bytes that the ops so far asked for and keep."""
    return sum(block.nbytes for block in scratch_of(trace, len(trace.ops), device) if block.died is None)


def _flash_backward_bytes(call: Call) -> int:
    """Bytes of the gradient of q and of a number a row in fp32, with rows and heads rounded up; where heads share keys,
    also of the gradients of k and v for each head of queries."""
    q, k = call.argument("query"), call.argument("key")
    head_dim = ceil(q.shape[-1] / _ROUNDED_HEAD) * _ROUNDED_HEAD
    if len(q.shape) == 3:  # packed
        rows, heads = q.shape[0] + _ROUNDED_QUERIES * (call.argument("cum_seq_q").numel - 1), q.shape[1]
        key_heads = k.shape[1]
    else:
        heads_at = 1 if call.name.startswith("_scaled") else 2
        heads, key_heads, queries = q.shape[heads_at], k.shape[heads_at], q.shape[3 - heads_at]
        rows = q.shape[0] * ceil(queries / _ROUNDED_QUERIES) * _ROUNDED_QUERIES
    expanded = 2 * k.numel // max(key_heads, 1) * heads * k.dtype.itemsize if key_heads != heads else 0
    return int(_SUM_BYTES * rows * heads * (head_dim + 1) + expanded)
