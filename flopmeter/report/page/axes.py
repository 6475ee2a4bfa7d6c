"""Axes of a picture: where a value lies, and what is written beside it."""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from flopmeter.report.page.markup import Markup, join, tag

FEW_TICKS = 2


class Axis(NamedTuple):
    """From `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; a value beyond the axis lies at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """On a logarithmic axis each decade, with 2 and 5 times it if there are few; else two to five round steps."""
        if self.is_log:
            decades = self._within((1,))
            return decades if len(decades) > FEW_TICKS else self._within((1, 2, 5))
        step = _round_step((self.high - self.low) / 5)
        return [self.low + step * place for place in range(int((self.high - self.low) / step + 1e-9) + 1)]

    def _within(self, steps: tuple[int, ...]) -> list[float]:
        powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
        values = (times * 10.0**power for power in powers for times in steps)
        return [value for value in values if self.low <= value <= self.high]


def _round_step(width: float) -> float:
    """1, 2 or 5 times a power of ten, near to the width."""
    power = 10.0 ** floor(log10(width))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width)


def horizontal(axis: Axis, top: float, bottom: float, labels: list[str], title: str) -> Markup:
    """Grid lines from top to bottom at the ticks, with a label under each."""
    parts = []
    for value, label in zip(axis.ticks, labels, strict=True):
        x = axis.at(value)
        parts.append(tag("path", class_="grid", d=f"M{x:.1f} {top:.1f}V{bottom:.1f}"))
        parts.append(tag("text", label, x=x, y=bottom + 18, text_anchor="middle"))
    middle = (axis.start + axis.end) / 2
    parts.append(tag("text", title, class_="title", x=middle, y=bottom + 38, text_anchor="middle"))
    return join(parts)


def vertical(axis: Axis, left: float, right: float, labels: list[str], title: str) -> Markup:
    """Grid lines from left to right at the ticks, with a label before each."""
    parts = []
    for value, label in zip(axis.ticks, labels, strict=True):
        y = axis.at(value)
        parts.append(tag("path", class_="grid", d=f"M{left:.1f} {y:.1f}H{right:.1f}"))
        parts.append(tag("text", label, x=left - 8, y=y + 4, text_anchor="end"))
    middle = (axis.start + axis.end) / 2
    turned = f"translate(12 {middle:.1f}) rotate(-90)"
    parts.append(tag("text", title, class_="title", transform=turned, text_anchor="middle"))
    return join(parts)


def picture(width: float, height: float, label: str, *parts: Markup) -> Markup:
    """An SVG as wide as the page has room for. `label` tells what it shows to whoever cannot see."""
    return tag("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label, class_="picture")
