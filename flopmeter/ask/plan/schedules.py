"""Orders of passes: which rank of a pipeline runs the forward and backward passes of which microbatch when.

They are those of torch.distributed.pipelining's Schedule1F1B, ScheduleInterleaved1F1B and
ScheduleInterleavedZeroBubble, which follow PipeDream-Flush (arXiv 2006.09503), Megatron-LM (arXiv 2104.04473) and ZB-H1
(arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

# In a zero-bubble schedule, backward passes make the gradients that the stage before waits for, and passes of their own
# make those of the weights.
PassKind = Literal["forward", "backward", "weights"]


class Pass(NamedTuple):
    """One microbatch goes through one of the rank's stages."""

    kind: PassKind
    chunk: int  # which of its stages, from 0
    microbatch: int


def order_of(rank: int, ranks: int, microbatches: int, chunks: int, zero_bubble: bool = False) -> list[Pass]:
    """The passes of that rank. Stage `chunk * ranks + rank` of the model is its chunk. With more than one chunk,
    microbatches are a multiple of ranks."""
    total = microbatches * chunks
    behind = ranks - 1 - rank
    each = 1 if chunks == 1 or zero_bubble else 2
    warm_up = min(total, (chunks - 1) * ranks + each * behind)
    order = list(_one_each(total, warm_up, ranks, chunks, late=rank if zero_bubble else None))
    return order + [
        _pass("weights", number, ranks, chunks) for number in range(max(0, total - rank), total) if zero_bubble
    ]


def _one_each(total: int, warm_up: int, ranks: int, chunks: int, late: int | None) -> Iterator[Pass]:
    """After the warm-up, forward and backward passes in turn. Where weights have passes of their own, one follows each
    backward pass but the first `late` ones."""
    for number in range(total + warm_up):
        if number < total:
            yield _pass("forward", number, ranks, chunks)
        if number >= warm_up:
            yield _pass("backward", number - warm_up, ranks, chunks)
            if late is not None and number - warm_up >= late:
                yield _pass("weights", number - warm_up - late, ranks, chunks)


def _pass(kind: PassKind, number: int, ranks: int, chunks: int) -> Pass:
    """The n-th pass of its kind: `ranks` microbatches go through one chunk before the next chunk has its turn."""
    if chunks == 1:
        return Pass(kind, 0, number)
    round_, within = divmod(number, ranks * chunks)
    chunk, place = divmod(within, ranks)
    return Pass(kind, chunk if kind == "forward" else chunks - 1 - chunk, round_ * ranks + place)


def most_in_flight(order: list[Pass], made: list[float]) -> float:
    """The most alive at one time, if a forward pass of chunk i makes `made[i]` and its other pass frees as much."""
    return max(accumulate(made[each.chunk] if each.kind == "forward" else -made[each.chunk] for each in order))
