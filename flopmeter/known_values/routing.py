"""Which experts tokens pick, where the scores are not known: a law that the user states.

`routing="balanced"`: they take turns. `routing="independent"`: each token picks by chance, whatever the others pick, so
that few tokens leave some experts idle; as many as are expected to be busy take turns. `routing={"imbalance": 1.3}`:
the first expert gets 1.3 times the mean, the last one 0.7 times, and those between lie on a straight line. Then the
first rank of a group of experts is the busiest one, which decides how long the group takes: meter that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_EXPERTS = 512  # of a layer in public models (config.json of Qwen3-Next, num_experts); more are a vocabulary
MOST_IMBALANCE = 2.0  # above this, the last expert would get fewer than no tokens

Routing = str | Mapping[str, float] | None  # what users state


class RoutingLaw(NamedTuple):
    """How `rows` tokens pick `k` of `n` experts each."""

    imbalance: float | None  # the most loaded expert's share of the mean; None: experts take turns
    text: str  # as the user wrote it
    is_independent: bool = False  # only those experts take turns that are expected to be busy

    @property
    def is_balanced(self) -> bool:
        return self.imbalance is None

    def picks(self, rows: int, k: int, n: int) -> Tensor:
        """[rows, k] on the CPU: the experts of each token, all different. If few are busy, they are spread over
        all, as each rank of a group has as many. Tokens of a vocabulary are picked from its middle on: at its ends it
        has those that end a text."""
        if self.imbalance is None:
            busy = max(k, round(n * (1 - (1 - k / n) ** rows))) if self.is_independent else n
            turns = torch.arange(rows * k, device="cpu")
            if n > MOST_EXPERTS:
                return ((turns + busy // 2) % busy).view(rows, k)
            busy = min(busy, rows * k)
            return (turns % busy * n // busy).view(rows, k)
        # The experts' runs, one after another, fill the first choices of all tokens, then their second choices. No run
        # is longer than there are tokens, so that no token picks an expert twice.
        counts = self.counts(rows, k, n)
        return torch.repeat_interleave(torch.arange(n, device="cpu"), counts).view(k, rows).t().contiguous()

    def counts(self, rows: int, k: int, n: int) -> Tensor:
        """How many tokens each expert gets, rounded so that the sum is rows * k. No expert gets a token twice, so that
        the most that it can have is n / k times the mean."""
        most = min(self.imbalance or 1.0, n / k)
        line = torch.linspace(most, 2 - most, n, dtype=torch.float64, device="cpu")
        ends = (line.cumsum(0) * (rows * k / n)).round().long()
        ends[-1] = rows * k
        return torch.diff(ends, prepend=ends.new_zeros(1))


BALANCED = 'routing="balanced"'


def routing_law(stated: Any) -> RoutingLaw | None:
    """The law that the user stated. Raises ValueError for anything else."""
    if stated is None:
        return None
    if stated == "balanced":
        return RoutingLaw(None, BALANCED)
    if stated == "independent":
        return RoutingLaw(None, 'routing="independent"', is_independent=True)
    if isinstance(stated, Mapping) and stated.keys() == {"imbalance"}:
        value = stated["imbalance"]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= MOST_IMBALANCE:
            return RoutingLaw(float(value), f'routing={{"imbalance": {value:g}}}')
    raise ValueError(
        "routing must be None, 'balanced', 'independent' or"
        f" {{'imbalance': a number from 1 to {MOST_IMBALANCE:g}}}, not {stated!r}"
    )
