"""Estimates of what share of its spec peaks a device sustains, from its power limit, if nobody measured it.

A long matmul needs more power than the board allows, so the clock falls until the power fits. Power grows between
linearly with the clock (at the lowest voltage) and with its cube (voltage follows the clock); so the sustained rate is
taken to grow with the square root of the power per spec TFLOP/s, up to a ceiling for each kind of unit. The power that
a TFLOP/s needs depends on the generation (process, memory, kind of unit), not on the part: H100 PCIe at 350 W and SXM
at 700 W give the same.
"""

from __future__ import annotations

from math import sqrt

# Watts per spec TFLOP/s at which matrix units would hold the spec rate, by the start of the architecture's name (the
# longest that fits): TDP / peak / fraction², of the best dense fp16 or bf16 GEMM measured on one to three parts
# each (stas00/ml-engineering compute/accelerator@744d01e; zzc0721/torch-performance-test-data 2026-01-12). Parts of
# one generation agree within about 5 % in the fraction, B200 and GB200 within 10 %.
MATRIX_WATTS_PER_TFLOP_S = {
    "Volta": 4.2,
    "Turing": 2.6,
    "Ampere GA100": 1.45,
    "Ampere": 3.0,
    "Ada": 1.75,
    "Hopper": 1.08,
    "Blackwell": 0.82,
    "Blackwell GB202": 1.73,
    "CDNA": 2.15,
    "CDNA4": 1.3,
}
# No part that computes at full rate was measured above this share of its spec, whatever its power.
MATRIX_CEILING = 0.87
# GeForce parts run GEMMs that accumulate in fp32 at half rate. Power does not limit them then, and they clock above
# the spec boost: A10G .99, RTX 3090 1.08, RTX 4090 1.05 to 1.11, RTX 5090 1.06 to 1.21.
HALVED_RATE_SHARE = 1.05
# The best GEMM of a search is faster than the typical large one: 0.79 and 0.87 of the peak on A100 SXM, 0.74 and
# 0.80 on H100 SXM (medians of ai-dynamo/aiconfigurator's GEMM database@095f58a).
BEST_TO_TYPICAL = 0.07
UNKNOWN_MATRIX_SHARE = 0.6  # of generations without a measured part; the known ones lie between 0.44 and 0.8

# fp32 GEMMs on vector units: watts per TFLOP/s, and the ceiling. Set on five parts from Pascal to Ampere (Lee et
# al., NeuSight, ASPLOS 2025); 15.4 to 17.5 and .86 to .93 when any one of them is left out; 10 to 25 % off on each.
VECTOR_WATTS_PER_TFLOP_S = 17.7
VECTOR_CEILING = 0.90

# Streaming copies, which power hardly holds back, by the start of the memory's type (the longest that fits): .85 to .96
# of spec on HBM2e and HBM3, .93 to .98 on GDDR6 (te42kyfo/gpu-benches 2024-06-21), .82 to .85 on GDDR7 (RTX 5090,
# pytorch-image-models, results/).
MEMORY_SHARE = {"HBM": 0.85, "GDDR": 0.93, "GDDR7": 0.84}
UNKNOWN_MEMORY_SHARE = 0.80
# HBM has bits of its own for ECC. GDDR keeps the check bits among the data, a sixteenth of the capacity: 45 of 48 GiB
# are left of an A40's. Its fp16 additions reach .83 of spec (microsoft/vidur@7d475133) where an RTX 3090's reach .87.
# Boards of 75 W reach less, .74 to .78 (P4, T4, L4 in NeuSight), which their profiles say.
ECC_SHARE = 16 / 17


def matrix_share(architecture: str, peak_tflop_per_s: float, tdp_w: float | None, *, is_halved: bool) -> float:
    """The share of the spec rate of matrix units that typical large GEMMs reach."""
    if is_halved:
        return HALVED_RATE_SHARE
    families = [family for family in MATRIX_WATTS_PER_TFLOP_S if architecture.startswith(family)]
    if not families or tdp_w is None:
        return UNKNOWN_MATRIX_SHARE
    needed = MATRIX_WATTS_PER_TFLOP_S[max(families, key=len)]
    return min(MATRIX_CEILING, sqrt(tdp_w / (needed * peak_tflop_per_s))) - BEST_TO_TYPICAL


def vector_share(peak_tflop_per_s: float, tdp_w: float | None) -> float:
    """The share of the spec rate of vector units that large fp32 GEMMs reach."""
    if tdp_w is None:
        return VECTOR_CEILING
    return VECTOR_CEILING * min(1.0, sqrt(tdp_w / (VECTOR_WATTS_PER_TFLOP_S * peak_tflop_per_s)))


def memory_share(memory_type: str) -> float:
    """The share of the spec bandwidth that streaming kernels reach, by the type of memory, such as `HBM3`, `GDDR7` or
    `GDDR6 with ECC`."""
    families = [family for family in MEMORY_SHARE if memory_type.startswith(family)]
    if not families:
        return UNKNOWN_MEMORY_SHARE
    share = MEMORY_SHARE[max(families, key=len)]
    checks_itself = memory_type.startswith("GDDR") and "ECC" in memory_type
    return share * ECC_SHARE if checks_itself else share
