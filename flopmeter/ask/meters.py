"""One program on several devices: it runs once for all of them on which PyTorch runs the same ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from flopmeter.device.hardware import Hardware
from flopmeter.launch.modes import Mode
from flopmeter.meter import FlopMeter, StreamError
from flopmeter.report.report import Report


class Meters:
    """The meters of a program, one for each stream of ops. `options`: of FlopMeter."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self._meters: list[FlopMeter] = []

    def known(self, device: Hardware, mode: Mode | None = None) -> Report | None:
        """The report of a device from the meter of one that runs the same ops; None if there is none."""
        for meter in self._meters:
            with contextlib.suppress(StreamError):
                return meter.report(hardware=device, mode=mode)
        return None

    def metered(self, run: Callable[[], object], device: Hardware, mode: Mode | None = None) -> Report:
        """The report of a device from a new meter."""
        meter = FlopMeter(device, **self.options)
        with meter:
            run()
        self._meters.append(meter)
        return meter.report(mode=mode)
