"""The subcommand that runs a script as it is: `flopmeter run train.py --batch_size 64`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, get_args

from flopmeter.cli.command import (
    Command,
    add_by,
    add_energy_price,
    add_format,
    add_trace,
    check_by,
    device_list,
    number,
    picked,
    save_trace,
    share,
    show,
)
from flopmeter.cli.prices import load_prices
from flopmeter.cli.progress import Progress
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.report.drawers import FORMATS
from flopmeter.report.tables import FORMATS as TABLE_FORMATS
from flopmeter.run import started_launchers
from flopmeter.run.devices import compare_devices
from flopmeter.run.diagnosis import what_to_do
from flopmeter.run.launchers import CommandLine, launch_of
from flopmeter.run.patches import applied
from flopmeter.run.ranks import RanAsRank, first_failed, report_of, run_as_ranks
from flopmeter.run.report import NothingRanError, RunReport
from flopmeter.run.script import Ending, Script
from flopmeter.run.session import Wishes
from flopmeter.run.shims import SHIMS

DEFAULT_STEPS = 3
_LONGEST_COMMAND_TOLD = 300  # characters; programs pass whole configs as words
ONE = "where to win on one of them: name it alone in --hardware"
HELP = {"-h", "--help"}
EPILOG = """\
The script's output is its own; the report goes to stderr, or to the file of -o. It is of one steady step, which ends
where an optimizer has stepped; the run stops after --steps of them. Options of flopmeter come before the script:

  flopmeter run --hardware h100-sxm5-80gb train.py --batch_size 64
  flopmeter run --hardware h100-sxm5-80gb,l40s --price l40s=0.9 train.py
  flopmeter run --gpus 8 -- torchrun --nproc-per-node 8 train.py
  flopmeter run --steps 3 -m package.train --config small.yaml
"""


def _run(options: argparse.Namespace) -> int:
    launch = _launch(options)
    script = launch.script
    if not script.target:
        raise ValueError("name a script: flopmeter run train.py")
    if not script.is_module and Path(script.target).is_dir() and not Path(script.target, "__main__.py").is_file():
        raise ValueError(f"{script.target} is a folder without __main__.py: name a script")
    script.check()
    devices = device_list(options.hardware)
    wishes = Wishes(
        gpus=launch.world_size or options.gpus or 1,
        gpus_per_node=launch.gpus_per_node,
        marker=options.step_marker,
        on_out_of_memory=options.oom or ("raise" if len(devices) == 1 else "report"),
        shims=tuple(options.shim),
        **picked(options, "steps", "strict_values", "mask_fraction", "mode", "synthetic", "without_weights"),
        **picked(options, "dollars_per_kwh"),
    )
    if len(devices) > 1:
        return _compare(script, devices, wishes, launch.environment, options)
    check_by(options.by, options.format)
    if options.price:
        raise ValueError("--price is for comparing devices: name several, as in --hardware h100-sxm5-80gb,l40s")
    with applied(started_launchers.patches()):
        runs = run_as_ranks(script, options.hardware, wishes, launch.environment)
    failed = first_failed(runs)
    if failed is not None and isinstance(failed.ending.error, started_launchers.StartsLauncher):
        _instead(failed.ending.error, script, options)
    ending = (failed or runs[0]).ending
    with Progress("pricing the step"):
        report = _report(runs, script, ending)
    sys.stdout.flush()
    if failed is not None:
        session = failed.session
        told = what_to_do(script, ending, session.lines_that_guess(), session.absent_weights())
        print(f"flopmeter: {told}", file=sys.stderr)
    if report is not None:
        _print(report.render(options.format, options.by or "class"), options)
        save_trace(report.step, options.trace_to)
    return ending.code


def _instead(start: started_launchers.StartsLauncher, script: Script, options: argparse.Namespace) -> NoReturn:
    """Becomes a `flopmeter run` of what the script starts, with the same options."""
    given = shlex.split(options.command)[1:]
    own = given[: len(given) - len(options.script)]
    if options.module:
        own.remove("-m")
    words = [*own, "--", *start.words]
    told = textwrap.shorten(shlex.join(words), _LONGEST_COMMAND_TOLD, placeholder=" ...")
    print(
        f"flopmeter: {script.name} starts a launcher, which is metered in its place: flopmeter {told}", file=sys.stderr
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(start.folder or os.curdir)
    os.execve(sys.executable, [sys.executable, "-m", "flopmeter", *words], start.environment)


def _compare(
    script: Script, devices: list[str], wishes: Wishes, variables: Mapping[str, str], options: argparse.Namespace
) -> int:
    if options.format not in TABLE_FORMATS:
        raise ValueError(f"a comparison of devices has no {options.format}; it has {', '.join(TABLE_FORMATS)}")
    if options.trace_to or options.by:
        raise ValueError("--trace and --by are of one device: name it alone in --hardware")
    prices = load_prices(options.price, devices)
    with Progress("running the script") as telling:
        found = compare_devices(script, devices, wishes, variables, prices.dollars_per_hour, telling.over)
    sys.stdout.flush()
    _print(found.with_note(prices.source).with_note(ONE).render(options.format), options)
    return 0 if found.rows else 1


def _launch(options: argparse.Namespace) -> CommandLine:
    is_plain = options.script[:1] == ["--"]
    words = options.script[1:] if is_plain else options.script
    if not is_plain and any(word.partition("=")[0] == "--hardware" for word in words[1:]):
        raise ValueError(
            f"--hardware stands after {words[0]}, so the script would get it: put it before the script's name "
            "(or -- before it, if it is an option of the script)"
        )
    launch = launch_of(["-m", *words] if options.module else words, options.gpus or 1)
    if options.gpus and launch.world_size not in (None, options.gpus):
        raise ValueError(
            f"--gpus {options.gpus}, but the launcher starts {launch.world_size} processes: leave --gpus out"
        )
    return launch


def _report(runs: Mapping[int, RanAsRank], script: Script, ending: Ending) -> RunReport | None:
    """The report of what ran until the last step, the end or Ctrl-C; None if the script failed."""
    if ending.has_failed:
        return None
    try:
        return report_of(runs, script.name)
    except NothingRanError:
        if HELP.isdisjoint(script.arguments):
            raise
        return None  # the script has told its own options


def _print(text: str, options: argparse.Namespace) -> None:
    if options.output is None:
        print(text.rstrip("\n"), file=sys.stderr)
    else:
        show(text, options)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", metavar="NAME[,NAME...]", default=DEFAULT_HARDWARE,
        help="a name of `flopmeter hardware`, or a YAML file (default: %(default)s); several are compared",
    )  # fmt: skip
    parser.add_argument(
        "--price", metavar="NAME=DOLLARS|FILE", action="append", default=[],
        help="dollars per hour of a device that is compared, or a YAML file of them (see flopmeter compare)",
    )  # fmt: skip
    add_energy_price(parser)
    parser.add_argument(
        "--steps", type=number, default=DEFAULT_STEPS,
        help="stop after so many (default: %(default)s); one that only infers after 32 calls and 10 s",
    )  # fmt: skip
    parser.add_argument(
        "--step-marker", metavar="WHAT", default="auto",
        help="what ends a step: optimizer, forward (a call of the outermost module), nvtx:NAME, or module:function"
        " (default: an optimizer's step, else forward)",
    )  # fmt: skip
    parser.add_argument("--gpus", type=number, help="ranks in the world (default: 1, or what the launcher says)")
    parser.add_argument("--mode", choices=get_args(Mode), help="price the step so (default: as the script runs it)")
    parser.add_argument(
        "--oom", choices=("raise", "report"),
        help="where the device's memory does not do: torch.OutOfMemoryError, as there, or go on (default: raise; where"
        " devices are compared, report)",
    )  # fmt: skip
    parser.add_argument(
        "--strict-values", action="store_true", help="a value that is read and not known is an error, not a stand-in"
    )
    parser.add_argument(
        "--mask-fraction", type=share, metavar="SHARE", help="of an unknown mask that selects elements, this is true"
    )
    parser.add_argument(
        "--shim", choices=tuple(SHIMS), action="append", default=[], help="stand in for a package of CUDA kernels"
    )
    parser.add_argument(
        "--synthetic", metavar="SAMPLE",
        help="stand in for data that is not there: a sample such as 3x224x224,:1000 (floats, and an integer below"
        " 1000), input_ids=1024:50257 (named), text=100:text (words) or image=512x768:image; or first: one sample"
        " stands for all",
    )  # fmt: skip
    parser.add_argument(
        "--without-weights", action="store_true",
        help="a file of weights that torch.load does not find leaves its model as it was made",
    )  # fmt: skip
    add_format(parser, FORMATS, instead_of="stderr")
    add_trace(parser)
    add_by(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="what to run, as it is")


COMMAND = Command(
    _run, "A script as it is, on a device named cuda: the cost of one steady step", EPILOG, _arguments, False
)
