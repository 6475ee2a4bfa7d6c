"""For the site: the arguments of a docstring as a list. In the source they are plain lines,

    name: what it is, which
        may go on in a second line.

which Markdown would run together. griffe reads the source, so that the site is built without torch.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(?P<names>[a-z_]\w*(, [a-z_]\w*)*): (?P<text>.*)$")


class ArgumentLists(griffe.Extension):  # type: ignore[misc]  # griffe is of the extra `docs`
    """Writes the argument lines of every docstring as list items."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    lines: list[str] = []
    for line in docstring.splitlines():
        if argument := ARGUMENT.match(line):
            if lines and lines[-1] and not lines[-1].startswith(("- ", "    ")):
                lines.append("")
            line = f"- `{argument['names']}`: {argument['text']}"
        lines.append(line)
    return "\n".join(lines)
