"""Stretches of time that may overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Time = TypeVar("Time", int, float)


def union_length(spans: Iterable[tuple[Time, Time]]) -> Time | int:
    """Length of the union of spans from a start to an end: time in several of them counts once."""
    total: Time | int = 0
    until: Time | int = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
