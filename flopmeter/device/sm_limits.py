"""What a streaming multiprocessor holds, by compute capability.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WARP_THREADS = 32
SM_REGISTERS = 65536  # of 32 bits; the same for all of these
BLOCK_THREADS = 1024  # the most of a block; the same for all of these
KB = 1024


class SmLimits(NamedTuple):
    threads: int = 2048  # that are resident at a time
    shared_kb: int | None = None  # of shared memory; None: not listed here
    block_shared_kb: int | None = None  # of these, that one block may ask for


_LIMITS: Mapping[tuple[int, int], SmLimits] = {
    (6, 0): SmLimits(2048, 64, 48), (6, 1): SmLimits(2048, 96, 48), (7, 0): SmLimits(2048, 96, 96),
    (7, 5): SmLimits(1024, 64, 64), (8, 0): SmLimits(2048, 164, 163), (8, 6): SmLimits(1536, 100, 99),
    (8, 7): SmLimits(1536, 164, 163), (8, 9): SmLimits(1536, 100, 99), (9, 0): SmLimits(2048, 228, 227),
    (10, 0): SmLimits(2048, 228, 227), (10, 3): SmLimits(2048, 228, 227), (12, 0): SmLimits(1536, 100, 99),
    (12, 1): SmLimits(1536, 100, 99),
}  # fmt: skip


def sm_limits(compute_capability: tuple[int, int]) -> SmLimits:
    return _LIMITS.get(compute_capability, SmLimits())
