"""One kernel on a CPU. Its libraries (MKL, oneDNN, ATen's own loops) differ from a GPU's kernels in three ways.

There are no tiles to fill, so a small matmul runs at the rate of a large one once its operands are packed; only the
time to dispatch it weighs more. The last-level cache is large enough to hold what the previous op wrote. And there is
no unit for exp and similar functions.
"""

from __future__ import annotations

from flopmeter.device.hardware import Hardware
from flopmeter.records import ConvolutionWork, Cost, Switches
from flopmeter.timing import constants
from flopmeter.timing.kernels import Price
from flopmeter.timing.matmul import Busy, overlap
from flopmeter.timing.vector_work import vector_seconds

# Vector operations of one exp, log, tanh or erf: range reduction, a polynomial of degree 5 to 7, scaling, and the
# special cases, counted in SLEEF's single-precision functions (github.com/shibatch/sleef, src/libm/sleefsimdsp.c).
TRANSCENDENTAL_OPERATIONS = 20

# Exponent p of (compute^p + memory^p)^(1/p) for matmuls: 1, no overlap. A library first copies panels of the operands
# into a layout of its own, and a core that copies does not compute (Goto and van de Geijn, 'Anatomy of
# High-Performance Matrix Multiplication', ACM TOMS 2008).
PACKING_OVERLAP = 1.0

# How often a convolution in NCHW moves its tensors. oneDNN computes in a blocked layout: each tensor is read and
# written once to reorder it, and read or written again by the convolution (oneDNN, "Memory Format Propagation").
REORDERED_PASSES = 3


def price(cost: Cost, hardware: Hardware, switches: Switches) -> Price:
    """The price of a kernel. Raises HardwareError if the device lacks its dtype."""
    others = cost.other_flops + (TRANSCENDENTAL_OPERATIONS - 1) * cost.transcendentals
    compute = 0.0
    if cost.macs:
        compute += cost.product_flops / hardware.contraction_peak(switches.matmul_dtype(cost)).sustained_flop_per_s
    compute += vector_seconds(others, cost, hardware)
    memory = memory_seconds(cost, hardware)
    exponent = PACKING_OVERLAP if cost.macs else constants.VECTOR_OVERLAP
    return Price(Busy(compute, memory, overlap(compute, memory, exponent)), f"{cost.op_class}, CPU")


def memory_seconds(cost: Cost, hardware: Hardware) -> float:
    """Weights come from memory: between two uses of one weight, all other weights pass through the cache. Activations
    that fit are still in the cache, since the previous op wrote them."""
    moved = cost.bytes
    if isinstance(cost.work, ConvolutionWork) and not cost.work.shape.channels_last:
        moved *= REORDERED_PASSES
    cache, bandwidth = hardware.l2_cache_bytes, hardware.l2_bandwidth_bytes_per_s
    if cache and bandwidth and not cost.macs and moved <= cache:
        return moved / bandwidth
    return moved / hardware.sustained_bandwidth_bytes_per_s
