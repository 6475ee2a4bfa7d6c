"""One program on many devices: time, regime, memory and price of each, and what would change the verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from flopmeter.as_cuda import CudaTarget
from flopmeter.ask import steps
from flopmeter.ask.checks import check_callable, check_mapping, is_number, is_positive
from flopmeter.ask.meters import Meters
from flopmeter.ask.steps import Step, million, step_figures
from flopmeter.ask.what_if import MOST_TIMES, RESOURCES, WhatIf, what_if
from flopmeter.ask.workers import results_of
from flopmeter.device.hardware import AnyHardware, Hardware, HardwareError, Host, load_hardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import Mode
from flopmeter.records import Regime
from flopmeter.report.quantities import in_ms, percent
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

Sort = Literal["seconds", "cost"]
SECONDS_PER_HOUR = 3600
NOTEWORTHY = 0.02  # of the time: the least difference between two what-ifs that is mentioned


def step_dollars(dollars_per_gpu_hour: float | None, gpus: int, seconds: float) -> float | None:
    """What a step on `gpus` GPUs costs; None without a price."""
    return None if dollars_per_gpu_hour is None else dollars_per_gpu_hour * gpus * seconds / SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow(Step):
    """The program on one device."""

    KEYS = (
        "hardware", "seconds", "seconds_low", "seconds_high", "items_per_s", "mfu", "regime", "busy_share",
        "idle_share", "peak_memory_bytes", "usable_memory_bytes", "fits", "dollars_per_hour", "dollars_per_step",
        "dollars_per_million_items", "watts", "joules", "joules_per_item", "energy_dollars",
    )  # fmt: skip

    hardware: str
    seconds_low: float
    seconds_high: float
    items_per_s: float | None  # None where the caller did not say how many items a step has
    busy_share: float  # of `seconds`, the device computing
    idle_share: float  # of `seconds`, the device waiting for the host
    dollars_per_hour: float | None
    what_if: WhatIf

    @property
    def dollars_per_step(self) -> float | None:
        return step_dollars(self.dollars_per_hour, 1, self.seconds)

    @property
    def dollars_per_million_items(self) -> float | None:
        if self.dollars_per_hour is None or self.items_per_s is None:
            return None
        return 1e6 * self.dollars_per_hour / SECONDS_PER_HOUR / self.items_per_s

    @property
    def joules_per_item(self) -> float | None:
        if self.joules is None or self.items_per_s is None:
            return None
        return self.joules / (self.items_per_s * self.seconds)

    def as_dict(self) -> dict[str, Any]:
        boundary = self.what_if.boundary
        return {
            **Step.as_dict(self),
            "speedup_twice_flop_per_s": self.what_if.speedup["compute"],
            "speedup_twice_bandwidth": self.what_if.speedup["memory"],
            "speedup_half_host_time": self.what_if.speedup["overhead"],
            "next_regime": boundary and boundary.regime,
            "next_regime_times": boundary and boundary.times,
        }


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Rows in the order asked for, and why some devices have none."""

    title: str
    rows: tuple[DeviceRow, ...]
    unable: Mapping[str, str]  # device -> why it cannot run the program
    unit: str  # of items: 'tokens', 'images', ...
    notes: tuple[str, ...]

    def _document(self) -> Document:
        records = [row.as_dict() for row in self.rows]
        return Document(
            kind="comparison",
            title=self.title,
            tables=[self._results(), _what_would_help(self.rows)] if self.rows else [],
            notes=[*(f"left out: {why}" for why in self.unable.values()), *self.notes],
            data={"unit": self.unit, "rows": records, "unable": dict(self.unable)},
            records=records,
        )

    def _results(self) -> Table:
        """The table; columns without any figure (throughput, prices that nobody gave) are left out."""
        columns: list[ColumnOf[DeviceRow]] = [
            ColumnOf("device", lambda row: row.hardware, str, "<"),
            steps.TIME,
            ColumnOf("low to high", lambda row: f"{in_ms(row.seconds_low)} to {in_ms(row.seconds_high)}", str),
            ColumnOf(f"{self.unit}/s", lambda row: row.items_per_s),
            steps.MFU,
            steps.BOUND_BY,
            ColumnOf("busy %", lambda row: row.busy_share, percent),
            ColumnOf("idle %", lambda row: row.idle_share, percent),
            steps.PEAK,
            steps.USABLE,
            steps.FITS,
            steps.WATTS,
            steps.JOULES,
            steps.ENERGY_PRICE,
            ColumnOf("$/hour", lambda row: row.dollars_per_hour),
            ColumnOf("$/M steps", lambda row: million(row.dollars_per_step)),
            ColumnOf(f"$/M {self.unit}", lambda row: row.dollars_per_million_items),
        ]
        return table_of(columns, self.rows, hides_unknown=True)


def compare(
    fn: Callable[[], object],
    hardware: Iterable[AnyHardware],
    mode: Mode = "eager",
    *,
    items: float | None = None,
    unit: str = "items",
    prices: Mapping[str, float] | None = None,
    sort: Sort = "seconds",
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **meter_options: Any,
) -> Comparison:
    """What running `fn` costs on each device.

    fn: runs the program once, on meta tensors. It is called again for a device on which PyTorch would run other ops,
        so it must be repeatable.
    hardware: names, paths of YAML profiles or Hardware records.
    items: how many items (tokens, images) one run works on, for throughput and price; `unit` names them.
    prices: dollars per hour, by the name of the device. Devices without a price have no cost.
    sort: 'seconds', or 'cost' (per step; devices without a price come last).
    workers, executor: processes that run devices side by side, or any concurrent.futures.Executor (see ask/workers.py).
    progress: wraps the list of devices, as `tqdm` does.
    meter_options: of FlopMeter.

    A device that lacks a data type of the program is listed in `unable`. Raises HardwareError for an unknown device
    and ValueError or TypeError for options that make no sense or a program that runs nothing on the device.
    """
    _check_options(fn, mode, items, unit, sort)
    devices = checked_devices(hardware)
    dollars = checked_prices(prices or {}, devices)
    if sort == "cost" and not dollars:
        raise ValueError("to sort by cost, give prices: dollars per hour of each device")
    run = partial(_result, fn, Meters(meter_options), mode, items, dollars)
    found = results_of(run, devices, workers, executor, progress)
    comparison = comparison_of(devices, found, sort, unit)
    if not comparison.rows or items is None:
        return comparison
    return replace(comparison, title=f"{comparison.title} · {items:,.10g} {unit} a step")


class DeviceResult(NamedTuple):
    """The result of one device: a row, or why there is none."""

    row: DeviceRow | None
    title: str = ""
    notes: tuple[str, ...] = ()
    why: str = ""


def comparison_of(
    devices: Iterable[Hardware], found: Sequence[DeviceResult], sort: Sort = "seconds", unit: str = "items"
) -> Comparison:
    """The comparison of these results, in this order."""
    unable = {device.name: each.why for device, each in zip(devices, found, strict=True) if each.row is None}
    rows = [each.row for each in found if each.row is not None]
    title = next((each.title for each in found if each.row is not None), "no device of the list can run this program")
    rows.sort(key=(lambda row: row.seconds) if sort == "seconds" else _by_cost)
    notes = dict.fromkeys(note for each in found for note in each.notes)
    return Comparison(title, tuple(rows), unable, unit, tuple(notes))


def _check_options(fn: Callable[[], object], mode: Mode, items: float | None, unit: str, sort: Sort) -> None:
    """Raises ValueError or TypeError for what makes no sense, before anything runs."""
    if sort not in get_args(Sort):
        raise ValueError(f"unknown order {sort!r}; known: {', '.join(get_args(Sort))}")
    mode_called(mode)
    if items is not None and not is_positive(items):
        raise ValueError(f"items must be a positive number of {unit} in a step, not {items!r}")
    check_callable("compare runs a function without arguments for each device", fn)


def _result(
    fn: Callable[[], object],
    meters: Meters,
    mode: Mode,
    items: float | None,
    dollars_per_hour: Mapping[str, float],
    device: Hardware,
) -> DeviceResult:
    """The result of one device."""
    try:
        report = meters.known(device, mode) or meters.metered(fn, device, mode)
    except HardwareError as error:
        return DeviceResult(None, why=str(error))
    if not report.kernels:
        raise ValueError("the program ran no op on meta tensors: there is nothing to compare")
    result = result_of(report, dollars_per_hour.get(device.name), items, meters.options.get("host"))
    if meters.options.get("as_cuda", True):
        result = result._replace(notes=(*result.notes, *CudaTarget.of(device).notes))
    return result


def result_of(
    report: Report, dollars_per_hour: float | None, items: float | None = None, host: Host | None = None
) -> DeviceResult:
    """The row of a report that was priced with `host`."""
    row = DeviceRow(
        hardware=report.hardware.name,
        seconds_low=report.seconds_low,
        seconds_high=report.seconds_high,
        items_per_s=None if items is None else items / report.seconds,
        busy_share=report.kernel_seconds / report.seconds,
        idle_share=report.idle_seconds / report.seconds,
        dollars_per_hour=dollars_per_hour,
        what_if=what_if(report, host),
        **step_figures(report),
    )
    return DeviceResult(row, report.headline.replace(f" · {report.hardware.title}", ""), tuple(_notes(report)))


def checked_devices(hardware: Iterable[AnyHardware], error: type[ValueError] = ValueError) -> list[Hardware]:
    """The devices' profiles. Raises the error if there are none, or one twice."""
    if isinstance(hardware, str | os.PathLike | Hardware | Mapping) or not isinstance(hardware, Iterable):
        raise TypeError(f"hardware must be a list of devices, such as [{hardware!r}]")
    devices = [load_hardware(name) for name in hardware]
    if not devices:
        raise error("hardware must be at least one device: see available_hardware()")
    names = [device.name for device in devices]
    if twice := [name for name in names if names.count(name) > 1]:
        raise error(f"hardware has {twice[0]} twice: name each device once")
    return devices


def checked_prices(prices: Mapping[str, float], devices: Iterable[Hardware]) -> dict[str, float]:
    """The prices by the profile's own name, whatever alias the caller used."""
    check_mapping("{'l4': 0.8}", prices=prices)
    own_names = {device.name for device in devices}
    checked = {}
    for name, dollars in prices.items():
        if not (is_number(dollars) and dollars >= 0):
            raise ValueError(f"the price of {name} must be dollars per hour, not {dollars!r}")
        own = name if name in own_names else load_hardware(name).name
        if own not in own_names:
            raise ValueError(f"a price of {name}, which is not among the devices {', '.join(sorted(own_names))}")
        checked[own] = float(dollars)
    return checked


def _by_cost(row: DeviceRow) -> tuple[bool, float]:
    cost = row.dollars_per_step
    return cost is None, row.seconds if cost is None else cost


def _notes(report: Report) -> Iterator[str]:
    yield from report.notes
    if report.uncounted:
        yield f"uncounted: {', '.join(f'{row.name} ({row.calls})' for row in report.uncounted)}"
    if report.assumptions:
        yield f"assumed: {'; '.join(report.assumptions)}"


_CHANGES: dict[Regime, str] = {
    "compute": "2x FLOP/s", "memory": "2x bandwidth", "communication": "2x link speed", "overhead": "half host time",
}  # fmt: skip


def _what_would_help(rows: Sequence[DeviceRow]) -> Table:
    columns = [
        ColumnOf[DeviceRow]("what would help", lambda row: row.hardware, str, "<"),
        *(_speed_up(regime) for regime in _CHANGES if any(regime in row.what_if.speedup for row in rows)),
        ColumnOf("the verdict", _verdict, str, "<"),
    ]
    return table_of(columns, rows)


def _speed_up(regime: Regime) -> ColumnOf[DeviceRow]:
    return ColumnOf(_CHANGES[regime], lambda row: row.what_if.speedup[regime], "{:.2f}x".format)


def _verdict(row: DeviceRow) -> str:
    """What takes the largest share of the time; what would help most, if that is something else (the host may set the
    pace even of a device that is nearly always busy); and at which point something else would bound the run."""
    resource, speedup, boundary = RESOURCES[row.regime], row.what_if.speedup, row.what_if.boundary
    best = max(speedup, key=speedup.__getitem__)
    verdict = f"{row.regime}-bound"
    if speedup[best] > speedup[row.regime] + NOTEWORTHY:
        verdict += f", yet {RESOURCES[best]} would help most"
    if boundary is None:
        reason = ", by latency, caches and addresses" if row.regime == "memory" else ""
        return f"{verdict}; still at {MOST_TIMES:.0f}x the {resource}{reason}"
    if boundary.times < 1 + NOTEWORTHY:
        return f"{verdict}, and as much {boundary.regime}-bound"
    return f"{verdict}; {boundary.regime}-bound from {boundary.times:.2g}x the {resource}"
