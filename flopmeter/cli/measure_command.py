"""`flopmeter measure`: the suite on this machine, and its figures beside the prediction."""

from __future__ import annotations

import argparse
from typing import get_args

import torch

from flopmeter.cli.command import Command
from flopmeter.device.hardware import load_hardware
from flopmeter.measured import CLOCKS, DeviceType
from flopmeter.measured.suite.beside import pairs, programs_table, table
from flopmeter.measured.suite.programs import PROGRAMS
from flopmeter.measured.suite.run_file import SuiteRun, read_run
from flopmeter.measured.suite.runner import measure


def _measure(options: argparse.Namespace) -> int:
    if options.show is not None:
        for name in ("output", "device", "quick", "cases", "clock", "resume"):
            if getattr(options, name):
                raise ValueError(f"--show measures nothing: leave --{name} out")
        _show(read_run(options.show), options.hardware)
        return 0
    if options.output is None:
        raise ValueError("give a file to write (-o runs/this-gpu.json), or one to look at (--show FILE)")
    if not options.output.endswith(".json"):
        raise ValueError(f"{options.output} must end in .json: that is what the file holds")
    if options.hardware is not None:
        load_hardware(options.hardware)  # an unknown device is an error before the measurement
    run = measure(
        options.output,
        options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        quick=options.quick,
        kinds=options.cases,
        clock=options.clock or "wall",
        resume=options.resume,
        progress=options.progress.over,
    )
    print(f"wrote {options.output}")
    _show(run, options.hardware)
    return 0


def _show(run: SuiteRun, hardware: str | None) -> None:
    device = run.hardware() if hardware is None else load_hardware(hardware)
    rows, others = pairs(run, device)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    print(f"measured on {run.device['name']}, {run.started}: {len(run.results)} cases ({versions})")
    print(f"predicted for {device.title} ({device.name})\n")
    print(table(rows))
    if any(row.result.case.kind in PROGRAMS for row in rows):
        print(f"\n{programs_table(rows)}")
    for other in others:
        print(f"{other.name}: {other.why}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE.json", help="written anew after each case")
    parser.add_argument("--device", choices=get_args(DeviceType), help="default: the GPU, where torch finds one")
    parser.add_argument("--quick", action="store_true", help="one case of four, in a tenth of the time")
    parser.add_argument(
        "--cases", metavar="KIND,KIND", type=lambda text: text.split(","), default=[], help="only these kinds"
    )
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS),
        help="cpu: the CPU time of one thread, by which other programs do not count (default: wall)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the file that is there")
    parser.add_argument("--show", metavar="FILE.json", help="measure nothing: show what a file holds")
    parser.add_argument(
        "--hardware", metavar="NAME", help="what to predict for (default: the device's profile, or the one measured)"
    )


COMMAND = Command(
    _measure,
    "Measure kernels and ten programs on this machine, beside the prediction",
    (
        "Example, ten minutes on a GPU:\n  flopmeter measure -o this-gpu.json\n"
        "  flopmeter measure --show this-gpu.json\n"
    ),
    _arguments,
)
