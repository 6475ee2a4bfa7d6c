"""Families of GEMM kernels: what holds for one way of writing them, on any device that runs them.

A kernel has three parts. Its first loads and last stores wait for memory, while nothing else is busy (`latency`). Its
main loop multiplies tile by tile, wave after wave. Its epilogue writes a tile; the next tile of the SM waits for that,
or not. The rates of a device, its clock and its memory stand in its profile.

Set on [aiconfigurator]: 12 thousand bf16 GEMMs from 2 µs to 10 ms on A100, H100, H200 and L40S
(github.com/ai-dynamo/aiconfigurator@095f58a), on half of the shapes; the error on the other half is the same, and a GPU
that is left out changes its own error by less than a quarter. Those of vector units are set on [NeuSight].
"""

from __future__ import annotations

from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak


class GemmKernels(NamedTuple):
    """One family. Cycles are those of the boost clock, which a kernel keeps while it waits."""

    tiles: tuple[tuple[int, int], ...]  # rows x columns of the output that one thread block computes
    tile_exponent: float  # a tile runs at (its elements / 128²)^exponent of the rate of 128 x 128, at most at that rate
    overlap_exponent: float  # p of (compute^p + memory^p)^(1/p): 1 is no overlap, infinity perfect overlap
    issue_share: float  # of the unit's peak, in the main loop of a full tile, if power does not limit the clock
    depth_step_bytes: int  # bytes of a row of an operand that the main loop takes at a time
    latency_cycles: float  # once a kernel: its arguments, the first loads, the last stores
    wave_cycles: float  # once a wave: tiles start, and fill their pipeline of loads
    hides_epilogue: bool  # an SM computes its next tile while it writes the last one
    only_tiles: bool = True  # matrix units have no other way


_CUBLAS_TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64))

# Of vector units, for which two exponents are equally good on [NeuSight]: tiles .2 to .3, overlap 1.5 to 3. Latency was
# not measured: rows of less than 100 µs tell of the host there.
SIMT = GemmKernels(
    tiles=((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (64, 16), (16, 64)),
    tile_exponent=0.2,
    overlap_exponent=2.0,
    issue_share=0.0,  # no more than the profile's sustained share
    depth_step_bytes=4,
    latency_cycles=0.0,
    wave_cycles=0.0,
    hides_epilogue=True,
    only_tiles=False,
)
# `mma` instructions from Ampere on: `cp.async` loads the next tiles during the multiply-adds. 3 to 4 overlap alike.
MMA = GemmKernels(
    tiles=_CUBLAS_TILES,
    tile_exponent=0.25,
    overlap_exponent=3.0,
    issue_share=0.92,
    depth_step_bytes=128,
    latency_cycles=1250.0,
    wave_cycles=1300.0,
    hides_epilogue=False,
)
# Volta and Turing: a thread loads to registers, in turns with the multiply-adds.
SYNCHRONOUS_MMA = MMA._replace(overlap_exponent=2.0)
# Hopper's `wgmma` and Blackwell's `tcgen05`: persistent thread blocks, of which some warps load, some multiply and some
# store (CUTLASS, "Efficient GEMM in CUDA", warp specialization).
WARP_SPECIALIZED = MMA._replace(hides_epilogue=True)

_ASYNCHRONOUS_COPIES = (8, 0)  # the compute capability that `cp.async` came with
_WARP_SPECIALIZED_MAJORS = (9, 10)  # data-centre Hopper and Blackwell; 12.0 has Ampere's `mma`


def gemm_kernels(hardware: Hardware, peak: Peak) -> GemmKernels:
    """The family that the device's library has for this unit. One without a compute capability counts as Ampere."""
    if peak.unit != "matrix":
        return SIMT
    capability = hardware.compute_capability or _ASYNCHRONOUS_COPIES
    if capability[0] in _WARP_SPECIALIZED_MAJORS:
        return WARP_SPECIALIZED
    return MMA if capability >= _ASYNCHRONOUS_COPIES else SYNCHRONOUS_MMA
