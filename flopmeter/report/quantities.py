"""How a quantity is written: with an SI prefix (`1.50 ms`), as a share, as a figure of a table's column."""

from __future__ import annotations

from collections.abc import Iterable

UNKNOWN = "–"  # stands for a figure that is not known
HOW_ATTENTION_COUNTS = {"full": "in full", "exact": "where visible"}  # under a mask, by FlopMeter's `causal`

_PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E", 7: "Z", 8: "Y"}


def with_prefix(value: float, unit: str) -> str:
    """`with_prefix(2e12, "B/s")` is '2.00 TB/s'."""
    power = _power(value)
    digits = str(value) if isinstance(value, int) and power == 0 else _three_digits(value / 1000.0**power)
    return f"{digits} {_PREFIXES[power]}{unit}"


def duration(seconds: float) -> str:
    """Three digits in s, ms or µs, no zeros at the end: `1.2 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:  # a figure that would round to a thousand takes the next unit
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def tick(value: float) -> str:
    """A round value of an axis, in few characters: `10 k`, `0.1`."""
    power = max(0, _power(value))
    return f"{value / 1000.0**power:g} {_PREFIXES[power]}".rstrip()


def scale(values: Iterable[float], unit: str) -> tuple[float, str]:
    """What to divide a column by, so that its largest value reads well, and the unit that it then has."""
    power = _power(max(values, default=0.0))
    return 1000.0**power, f"{_PREFIXES[power]}{unit}"


def decimal(value: float, digits: int = 2) -> str:
    """A figure with `digits` digits after the point; less than the last digit where it would round to zero."""
    least = 10.0**-digits
    if value == 0:
        return "0"
    if 0 < value < least:
        return f"<{least:g}"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"


def figure(value: float | None, digits: int = 3, missing: str = UNKNOWN) -> str:
    """A figure with that many significant digits, but never fewer than it has before the point."""
    if value is None:
        return missing
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else text


def in_ms(seconds: float) -> str:
    return figure(seconds * 1e3)


def in_gb(nbytes: float | None) -> str:
    return figure(nbytes and nbytes / 1e9)


def counted(number: int, one: str, many: str = "") -> str:
    """`counted(1, "read")` is '1 read', of two it is '2 reads'."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}"


def percent_of(part: float, whole: float) -> float:
    """The share in percent; 0 where the whole is nothing."""
    return 100 * part / whole if whole else 0.0


def _power(value: float) -> int:
    """The power of 1000 that makes the value read as 1 to 999."""
    power = 0
    while value >= 1000.0 ** (power + 1) and power < max(_PREFIXES):
        power += 1
    while 0 < value < 1000.0**power and power > min(_PREFIXES):
        power -= 1
    return power


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".removesuffix(".") if value else "0"
