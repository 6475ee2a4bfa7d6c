"""Which configuration an autotuned Triton kernel runs with. A GPU times them all; here none can be timed.

It is the first, as authors name one for large products first, unless its tiles do not fit: tiles of 128 x 256 over
heads of 64 and states of 128 multiply four times what the kernel needs, which no measurement chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopmeter.records import TritonBody

FIRST_FITTING = "the first fitting configuration of an autotuned kernel"
# Multiply-adds of a configuration that fits, over the fewest of all: what larger tiles compute beyond the edges of
# matrices and masks, and win back. Chosen, not measured.
PADDING = 1.25


def first_fitting(bodies: Sequence[Callable[[], TritonBody]]) -> int:
    """The place of the configuration to take. Each function tells what the kernel does with one; those after the first
    are called only where the kernel multiplies matrices."""
    products = []
    for place, body in enumerate(bodies):
        products.append(_products(body))
        if place == 0 and products[0] == 0:
            return 0
    known = [number for number in products if number is not None]
    return next((place for place, number in enumerate(products) if number and number <= PADDING * min(known)), 0)


def _products(body: Callable[[], TritonBody]) -> int | None:
    """The multiply-adds of its products; None where Triton refuses the configuration, as it does before it times it."""
    try:
        found = body()
    except Exception:  # Triton's own errors, and those that the kernel's assertions raise while it is compiled
        return None
    return sum(op.number for op in found.ops if op.dot is not None)
