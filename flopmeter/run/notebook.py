"""`flopmeter.cuda`: the device named cuda for a piece of code, in a notebook or a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from flopmeter.ask.checks import check_whole
from flopmeter.device.hardware import Hardware
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.run.named_types import CudaDevice
from flopmeter.run.report import RunReport
from flopmeter.run.session import ScriptSession, Wishes
from flopmeter.run.steps import StepsDone


class CudaRun(CudaDevice):
    """What `flopmeter.cuda` gives: it stands where a device is asked for, and has the report."""

    def __init__(self, session: ScriptSession) -> None:
        super().__init__(torch.device("cuda", session.named.index))
        self._session = session

    def report(self, mode: Mode | None = None) -> RunReport:
        """Setup, first step and steady step so far; `mode` prices them as another way to run.

        Raises NothingRanError if no op ran on the device.
        """
        return self._session.report("program", mode)


@contextmanager
def cuda(
    hardware: str | os.PathLike[str] | Hardware = DEFAULT_HARDWARE,
    *,
    gpus: int = 1,
    steps: int | None = None,
    wishes: Wishes | None = None,
) -> Iterator[CudaRun]:
    """In this context there is a device named cuda, as the profile describes it: `model.cuda()`, `device="cuda"`,
    `torch.cuda.*`.

    hardware: a name of `available_hardware()`, a path to a YAML profile, or a Hardware.
    gpus: ranks in the world, of which this process is rank 0.
    steps: leave the context after that many optimizer steps; None: run to the end.
    wishes: the other options of `flopmeter run`.

    Raises HardwareError for an unknown device, and ValueError for one that is a CPU.
    """
    check_whole(gpus=gpus, steps=steps)
    session = ScriptSession(hardware, replace(wishes or Wishes(), gpus=gpus, steps=steps))
    with session.open():
        try:
            yield CudaRun(session)
        except StepsDone:
            return
