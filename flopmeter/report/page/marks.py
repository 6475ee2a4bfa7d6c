"""Shapes of the classes and hatchings of the memory's categories, defined once in a page and used by reference."""

from __future__ import annotations

from flopmeter.report.figures import CATEGORY_FILLS, CLASS_LOOKS
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.timing.peak_memory import CATEGORIES

_CLASSES = list(CLASS_LOOKS)
# By matplotlib's letters: paths around the origin, each about as large as a circle of radius 1.
_SHAPES = {
    "o": "M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0Z",
    "s": "M-.89-.89H.89V.89H-.89Z",
    "D": "M0-1.25L1.25 0 0 1.25-1.25 0Z",
    "^": "M0-1.3L1.2.8H-1.2Z",
    "v": "M0 1.3L1.2-.8H-1.2Z",
    ">": "M1.3 0L-.8 1.2V-1.2Z",
    "<": "M-1.3 0L.8 1.2V-1.2Z",
    "P": "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "X": "M-.5-1.06L0-.57.5-1.06 1.06-.5.57 0 1.06.5.5 1.06 0 .57-.5 1.06-1.06.5-.57 0-1.06-.5Z",
    "p": "M0-1.15L1.1-.35.68.93H-.68L-1.1-.35Z",
    "*": "M0-1.4L.33-.45 1.33-.43.53.17.82 1.13 0 .56-.82 1.13-.53.17-1.33-.43-.33-.45Z",
}
# By matplotlib's names: lines in a tile of 8 by 8.
_HATCHES = {
    "": "",
    "//": "M0 8L8 0",
    "..": "M2 2h1v1h-1zM6 6h1v1h-1z",
    "--": "M0 2H8M0 6H8",
    "xx": "M0 0L8 8M0 8L8 0",
    "\\\\": "M0 0L8 8",
    "++": "M0 4H8M4 0V8",
}


def definitions() -> Markup:
    """The definitions to which `mark` and `hatch` refer; once in a page."""
    shapes = [
        tag("path", id=f"mark{place}", class_=f"class{place}", d=_SHAPES[CLASS_LOOKS[name].marker])
        for place, name in enumerate(_CLASSES)
    ]
    hatches = [
        tag(
            "pattern",
            tag("rect", class_=f"category{place}", width=8, height=8),
            tag("path", class_="hatch", d=lines) if lines else "",
            id=f"hatch{place}", width=8, height=8, patternUnits="userSpaceOnUse",
        )
        for place, lines in enumerate(_HATCHES[fill.hatch] for fill in CATEGORY_FILLS.values())
    ]  # fmt: skip
    drawn = tag("defs", join(shapes), join(hatches))
    return tag("svg", drawn, class_="definitions", width=0, height=0, aria_hidden="true")


def colours() -> str:
    """CSS: the fill of each class and each category."""
    fills = [f".class{place}{{fill:{CLASS_LOOKS[name].colour}}}" for place, name in enumerate(_CLASSES)]
    fills += [f".category{place}{{fill:{CATEGORY_FILLS[name].colour}}}" for place, name in enumerate(CATEGORIES)]
    return "".join(fills)


def mark(op_class: str, x: float, y: float, radius: float, title: str = "") -> Markup:
    place = f"translate({x:.1f} {y:.1f}) scale({radius:.1f})"
    label = tag("title", title) if title else ""
    return tag("use", label, href=f"#mark{_CLASSES.index(op_class)}", transform=place)


def class_mark(name: str) -> Markup:
    """The shape of a class in a line of text; nothing for another name. It needs no definitions."""
    if name not in CLASS_LOOKS:
        return Markup("")
    colour, marker = CLASS_LOOKS[name]
    drawn = tag("path", d=_SHAPES[marker], fill=colour, transform="translate(7 7) scale(5)")
    return tag("svg", drawn, class_="mark", width=14, height=14, aria_hidden="true")


def hatch(category: str) -> str:
    """The fill of an area, by its category."""
    return f"url(#hatch{CATEGORIES.index(category)})"


def swatch(fill: str) -> Markup:
    """A sample of a fill, in a legend."""
    drawn = tag("rect", width=22, height=14, fill=fill)
    return tag("svg", drawn, class_="swatch", width=22, height=14, aria_hidden="true")
