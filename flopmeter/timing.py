"""Time of each kernel on a device, and when it starts: the launch timeline.

The device runs a kernel in the larger of its compute time and its memory time, at the fractions of the
datasheet's peaks that the profile documents, plus the profile's kernel floor. The host enqueues kernels
one after another; the device runs them in order, each no earlier than it was enqueued.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopmeter.hardware import Hardware
from flopmeter.records import Cost, Kernel, Switches, Timing

# Vendors count a fused multiply-add as two operations. An addition, a multiply or an exp alone does one
# in the same slot, so it can reach half the peak: 9.75 of an A100's 19.5 TFLOP/s (Horace He, 'Making
# Deep Learning Go Brrrr From First Principles', 2022).
PLAIN_ARITHMETIC_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an eager program costs the CPU that runs it, in seconds.

    The defaults reproduce two measured overhead-bound programs within 7 % (Llama-2-7B decoding, 25.8 ms a
    token, and ResNet-50 at batch 1, 6.5 ms, both Hugging Face eager on an A100's host) and come out 30 %
    low on a third (ConvNeXt-L, 10.4 ms). Hosts differ by a factor of two.
    """

    launch_seconds: float = 8e-6  # an op that launches a kernel, with the Python around it
    view_seconds: float = 3e-6  # an op that launches none
    module_call_seconds: float = 16e-6  # nn.Module.__call__ and the forward around its ops


def time_kernels(
    kernels: list[Kernel], hardware: Hardware, switches: Switches, host: Host | None = None
) -> list[Timing]:
    """The timing of each kernel in order. Raises HardwareError where the device lacks a kernel's dtype."""
    host = host or Host()
    busy: dict[Cost, tuple[float, float]] = {}
    timings: list[Timing] = []
    floor = hardware.kernel_floor_seconds
    enqueued = free = 0.0  # when the host has sent the kernel; when the device has finished the last one
    for _, cost, views, module_calls in kernels:
        if cost not in busy:
            busy[cost] = (compute_seconds(cost, hardware, switches), memory_seconds(cost, hardware))
        compute, memory = busy[cost]
        enqueued += host.launch_seconds + views * host.view_seconds + module_calls * host.module_call_seconds
        start = max(enqueued, free)
        timing = Timing(compute, memory, floor, start - free, start)
        timings.append(timing)
        free = start + timing.seconds
    return timings


def host_seconds(kernels: list[Kernel], host: Host | None = None) -> float:
    """How long the host takes to enqueue all kernels."""
    host = host or Host()
    views = sum(kernel.views for kernel in kernels)
    module_calls = sum(kernel.module_calls for kernel in kernels)
    return len(kernels) * host.launch_seconds + views * host.view_seconds + module_calls * host.module_call_seconds


def compute_seconds(cost: Cost, hardware: Hardware, switches: Switches) -> float:
    """Products at the sustained rate of their unit, other work at that of the vector units."""
    product_flops = 2 * cost.macs
    other_flops = cost.flops - product_flops
    seconds = 0.0
    if product_flops:
        peak = hardware.contraction_peak(switches.product_dtype(cost), fp16_accumulate=switches.fp16_accumulate)
        seconds += (product_flops - cost.masked_flops) / peak.sustained_flop_per_s
    if other_flops:
        share = 1.0 if cost.fused_multiply_add else PLAIN_ARITHMETIC_SHARE
        seconds += other_flops / (hardware.vector_peak(cost.dtype).sustained_flop_per_s * share)
    return seconds


def memory_seconds(cost: Cost, hardware: Hardware) -> float:
    """Bytes at the bandwidth that a streaming kernel reaches."""
    return cost.bytes / hardware.sustained_bandwidth_bytes_per_s
