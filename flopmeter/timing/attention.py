"""Fused attention: its matmuls on the matrix units, and the work of the softmax on the vector units."""

from __future__ import annotations

from math import ceil

from flopmeter.device.hardware import Hardware
from flopmeter.records import AttentionBackend, Cost, Matmul
from flopmeter.timing import constants
from flopmeter.timing.matmul import Busy, overlap

_LEGACY_MMA_CAPABILITIES = (9, 10)  # majors whose full rate needs newer instructions than `mma`
_FORWARD_MATMULS = 2  # scores and values; backward has five


def attention(cost: Cost, hardware: Hardware, matmul_flop_per_s: float, vector_flop_per_s: float) -> Busy:
    """The matmuls, on whole blocks, plus the work of the softmax; both overlap with the memory traffic.

    The rates are sustained ones; the second is that of plain arithmetic. The first matmul of the cost computes the
    scores: queries x keys x head dimension.
    """
    scores = cost.matmuls[0]
    visible = 1 - cost.masked_flops / (2 * cost.macs) if cost.macs else 1.0
    rate = matmul_flop_per_s * backend_share(cost.attention, hardware) * block_share(scores, hardware)
    is_forward = len(cost.matmuls) == _FORWARD_MATMULS
    operations = constants.ATTENTION_FORWARD_OPERATIONS if is_forward else constants.ATTENTION_BACKWARD_OPERATIONS
    visible_scores = scores.batch * scores.m * scores.n * visible
    compute = 2 * cost.macs * visible / rate + visible_scores * operations / vector_flop_per_s
    memory = cost.bytes / hardware.sustained_bandwidth_bytes_per_s
    return Busy(compute, memory, overlap(compute, memory, constants.ATTENTION_OVERLAP))


def backend_share(backend: AttentionBackend | None, hardware: Hardware) -> float:
    """The share of the matrix rate that the backend's instructions reach on the device."""
    capability = hardware.compute_capability
    needs_newer = capability is not None and capability[0] in _LEGACY_MMA_CAPABILITIES and backend != "cudnn"
    share = constants.LEGACY_MMA_SHARE if needs_newer else 1.0
    return share * constants.EFFICIENT_ATTENTION_SHARE if backend == "efficient" else share


def block_share(scores: Matmul, hardware: Hardware) -> float:
    """The useful share of the blocks that are computed, and of the SMs that get one."""
    queries, keys, head = scores.m, scores.n, scores.k
    useful = _filled(queries, constants.ATTENTION_BLOCK) * _filled(keys, constants.ATTENTION_BLOCK)
    blocks = scores.batch * ceil(queries / constants.ATTENTION_BLOCK)
    return useful * _filled(head, constants.HEAD_DIMENSION_MULTIPLE) * min(1.0, blocks / hardware.sm_count)


def _filled(size: int, multiple: int) -> float:
    return size / (ceil(size / multiple) * multiple) if size else 1.0
