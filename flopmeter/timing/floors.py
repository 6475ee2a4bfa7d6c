"""The least time that a kernel's work can take, by the datasheet."""

from __future__ import annotations

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import Cost, Switches
from flopmeter.timing.constants import DEFAULT_LINK_BYTES_PER_S


def least_seconds(cost: Cost, device: Hardware, switches: Switches) -> float:
    """Matrix units, vector units and memory work side by side, so it is the longest of their times.

    Bytes that cross the link to the host are bound by it: it is slower than either memory."""
    parts = [cost.bytes / device.bandwidth_bytes_per_s]
    if cost.link_bytes:
        parts = [cost.link_bytes / (device.host_link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S)]
    if cost.macs:
        parts.append(cost.product_flops / _best_rate(peak_of(cost, device, switches)))
    if cost.other_flops > 0:
        parts.append(cost.other_flops / _best_rate(device.vector_peak(cost.dtype)))
    return max(parts)


def peak_of(cost: Cost, device: Hardware, switches: Switches) -> Peak:
    """The peak of the unit that runs its products."""
    return device.contraction_peak(switches.matmul_dtype(cost), fp16_accumulate=switches.fp16_accumulate)


def _best_rate(peak: Peak) -> float:
    """The datasheet's, or more for a part whose real clock is above that of its datasheet."""
    return max(peak.flop_per_s, peak.sustained_flop_per_s)
