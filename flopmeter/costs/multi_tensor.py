"""The launches of kernels that take lists of tensors: torch's foreach functions and fused optimizers.

Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh (torch 2.11 to 2.15). Each tensor is cut into chunks, one for a
thread block. A launch has as many blocks and tensors as its arguments have room for. A thread takes four elements of
each list, computes, stores them and takes the next four.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

from flopmeter.records import Cost, ThreadGrid, VectorWork
from flopmeter.torch_names import dispatcher

CHUNK = 65536
BLOCK_THREADS = 512
AT_A_TIME = 4

# By the number of lists: the most tensors of a launch; and its most blocks. Arguments of 32 KB, not 4, came between
# torch 2.11 and 2.12, in builds with CUDA 13.
_LARGE_ARGUMENTS_FROM = (2, 12)
_SMALL = (110, 64, 48, 36, 30), 320
_LARGE = (770, 448, 336, 252, 210), 2240

# Clock cycles of a step beyond its access to memory, and those for which a thread waits at a root or a quotient of an
# element, since either ends in a branch to its slow path. Where each block has an SM to itself, on an H100 (torch 2.11,
# validation/traces), 32 steps take 16 µs (products and sums), and in fused AdamW, with a root and two quotients of each
# of four elements, 35.6 (fp32) and 39.5 (bf16).
STEP_CYCLES = 150
FUNCTION_CYCLES = 110

# Registers of a thread, for which an SM holds two such blocks: those of fused AdamW in the same profiles.
FUNCTION_REGISTERS = 60


def in_launches(cost: Cost, sizes: Iterable[int], lists: int, *, functions: int = 0, instructions: int = 0) -> Cost:
    """The kernel as the launches that torch makes of it. `sizes`: elements of each tensor of a list; `functions`: roots
    and quotients of an element; `instructions`: of all threads, where they may bound the kernel."""
    launches, blocks, longest = _mean_launch(tuple(sizes), lists)
    if not launches or not isinstance(cost.work, VectorWork):
        return cost
    grid = ThreadGrid(
        blocks,
        BLOCK_THREADS,
        steps=ceil(longest / BLOCK_THREADS),
        at_a_time=AT_A_TIME,
        cycles=STEP_CYCLES + AT_A_TIME * functions * FUNCTION_CYCLES,
        registers=FUNCTION_REGISTERS if functions else 0,
        launches=launches,
        in_turns=True,
    )
    work = cost.work._replace(grid=grid, kernels=launches, instructions=instructions)
    return replace(cost, work=work, access="chunks")


@functools.lru_cache(maxsize=64)
def _mean_launch(sizes: tuple[int, ...], lists: int) -> tuple[int, int, int]:
    """How many launches there are, and blocks and longest chunk of one. An optimizer asks again for each of its ops."""
    parts = tuple(launches_of(sizes, lists))
    if not parts:
        return 0, 0, 0
    blocks, longest = (ceil(sum(each) / len(parts)) for each in zip(*parts, strict=True))
    return len(parts), blocks, longest


def launches_of(sizes: Iterable[int], lists: int) -> Iterator[tuple[int, int]]:
    """Blocks and the elements of the longest chunk of each launch, for tensors of so many elements in each list."""
    most_of_lists, most_blocks = _LARGE if dispatcher.running_version() >= _LARGE_ARGUMENTS_FROM else _SMALL
    most_tensors = most_of_lists[min(lists, len(most_of_lists)) - 1]
    tensors = blocks = longest = 0
    for size in filter(None, sizes):
        tensors, chunks = tensors + 1, ceil(size / CHUNK)
        while chunks:
            taken = min(chunks, most_blocks - blocks)
            blocks, chunks, longest = blocks + taken, chunks - taken, max(longest, min(size, CHUNK))
            if blocks == most_blocks or (tensors == most_tensors and not chunks):
                yield blocks, longest
                tensors, blocks, longest = min(chunks, 1), 0, 0
    if blocks:
        yield blocks, longest
