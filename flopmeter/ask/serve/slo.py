"""The latencies that a server has to keep to, as text or as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flopmeter.ask.checks import is_positive
from flopmeter.ask.serve.cache import ServingError

SLOS = ("ttft", "tpot")


def read_slo(given: str | Mapping[str, float] | None) -> dict[str, float]:
    """Seconds by 'ttft' and 'tpot', from 'ttft=500ms,tpot=0.03s' or a mapping. Raises ServingError for others."""
    if given is None:
        return {}
    if not isinstance(given, str | Mapping):
        raise ServingError(f"slo must be latencies such as 'ttft=500ms,tpot=30ms', not {given!r}")
    pairs = given.items() if isinstance(given, Mapping) else (part.partition("=")[::2] for part in given.split(","))
    found: dict[str, float] = {}
    for name, value in pairs:
        name = name.strip()
        if name not in SLOS:
            raise ServingError(f"unknown latency {name!r}; known: {', '.join(SLOS)} (as in ttft=500ms,tpot=30ms)")
        if name in found:
            raise ServingError(f"the latency {name} is given twice: give it once")
        found[name] = _from_text(value) if isinstance(value, str) else value
        if not is_positive(found[name]):
            raise ServingError(f"a latency is a time such as 500ms or 0.5s, not {value!r}")
    return found


def _from_text(value: str) -> float:
    """Seconds; NaN without a unit, since 500 may be s or ms."""
    number, scale = (value[:-2], 1e-3) if value.endswith("ms") else (value[:-1], 1.0)
    try:
        return float(number) * scale if value.endswith("s") else math.nan
    except ValueError:
        return math.nan
