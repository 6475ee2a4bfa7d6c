"""HTML and SVG as nested calls. Whatever is not Markup is text and gets escaped, so that no escaping can be
forgotten."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# Control characters, which no HTML document may hold, not even escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(_FORBIDDEN.sub("\ufffd", text)))


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """`tag("td", "a < b", data_v=3)` is `<td data-v="3">a &lt; b</td>`; `class_` is class, None leaves one out."""
    head = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{head}>{join(children)}</{name}>")


def join(parts: Iterable[str], separator: str = "") -> Markup:
    return Markup(separator.join(escape(part) for part in parts))


def _value(value: str | float) -> str:
    """Coordinates to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
