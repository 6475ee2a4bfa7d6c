"""Options that a shim of flash-attn does not have."""

from __future__ import annotations

from typing import Any


def refuse(options: dict[str, Any], *names: str) -> None:
    for name in names:
        given = options.get(name)
        if given is not None and not (isinstance(given, (int, float)) and given == 0):  # none
            raise NotImplementedError(f"flopmeter's shim of flash_attn has no {name}: leave it out")
