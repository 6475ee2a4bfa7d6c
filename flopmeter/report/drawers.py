"""What can be made of a report, by name. Each drawer enters itself here, so that the report need not know any of
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FORMATS: dict[str, Callable[[Any], str]] = {}  # of Report.render
VIEWS: dict[str, Callable[..., Any]] = {}  # 'notebook', 'timeline', 'speed-up': other methods of Report


def rendered(formats: Mapping[str, Callable[[Any], str]], format: str, what: Any) -> str:
    """`what` as one of the formats. Raises ValueError for another one."""
    if format not in tuple(formats):  # whatever type it has
        raise ValueError(f"unknown format {format!r}; known: {', '.join(formats)}")
    return formats[format](what)


def draws(table: dict[str, Callable[..., Any]], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function that takes a report."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        table[name] = function
        return function

    return enter
