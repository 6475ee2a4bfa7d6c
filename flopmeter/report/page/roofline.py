"""The roofline as SVG: every kernel as a dot whose area is its share of the device's time; the longest are named."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan2, degrees, sqrt
from typing import NamedTuple

from flopmeter.report.figures import LEAST_INTENSITY, Dot, Roof, Roofline, beside, longest_dots, merged, ranges
from flopmeter.report.page.axes import Axis, horizontal, picture, vertical
from flopmeter.report.page.marks import class_mark, mark
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.quantities import tick, with_prefix

_WIDTH, _HEIGHT = 480.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 72.0, _WIDTH - 10, 10.0, _HEIGHT - 50
_SMALLEST, _LARGEST = 3.0, 22.0  # radius in pixels, of a kernel of no time and one of all the time
_NUMBER = 16.0  # pixels that a number beside a dot takes
_LINE = 17.0  # and a line of text


class Axes(NamedTuple):
    intensity: Axis
    rate: Axis

    def at(self, dot: Dot) -> tuple[float, float]:
        return self.intensity.at(dot.intensity), self.rate.at(dot.flop_per_s)


def axes_for(rooflines: Sequence[Roofline]) -> Axes:
    """Axes that show the dots and roofs of all of them."""
    intensity, rate = ranges(rooflines)
    return Axes(Axis(*intensity, _LEFT, _RIGHT, True), Axis(*rate, _BOTTOM, _TOP, True))


def draw_roofline(roofline: Roofline, mode: str, axes: Axes) -> Markup:
    """The picture, its longest kernels, and what it does not show; a note instead where no kernel has FLOPs."""
    if not roofline.dots:
        return tag("p", "No kernel has FLOPs: there is nothing to place under a roofline.")
    shown = merged(roofline.dots, axes.at)  # so that a long program stays a small page
    named = longest_dots(shown, roofline.kernel_seconds)
    intensities, rates = ([tick(value) for value in axis.ticks] for axis in axes)
    body = picture(
        _WIDTH,
        _HEIGHT,
        f"Roofline, {mode}: FLOP/s over FLOP/B of each kernel; those that take the most time are listed below",
        horizontal(axes.intensity, _TOP, _BOTTOM, intensities, "arithmetic intensity (FLOP/B)"),
        vertical(axes.rate, _LEFT, _RIGHT, rates, "reached (FLOP/s)"),
        _roofs(roofline, axes),
        tag("g", *(_drawn(dot, roofline.kernel_seconds, axes) for dot in shown), class_="dots"),
        _slope_label(roofline.products.bytes_per_s, axes),
        _roof_labels(roofline, axes),
        _numbers(named, roofline, axes),
    )
    unplaced = f"Without a place, under {LEAST_INTENSITY:g} FLOP/B: {100 * roofline.unplaced_share:.1f} % of the time."
    return tag("figure", tag("h3", mode), body, _key(named, roofline), tag("figcaption", unplaced))


def _key(named: Sequence[Dot], roofline: Roofline) -> Markup:
    """The kernels by the numbers in the picture."""
    return tag("ol", *(tag("li", *_about(dot, roofline)) for dot in named), class_="key")


def _about(dot: Dot, roofline: Roofline) -> tuple[str, ...]:
    calls = f" ×{dot.calls}" if dot.calls > 1 else ""
    share = dot.seconds / roofline.kernel_seconds
    figures = (
        f"{with_prefix(dot.seconds, 's')}, {100 * share:.0f} % of the device's time ·"
        f" {with_prefix(dot.flop_per_s, 'FLOP/s')}, {100 * roofline.share_of_roof(dot):.0f} % of its roof"
    )
    return class_mark(dot.op_class), tag("b", dot.name + calls), f" in {dot.module}: {figures}"


def _radius(dot: Dot, kernel_seconds: float) -> float:
    return sqrt(_SMALLEST**2 + dot.seconds / kernel_seconds * _LARGEST**2)


def _drawn(dot: Dot, kernel_seconds: float, axes: Axes) -> Markup:
    title = (
        f"{dot.name} ({dot.op_class})\n{dot.calls} kernels, {with_prefix(dot.seconds, 's')},"
        f" {100 * dot.seconds / kernel_seconds:.1f} % of the time\n"
        f"{dot.intensity:.3g} FLOP/B, {with_prefix(dot.flop_per_s, 'FLOP/s')}"
    )
    return mark(dot.op_class, *axes.at(dot), _radius(dot, kernel_seconds), title)


def _numbers(named: Sequence[Dot], roofline: Roofline, axes: Axes) -> Markup:
    """The numbers of the kernels that the key lists, each with a line to its dot."""
    points = [axes.at(dot) for dot in named]
    texts = [(x, y - 4) for _, y in _labels(roofline, axes) for x in range(int(_RIGHT) - 220, int(_RIGHT) + 10, 10)]
    centres = beside(points, [_radius(dot, roofline.kernel_seconds) for dot in named], _NUMBER, texts)
    lines = (
        tag("path", class_="leader", d=f"M{x:.1f} {y:.1f}L{a:.1f} {b:.1f}")
        for (x, y), (a, b) in zip(points, centres, strict=True)
    )
    numbers = (
        tag("text", str(number), class_="number", x=x, y=y + 5, text_anchor="middle")
        for number, (x, y) in enumerate(centres, 1)
    )
    return join([*lines, *numbers])


def _roofs(roofline: Roofline, axes: Axes) -> Markup:
    """The roofs, solid by the datasheet and dashed as sustained."""
    parts = []
    for roof in (roofline.products, roofline.vector):
        datasheet = roof.line(_left(roof.bytes_per_s, axes), axes.intensity.high)
        sustained = roof.line(_left(roof.sustained_bytes_per_s, axes), axes.intensity.high, sustained=True)
        parts.append(tag("path", class_="roof", d=_line(datasheet, axes)))
        parts.append(tag("path", class_="roof sustained", d=_line(sustained, axes)))
    return join(parts)


def _labels(roofline: Roofline, axes: Axes) -> list[tuple[str, float]]:
    """A label with its height for each roof: above the highest roof, where no dot can be; for the other roof below its
    dashed line, or in the same text if both are equally high."""
    higher, lower = sorted((roofline.products, roofline.vector), key=lambda roof: -roof.flop_per_s)
    top = axes.rate.at(higher.flop_per_s) - 6
    if (higher.dtype, higher.flop_per_s) == (lower.dtype, lower.flop_per_s):
        return [(f"{higher.dtype} products and vector {_rate(higher)}", top)]
    below = axes.rate.at(lower.sustained_flop_per_s) + _LINE - 3
    return [
        (f"{higher.dtype} {higher.unit} {_rate(higher)}", top),
        (f"{lower.dtype} {lower.unit} {_rate(lower)}", below),
    ]


def _roof_labels(roofline: Roofline, axes: Axes) -> Markup:
    texts = _labels(roofline, axes)
    return join(tag("text", text, class_="halo", x=_RIGHT - 4, y=y, text_anchor="end") for text, y in texts)


def _rate(roof: Roof) -> str:
    return with_prefix(roof.flop_per_s, "FLOP/s")


def _left(bytes_per_s: float, axes: Axes) -> float:
    """The intensity at which a slope enters the picture."""
    return max(axes.intensity.low, axes.rate.low / bytes_per_s)


def _line(points: list[tuple[float, float]], axes: Axes) -> str:
    return "M" + "L".join(f"{axes.intensity.at(x):.1f} {axes.rate.at(y):.1f}" for x, y in points)


def _slope_label(bytes_per_s: float, axes: Axes) -> Markup:
    """The label along the slope, above it, where no dot can be."""
    left = _left(bytes_per_s, axes)
    x, y = axes.intensity.at(left), axes.rate.at(left * bytes_per_s)
    farther = min(axes.intensity.high, axes.rate.high / bytes_per_s)
    turn = degrees(atan2(axes.rate.at(farther * bytes_per_s) - y, axes.intensity.at(farther) - x))
    place = f"translate({x:.1f} {y:.1f}) rotate({turn:.1f})"
    return tag("text", f"memory {with_prefix(bytes_per_s, 'B/s')}", class_="halo slope", transform=place, x=10, y=-7)
