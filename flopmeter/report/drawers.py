"""What can be made of a report, by name: registries in which each renderer enters itself, so that report.py need not
import any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FORMATS: dict[str, Callable[[Any], str]] = {}  # 'text', 'html', ...: of Report.render
VIEWS: dict[str, Callable[..., Any]] = {}  # 'notebook', 'advice', ...: what other methods and properties of Report call


def rendered(formats: Mapping[str, Callable[[Any], str]], format: str, what: Any) -> str:
    """`what` as one of the formats. Raises ValueError for another one."""
    if format not in tuple(formats):  # whatever type it has
        raise ValueError(f"unknown format {format!r}; known: {', '.join(formats)}")
    return formats[format](what)


def draws(table: dict[str, Callable[..., Any]], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: enters a function of a report into one of these tables."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        table[name] = function
        return function

    return enter
