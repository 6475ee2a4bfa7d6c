"""What a device draws, and how fast it runs within its power limit: one law for both.

Energy. A multiply-add costs a number of joules at the voltage of the boost clock, a byte from memory a number at any
clock, and the device draws its idle power all the time.

Clock. Voltage falls with the clock: V / V_boost = 0.5 + 0.5 f / f_boost, never below 0.65. Arithmetic draws
f V². So where a long run would need more than the limit, the clock falls to where f V² fits. Two parts of a generation
whose limits differ then have the same joules per FLOP, by the sustained shares of their peaks: H100 PCIe (350 W) and
SXM (700 W) .79 and .82 pJ, L4 and L40S 1.28 and 1.32, MI300X and MI325X 1.70 and 1.64, B300 and GB300 .60 and .60.
H200s whose power was logged give .85, from watts alone. With a part left out, its share is predicted within 8 % from
the others of its generation.

A short kernel runs at the boost clock: a controller averages the power over tens of milliseconds. (On the H200s, where
a burst is 36 kernels in a row, kernels in a long run take 1.13 times as long as in a burst of 20 ms, and 1.04 times as
long as in one of 70 ms.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

# What a device draws with its clock up and nothing to do, as a share of its board power: 126 of 700 W, the least that
# was logged on H200s (aiconfigurator's GEMM database@095f58a; kernels of 2 µs that compute next to nothing draw 135).
IDLE_SHARE = 0.18

# Voltage over the clock, both as shares of their value at boost. .5 makes parts of one generation agree (above); with 0
# (voltage proportional to the clock) they differ by 1.6 times. The floor is where a process stops working, about .7 V
# of 1.05 V.
VOLTAGE_AT_REST = 0.5
LEAST_VOLTAGE = 0.65
LEAST_CLOCK = 0.15  # no controller goes lower: about 200 MHz
# Below this clock the caches, which have the multiprocessors' clock, hold memory back: an L2 cache delivers three or
# more times what HBM does at boost.
MEMORY_BOUND_CLOCK = 0.3

# Picojoules of a FLOP (half a multiply-add) of matrix units in fp16 or bf16 at boost voltage, operands from the L2
# cache included, by the start of the architecture's name (the longest that fits). Each follows from the limit, the
# spec peak and the sustained share of one to three parts: .82 limit = peak share V² (pJ + those of the bytes), with
# the share .07 below the best dense GEMM (stas00/ml-engineering compute/accelerator@744d01e;
# zzc0721/torch-performance-test-data 2026-01-12). Hopper: also .85 fitted to the watts of GEMMs on H200s.
# CDNA 1 and 2: from MI100 and MI210 in fp32 (NeuSight), by the factor of fp32 below. Parts of one generation agree
# within 5 %, A100s within 10, B200 and GB200 within 12.
MATRIX_PICOJOULES = {
    "Volta": 3.25,
    "Turing": 2.0,
    "Ampere GA100": 1.15,
    "Ampere": 2.35,
    "Ada": 1.33,
    "Hopper": 0.85,
    "Blackwell": 0.60,
    "Blackwell GB20": 1.30,  # GB202 to GB207, of GDDR7; set on GB202
    "CDNA1": 2.1,
    "CDNA2": 2.1,
    "CDNA3": 1.7,
    "CDNA4": 1.1,
}
# Energy of a FLOP in other types, in those of fp16. A multiplier's area grows with the square of the mantissa: 24 bits
# against 11 in fp32. Narrow types halve the energy with the width, as they double the rate; tf32 moves 4 bytes. Types
# that are not here (fp64) are assumed to draw, at full rate, what fp16 draws.
TYPE_FACTOR = {
    "fp32": (24 / 11) ** 2,
    "tf32": 2.0,
    "fp16": 1.0,
    "bf16": 1.0,
    "fp8": 0.5,
    "fp6": 0.5,
    "int8": 0.5,
    "fp4": 0.25,
    "int4": 0.25,
}
# Shares of the spec peak that large GEMMs reach at the boost clock. No part at full rate was measured above .87; the
# best GEMM of a search is .07 faster than the typical large one (0.79 and 0.87 of the peak on A100 SXM, 0.74 and 0.80
# on H100 SXM; medians of aiconfigurator's GEMM database@095f58a).
MATRIX_CEILING = 0.87
BEST_TO_TYPICAL = 0.07
# GeForce parts run GEMMs that accumulate in fp32 at half rate. Power does not limit them then, and they clock above
# the spec boost: A10G .99, RTX 3090 1.08, RTX 4090 1.05 to 1.11, RTX 5090 1.06 to 1.21.
HALVED_RATE_SHARE = 1.05
UNKNOWN_MATRIX_SHARE = 0.6  # of generations without a measured part; the known ones lie between 0.44 and 0.8

# fp32 on vector units, any generation: picojoules of a FLOP, and the share of the peak at boost. Set on large GEMMs of
# five parts from Pascal to Ampere (Lee et al., NeuSight, ASPLOS 2025); the L4's, which set nothing here, are predicted
# at .28 of the peak and reach .29. From 12 to 21 on single parts; the newest need least.
VECTOR_PICOJOULES = 16.0
VECTOR_CEILING = 0.90

# Picojoules of a byte from memory at full bandwidth, with the way to the multiprocessors. HBM: 92 fitted to the H200s'
# watts, 110 in its GEMMs of few rows alone. GDDR: not measured; its pins cost about 4 pJ a bit more.
BYTE_PICOJOULES = {"HBM": 100.0, "GDDR": 135.0}
UNKNOWN_BYTE_PICOJOULES = 100.0
# FLOP per operand from memory of a large GEMM, for its part of the power: the H200s' move .35 TB/s at 690 TFLOP/s, in
# operands of two bytes.
GEMM_INTENSITY = 4000.0

# Streaming copies, which power hardly holds back, by the start of the memory's type (the longest that fits): .85 to .96
# of spec on HBM2e and HBM3, .93 to .98 on GDDR6 (te42kyfo/gpu-benches 2024-06-21), .82 to .85 on GDDR7 (RTX 5090,
# pytorch-image-models, results/).
MEMORY_SHARE = {"HBM": 0.85, "GDDR": 0.93, "GDDR7": 0.84}
UNKNOWN_MEMORY_SHARE = 0.80
# HBM has bits of its own for ECC. GDDR keeps the check bits among the data, a sixteenth of the capacity: 45 of 48 GiB
# are left of an A40's. Its fp16 additions reach .83 of spec (microsoft/vidur@7d475133) where an RTX 3090's reach .87.
# Boards of 75 W reach less, .74 to .78 (P4, T4, L4 in NeuSight), which their profiles say.
ECC_SHARE = 16 / 17


class UnitPower(NamedTuple):
    """How large GEMMs run on one unit in one type."""

    burst_share: float  # of the spec peak, at the boost clock
    sustained_share: float  # of the spec peak, in a run of nothing else
    picojoules: float | None  # of a FLOP at boost voltage; None where the power limit is unknown


def idle_watts(tdp_w: float) -> float:
    return IDLE_SHARE * tdp_w


def squared_voltage(clock: float) -> float:
    """V² at a share of the boost clock, as a share of that at boost."""
    return max(LEAST_VOLTAGE, VOLTAGE_AT_REST + (1 - VOLTAGE_AT_REST) * clock) ** 2


def clock_within(watts: float, arithmetic_watts: float, memory_watts: float) -> float:
    """The largest clock, at most 1, at which work that draws these watts at boost draws `watts`. Both parts fall with
    the clock, since bytes come as fast as they are used; the arithmetic falls with the voltage too."""

    def fits(clock: float) -> bool:
        return clock * (arithmetic_watts * squared_voltage(clock) + memory_watts) <= watts

    low, high = LEAST_CLOCK, 1.0
    if fits(high):
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _clock_of(squared: float) -> float:
    """The clock of a squared voltage; the inverse of `squared_voltage`."""
    return min(1.0, max(LEAST_CLOCK, (squared**0.5 - VOLTAGE_AT_REST) / (1 - VOLTAGE_AT_REST)))


@functools.lru_cache(maxsize=4096)
def unit(
    peak_tflop_per_s: float,
    limit_w: float | None,
    idle_w: float,
    picojoules: float | None,
    operand_picojoules: float,
    *,
    typical: float,
    ceiling: float,
    burst: float | None = None,
    sustained: float | None = None,
    measured_limit_w: float | None = None,
) -> UnitPower:
    """What a unit reaches. `picojoules`: for a FLOP; `operand_picojoules`: for an operand from memory. `burst` and
    `sustained`: measured shares of its peak, the latter under `measured_limit_w`; without either, `typical` is the
    burst share.

    A measured sustained share is kept: the law only says which part of what it lacks is the clock's. Where that would
    take a burst share above `ceiling`, the part needs less energy than its generation, as much as fits. Where both were
    measured, they say what it needs. For a generation whose energy is unknown, the measured share is taken to use up
    the power limit at the boost clock.
    """
    if limit_w is None:
        return UnitPower(burst or sustained or typical, sustained or burst or typical, None)
    of_bytes = operand_picojoules / GEMM_INTENSITY
    measured_w = ((measured_limit_w or limit_w) - idle_w) / peak_tflop_per_s  # per TFLOP/s: picojoules
    if picojoules is None:
        picojoules = max(0.0, measured_w / (sustained or burst or typical) - of_bytes)
    if sustained is not None:
        left = max(0.0, measured_w / sustained - of_bytes)  # for arithmetic, per FLOP
        both = burst is not None and burst > sustained
        if burst is None:
            burst = min(sustained / _clock_of(left / picojoules if picojoules else 1.0), max(sustained, ceiling))
        burst = max(burst, sustained)
        needed = left / squared_voltage(sustained / burst)
        picojoules = needed if both else min(picojoules, needed)
        if limit_w == (measured_limit_w or limit_w):
            return UnitPower(burst, sustained, picojoules)
    burst = burst or typical
    at_boost = burst * peak_tflop_per_s  # watts per picojoule
    clock = clock_within(limit_w - idle_w, at_boost * picojoules, at_boost * of_bytes)
    return UnitPower(burst, burst * clock, picojoules)


@functools.cache
def matrix_picojoules(architecture: str, dtype: str, tflop_per_s: float, half_rate_tflop_per_s: float) -> float | None:
    """Energy of a FLOP on matrix units at boost voltage; None for a generation that was not measured."""
    of_half = _of_family(MATRIX_PICOJOULES, architecture)
    return None if of_half is None else of_half * TYPE_FACTOR.get(dtype, half_rate_tflop_per_s / tflop_per_s)


@functools.cache
def typical_matrix_share(architecture: str, *, is_halved: bool) -> float:
    """What large GEMMs reach of the peak at the boost clock, if nobody measured it."""
    if is_halved:
        return HALVED_RATE_SHARE
    is_known = _of_family(MATRIX_PICOJOULES, architecture) is not None
    return MATRIX_CEILING - BEST_TO_TYPICAL if is_known else UNKNOWN_MATRIX_SHARE


@functools.cache
def byte_picojoules(memory_type: str) -> float:
    """Energy of a byte from memory."""
    return _of_family(BYTE_PICOJOULES, memory_type) or UNKNOWN_BYTE_PICOJOULES


@functools.cache
def memory_share(memory_type: str) -> float:
    """The share of the spec bandwidth that streaming kernels reach, by the type of memory, such as `HBM3`, `GDDR7` or
    `GDDR6 with ECC`."""
    share = _of_family(MEMORY_SHARE, memory_type) or UNKNOWN_MEMORY_SHARE
    checks_itself = memory_type.startswith("GDDR") and "ECC" in memory_type
    return share * ECC_SHARE if checks_itself else share


def _of_family(figures: Mapping[str, float], name: str) -> float | None:
    """The figure of the longest key that the name begins with; None if it begins with none."""
    families = [family for family in figures if name.startswith(family)]
    return figures[max(families)] if families else None  # of beginnings of one name the longest is the last
