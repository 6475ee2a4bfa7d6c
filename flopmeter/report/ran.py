"""What a report is about, so that it can stand alone: program, inputs, versions and date."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flopmeter.device.hardware import Hardware
from flopmeter.records import BEFORE, TensorSpec, Trace

MOST_INPUTS = 6  # how many a line of text names


class Ran(NamedTuple):
    """What ran, on what, by which versions, and when it was priced."""

    program: str  # the command, or the script and its arguments
    inputs: tuple[str, ...]  # type and shape of each tensor of data: it was there before, or the host sent it
    steps: int  # of an optimizer; 0: none ran
    hardware: str
    versions: Mapping[str, str]  # of flopmeter, torch and the device's profile (the hash of its figures)
    date: str  # UTC

    @property
    def line(self) -> str:
        alike = Counter(self.inputs)
        shown = [f"{text} ×{count}" if count > 1 else text for text, count in alike.items()][:MOST_INPUTS]
        if len(alike) > MOST_INPUTS:
            shown.append(f"{len(self.inputs) - sum(list(alike.values())[:MOST_INPUTS])} more")
        steps = f" · {self.steps} steps of an optimizer" if self.steps > 1 else ""
        versions = ", ".join(self._versions())
        return f"ran: {self.program} · inputs: {', '.join(shown) or 'none'}{steps} · {versions} · {self.date}"

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "inputs": list(self.inputs), "versions": dict(self.versions)}

    def flat(self) -> dict[str, Any]:
        """Each fact as one text, for the rows of a table."""
        return {**self._asdict(), "inputs": "; ".join(self.inputs), "versions": "; ".join(self._versions())}

    def _versions(self) -> list[str]:
        return [f"{name} {version}" for name, version in self.versions.items()]


NOT_SAID = Ran("not said", (), 0, "", {}, "")


def ran_of(trace: Trace, hardware: Hardware) -> Ran:
    own = sys.modules["flopmeter"].__version__  # which imports this file, so this file cannot import it
    profile = hashlib.sha256(repr(hardware).encode()).hexdigest()[:8]
    versions = {"flopmeter": own, "torch": torch.__version__, "profile": profile}
    return Ran(_started_as(), tuple(_inputs(trace)), _steps(trace), hardware.name, versions, _now())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _started_as() -> str:
    """The script and its arguments, as the process was started."""
    script, *arguments = sys.argv or [""]
    name = Path(script).name
    if name == "__main__.py":
        return shlex.join(["python", "-m", Path(script).parent.name, *arguments])
    return shlex.join([name, *arguments]) if name not in ("", "-c", "-") else "python"


def _inputs(trace: Trace) -> list[str]:
    """Tensors on the device without a role (weights, states), and those that the host sends to it. Leaves out what only
    the host reads, and scalars such as the factor of a GradScaler."""
    device, found = trace.device, dict[int, TensorSpec]()
    touched = {number for op in trace.ops for number in op.storages}  # of a part of a long trace: few
    data = {number for number in touched if trace.storages[number].role is None}
    before = {number for number in data if trace.storages[number].born == BEFORE}
    for op in trace.ops:
        call = op.call
        is_sent = call.inputs and call.inputs[0].device != device and all(each.device != device for each in call.inputs)
        if not is_sent and (not call.outputs or before.isdisjoint(op.storages)):
            continue  # nearly always
        if is_sent and all(trace.storages[op.storages[spec.storage]].is_of_numbers for spec in call.inputs):
            continue
        for spec in call.outputs if is_sent else call.inputs:
            number = op.storages[spec.storage]
            if number in (data if is_sent else before) and spec.shape and spec.device == device:
                found.setdefault(number, spec)
    return [f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}" for spec in found.values()]


def _steps(trace: Trace) -> int:
    """Steps of optimizers, each after a backward pass: further updates before the next one belong to the same step."""
    phases = [op.phase for op in trace.ops if op.phase in ("backward", "optimizer")]
    return sum(now == "optimizer" != before for before, now in zip(["", *phases], phases, strict=False))
