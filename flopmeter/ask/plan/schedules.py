"""Orders of passes: which rank of a pipeline runs the forward and backward passes of which microbatch when.

They are those of torch.distributed.pipelining's Schedule1F1B and ScheduleInterleaved1F1B, which follow PipeDream-Flush
(arXiv 2006.09503) and Megatron-LM (arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Pass(NamedTuple):
    """One microbatch goes through one of the rank's stages."""

    kind: Literal["forward", "backward"]
    chunk: int  # which of its stages, from 0
    microbatch: int


def order_of(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Pass]:
    """The passes of that rank. Stage `chunk * ranks + rank` of the model is its chunk. With more than one chunk,
    microbatches are a multiple of ranks."""
    total = microbatches * chunks
    behind = ranks - 1 - rank
    warm_up = behind if chunks == 1 else (chunks - 1) * ranks + 2 * behind
    return list(_one_each(total, min(total, warm_up), ranks, chunks))


def _one_each(total: int, warm_up: int, ranks: int, chunks: int) -> Iterator[Pass]:
    """After the warm-up one forward and one backward pass in turn."""
    for number in range(total + warm_up):
        if number < total:
            yield _pass("forward", number, ranks, chunks)
        if number >= warm_up:
            yield _pass("backward", number - warm_up, ranks, chunks)


def _pass(kind: Literal["forward", "backward"], number: int, ranks: int, chunks: int) -> Pass:
    """The n-th pass of its kind: `ranks` microbatches go through one chunk before the next chunk has its turn."""
    if chunks == 1:
        return Pass(kind, 0, number)
    round_, within = divmod(number, ranks * chunks)
    chunk, place = divmod(within, ranks)
    return Pass(kind, chunk if kind == "forward" else chunks - 1 - chunk, round_ * ranks + place)


def most_in_flight(order: list[Pass], weights: list[float]) -> float:
    """The most that is alive at a time, where a forward pass of chunk i makes `weights[i]` and its backward pass ends
    it."""
    alive = most = 0.0
    for each in order:
        alive += weights[each.chunk] * (1 if each.kind == "forward" else -1)
        most = max(most, alive)
    return most
