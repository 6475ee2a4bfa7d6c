"""How much of a batch of texts is padding, told by its token ids: texts end, or begin, with one id again and again."""

from __future__ import annotations

from torch import Tensor

LEAST_RUN = 2  # an id that ends a text once may be a word


def longest_text(ids: Tensor) -> int:
    """How many tokens the longest text has, of known ids [texts, tokens]. All of them where no text is padded, or one
    is nothing else."""
    length = ids.shape[1]
    return min(length - _least_run(ids), length - _least_run(ids.flip(1)))


def _least_run(ids: Tensor) -> int:
    """The shortest of the runs of padding at the ends of the texts; 0 if there is none in one of them."""
    last = ids[:, -1:]
    runs = (ids == last).int().flip(1).cumprod(1).sum(1)
    padded = runs >= LEAST_RUN
    is_one_id = int(last[padded].unique().numel()) == 1
    least = int(runs.min())
    return least if is_one_id and least >= LEAST_RUN and int(runs.max()) < ids.shape[1] else 0
