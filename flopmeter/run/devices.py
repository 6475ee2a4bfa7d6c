"""A script as it is on several devices: the rows of a comparison.

Each device has a process of its own, since a script leaves its modules behind, and may ask which GPU there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

from flopmeter.ask.compare import Comparison, DeviceResult, checked_devices, comparison_of, result_of
from flopmeter.ask.workers import results_of
from flopmeter.device.hardware import AnyHardware, Hardware, HardwareError
from flopmeter.run import started_launchers
from flopmeter.run.patches import applied
from flopmeter.run.ranks import first_failed, report_of, run_as_ranks
from flopmeter.run.script import Script
from flopmeter.run.session import Wishes


class _ScriptJob(NamedTuple):
    """What a process needs to know besides the device."""

    script: Script
    wishes: Wishes
    variables: Mapping[str, str]  # of the environment
    dollars_per_hour: Mapping[str, float]


def compare_devices(
    script: Script,
    hardware: Iterable[AnyHardware],
    wishes: Wishes,
    variables: Mapping[str, str],
    dollars_per_hour: Mapping[str, float],
    progress: Callable[[Sequence[Any]], Iterable[Any]],
) -> Comparison:
    """The steady step of a script on each device. What the script writes is shown for the first one.

    dollars_per_hour: of one GPU, by the name of the device; all ranks of the script are paid.

    A device on which the script fails, or whose data types do not do, is listed in `unable`. Raises HardwareError for
    an unknown device, NothingRanError where the script does not use the device, and ValueError where it kills its
    process.
    """
    devices = checked_devices(hardware)
    run = partial(_on_device, _ScriptJob(script, wishes, variables, dollars_per_hour))
    try:
        # Spawned, not forked: torch has threads by now.
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            found = results_of(run, list(enumerate(devices)), executor=pool, progress=progress)
    except BrokenProcessPool:
        raise ValueError(f"{script.name} ended its process at once (os._exit, or a crash)") from None
    return comparison_of(devices, found)


def _on_device(job: _ScriptJob, numbered: tuple[int, Hardware]) -> DeviceResult:
    (number, device), gpus = numbered, job.wishes.gpus
    with ExitStack() as undo:
        if number:
            nowhere = undo.enter_context(open(os.devnull, "w"))
            undo.enter_context(redirect_stdout(nowhere))
            undo.enter_context(redirect_stderr(nowhere))
        undo.enter_context(applied(started_launchers.patches()))
        runs = run_as_ranks(job.script, device, job.wishes, job.variables)
    if failed := first_failed(runs):
        error = failed.ending.error
        first_line = (str(error).splitlines() or [""])[0]
        return DeviceResult(
            None, why=f"on {device.name} {job.script.name} ends with {type(error).__name__}: {first_line}"
        )
    try:
        report = report_of(runs, job.script.name)
        dollars = job.dollars_per_hour.get(device.name)
        result = _of_all_ranks(result_of(report.step, dollars and dollars * gpus), gpus)
    except HardwareError as lacking:
        return DeviceResult(None, why=str(lacking))
    return result._replace(title=f"{report.headline}\n{result.title}")


def _of_all_ranks(result: DeviceResult, ranks: int) -> DeviceResult:
    """The energy costs what all ranks pay, as their hours do; watts and joules stay those of one."""
    row = result.row
    if row is None or row.energy_dollars is None:
        return result
    return result._replace(row=replace(row, energy_dollars=ranks * row.energy_dollars))
