"""What devices cost an hour. No price ships with flopmeter: they change weekly, so the user states them.

date: 2026-11-21          # or any text; printed with the costs
dollars_per_hour:
  h100-sxm5-80gb: 2.50
  a100-sxm4-80gb: 1.20
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flopmeter.device.hardware import HardwareError, load_hardware
from flopmeter.device.schema import MAX_BYTES, expected, read_mapping


class PriceList(NamedTuple):
    """Dollars per hour by device, and where they come from."""

    dollars_per_hour: Mapping[str, float]
    source: str  # for the line below the table; '' without prices


def load_prices(entries: Iterable[str], devices: Iterable[str]) -> PriceList:
    """Prices of the devices, from entries such as 'h100-sxm5-80gb=2.5', 't4=0.35,l4=0.7' and paths of YAML files, which
    may list others too; what is stated goes before what a file says.

    Raises HardwareError for an unknown device, an amount that is none, or a file that is no list of prices, and
    ValueError for an entry of a device that is not asked about, or has one already.
    """
    asked = {device.name: device for device in map(load_hardware, devices)}

    def own_name(name: str) -> str:
        """A file's name without its path serves too, as tables have it."""
        return name if name in asked else load_hardware(name).name

    stated: dict[str, float] = {}
    listed: dict[str, float] = {}
    sources = []
    for entry in (part for given in entries for part in given.split(",")):
        name, equals, amount = entry.rpartition("=")
        if equals:
            if (own := own_name(name)) not in asked:
                raise ValueError(f"--price {entry}: --hardware is {','.join(asked)}; name {name} there or leave it out")
            if own in stated:
                raise ValueError(f"--price {entry}: {name} has a price already; give it once")
            stated[own] = _amount(name, amount)
            sources.append(f"{name} ${amount}/h as given")
        else:
            of_file, date = _from_file(entry)
            listed |= of_file
            sources.append(f"{entry} ({date})")
    dollars = {name: amount for name, amount in {**listed, **stated}.items() if name in asked}
    return PriceList(dollars, f"prices: {', '.join(sources)}" if sources else "")


def _from_file(path: str) -> tuple[dict[str, float], str]:
    try:
        with Path(path).open("rb") as opened:
            content = read_mapping(opened.read(MAX_BYTES + 1))
        unknown = content.keys() - {"date", "dollars_per_hour"}
        listed = content.get("dollars_per_hour")
        if unknown or "date" not in content or not isinstance(listed, dict) or not listed:
            raise HardwareError("expected `date` and, under `dollars_per_hour`, a line `name: amount` for each device")
        return {load_hardware(name).name: _amount(name, amount) for name, amount in listed.items()}, content["date"]
    except OSError as error:
        raise HardwareError(f"{path} is neither name=dollars_per_hour nor a file ({error.strerror})") from None
    except HardwareError as error:
        raise HardwareError(error.message, field=error.field, file=path) from None


def _amount(name: str, value: Any) -> float:
    try:
        amount = float(value)
    except (TypeError, ValueError):
        amount = math.nan
    if not (math.isfinite(amount) and amount >= 0):
        raise expected(f"dollars per hour for {name}", value)
    return amount
