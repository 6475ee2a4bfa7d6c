"""The file of a suite's run: one JSON document, written anew after each case, so that a crash loses none.

format        what this is, with a number that rises when older readers would misread it
started       UTC; `finished` is null while cases are missing
device        type, name, the profile of flopmeter's that has that name (or null), caches, limits, clocks
versions      of flopmeter, torch, CUDA, the driver, Python
method        how it was measured, in words
calibration   a profile of this very machine (`flopmeter calibrate`), or why there is none
cases         kind, inputs and clocks of each; then either `failed`, why, or what was measured
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flopmeter.device.hardware import Hardware, HardwareError, load_hardware
from flopmeter.device.schema import build
from flopmeter.measured.suite.cases import Case
from flopmeter.measured.suite.stopwatch import ProfiledKernel, Reading

FORMAT = "flopmeter measure 1"


class RunFileError(ValueError):
    """A file that `flopmeter measure` did not write, or that must not be overwritten."""


class CaseResult(NamedTuple):
    """A case as it was measured; times in seconds, of one call."""

    case: Case
    failed: str = ""  # why there is no reading
    reading: Reading | None = None
    copies: int = 1  # of the case with weights of their own, called in turn
    weight_bytes: int = 0  # of one copy
    profiled_seconds: float | None = None  # of the kernels of one call, by torch.profiler (a CPU: of its ops)
    kernels: tuple[ProfiledKernel, ...] = ()  # the longest of them
    not_profiled: str = ""  # why these two are missing
    peak_memory_bytes: int | None = None  # of a program, in torch's allocator


@dataclass
class SuiteRun:
    """What the file holds."""

    device: dict[str, Any]
    versions: dict[str, str]
    method: tuple[str, ...]
    started: str
    finished: str | None = None
    calibration: dict[str, Any] | str = "not made"  # a profile's fields, or why there is none
    results: list[CaseResult] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        return bool(self.device["type"] == "cpu")

    def hardware(self) -> Hardware:
        """The device that the run is predicted for: flopmeter's own profile if there is one, else the profile that was
        measured on the machine itself. Raises HardwareError if there is neither."""
        if self.device["hardware"]:
            return load_hardware(self.device["hardware"])
        return self.calibrated()

    def calibrated(self) -> Hardware:
        """The profile that was measured on the machine itself. Raises HardwareError where there is none."""
        if isinstance(self.calibration, str):
            raise HardwareError(
                f"no profile is known for {self.device['name']!r}, and none was measured ({self.calibration}): "
                "give one (--hardware NAME or FILE.yaml)"
            )
        return build(Hardware, self.calibration)

    def write(self, path: Path) -> None:
        """Writes the whole file or nothing: a reader never sees half of it."""
        head = {name: value for name, value in vars(self).items() if name != "results"}
        lines = ",\n".join("  " + json.dumps(_as_dict(result)) for result in self.results)
        text = json.dumps({"format": FORMAT, **head}, indent=1).removesuffix("\n}")
        beside = path.with_name(path.name + ".part")
        try:
            beside.write_text(f'{text},\n "cases": [\n{lines}\n ]\n}}\n', encoding="utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise RunFileError(f"{path} cannot be written ({error.strerror})") from None


def read_run(path: str | os.PathLike[str]) -> SuiteRun:
    """Raises RunFileError for a file that is not one of `flopmeter measure`'s."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise RunFileError(f"{path} has the format {values['format']!r}, this version reads {FORMAT!r}")
        results = [_from_dict(entry) for entry in values["cases"]]
        rest = {name: values[name] for name in ("device", "versions", "started", "finished", "calibration")}
        return SuiteRun(**rest, method=tuple(values["method"]), results=results)
    except OSError as error:
        raise RunFileError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"{path} is no file of `flopmeter measure` ({error!r}): write one with its -o") from None


def _as_dict(result: CaseResult) -> dict[str, Any]:
    head = {**result.case._asdict(), "inputs": dict(result.case.inputs)}
    if result.reading is None:
        return {**head, "failed": result.failed}
    rest = {name: value for name, value in result._asdict().items() if name not in ("case", "failed", "reading")}
    return {**head, **result.reading._asdict(), **rest, "kernels": [list(kernel) for kernel in result.kernels]}


def _from_dict(entry: Mapping[str, Any]) -> CaseResult:
    case = Case(*(entry[name] for name in Case._fields))
    if "failed" in entry:
        return CaseResult(case, failed=entry["failed"])
    rest = ("copies", "weight_bytes", "profiled_seconds", "not_profiled", "peak_memory_bytes")
    return CaseResult(
        case,
        reading=Reading(*(entry[name] for name in Reading._fields)),
        kernels=tuple(ProfiledKernel(*kernel) for kernel in entry["kernels"]),
        **{name: entry[name] for name in rest if name in entry},
    )
