"""The subcommands that read or write files of their own: diff, check, calibrate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from flopmeter.cli.command import Command, add_clocks, add_format, number, percentage, show, writing
from flopmeter.cli.difference import difference, read_report
from flopmeter.measured import DeviceType, as_yaml, calibrate, check
from flopmeter.report.tables import FORMATS


def _diff(options: argparse.Namespace) -> int:
    result = difference(read_report(options.before), read_report(options.after))
    show(result.render(options.format), options)
    grown = [] if options.fail_above is None else result.grown(beyond=options.fail_above)
    for change in grown:
        print(
            f"flopmeter: {change.name} grew by {change.growth:.1%}, more than {options.fail_above:.1%}", file=sys.stderr
        )
    return 1 if grown else 0


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE.json", help="written by `flopmeter table --format json`")
    parser.add_argument("after", metavar="AFTER.json")
    parser.add_argument(
        "--fail-above", metavar="PERCENT%", type=percentage, help="exit with 1 where a total grew by more"
    )
    add_format(parser, FORMATS)


def _check(options: argparse.Namespace) -> int:
    show(check(options.trace, options.hardware, clocks=options.clocks).render(options.format), options)
    return 0


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE.json")
    parser.add_argument(
        "--hardware", metavar="NAME", help="a name or a YAML file (default: the GPU that the trace names)"
    )
    add_clocks(parser, default=None, otherwise="those that the measured matmuls come nearer to")
    add_format(parser, FORMATS)


def _calibrate(options: argparse.Namespace) -> int:
    path: str | None = options.output
    if path is not None and not path.endswith((".yaml", ".yml")):
        raise ValueError(f"{path} must end in .yaml: profiles are found by that")
    profile = as_yaml(calibrate(options.device, budget_seconds=options.seconds, progress=options.progress.over))
    options.progress.stop()
    if path is None:
        print(profile, end="")
        return 0
    with writing(path):
        Path(path).write_text(profile, encoding="utf-8")
    print(f"wrote {path}: use it as --hardware {path}")
    return 0


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE.yaml", help="where to write it (default: print it)")
    parser.add_argument("--device", choices=get_args(DeviceType), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--seconds", metavar="N", type=number, default=20, help="time to spend, about (default: %(default)s)"
    )


COMMANDS = {
    "diff": Command(
        _diff,
        "What a change made cheaper or dearer",
        (
            "Example, as a gate in CI:\n  flopmeter table model.py:build --format json > now.json\n"
            "  flopmeter diff before.json now.json --fail-above 5%\n"
        ),
        _diff_arguments,
    ),
    "check": Command(
        _check,
        "A profile of torch.profiler, measured beside predicted",
        (
            "Example: flopmeter check trace.json --hardware this-cpu.yaml\n\n"
            "The trace comes from torch.profiler.profile(record_shapes=True) and its export_chrome_trace();\n"
            "it may be gzipped.\n"
        ),
        _check_arguments,
    ),
    "calibrate": Command(
        _calibrate,
        "Measure this machine and write its profile",
        "Example: flopmeter calibrate -o this-cpu.yaml\n\nOMP_NUM_THREADS says how many cores it measures.\n",
        _calibrate_arguments,
    ),
}
