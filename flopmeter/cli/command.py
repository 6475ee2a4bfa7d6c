"""What a subcommand is, the parser of them all, and the arguments and the output that several share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from flopmeter import __version__
from flopmeter.cli.progress import Progress
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.records import Clocks
from flopmeter.report.drawers import FORMATS
from flopmeter.report.report import Report
from flopmeter.report.rows import GROUPINGS


class Command(NamedTuple):
    """A subcommand. It runs to an exit code: 0, or 1 where the answer is no."""

    run: Callable[[argparse.Namespace], int]
    what: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    tells_time: bool = True  # show the time so far, on a terminal; not if a script writes the output


BEGIN = """\
Begin with one of
  flopmeter run --hardware h100-sxm5-80gb train.py                          a script that you have, as it is
  flopmeter table gpt2-124m --train --batch 8 -o report.html                a model by its name: one page
  flopmeter compare gpt2-124m --train --hardware l4,a100-sxm4-80gb          the same on several devices

`flopmeter COMMAND --help` has the options of a command and an example.
Exit codes: 0; 1 where the answer is no (diff --fail-above, fit, serve, plan); 2 for an error.
"""


class _Once(argparse.Action):
    """Stores a value, and refuses a second one, since one of the two would be ignored."""

    def __call__(self, parser: Any, options: Any, values: Any, option_string: str | None = None) -> None:
        given = vars(options).setdefault("given", set())
        if option_string and self.dest in given:
            parser.error(f"{option_string} is given twice: give it once")
        given.add(self.dest)
        setattr(options, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like every error of the command."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{**options, "allow_abbrev": False})
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"flopmeter: {' '.join(message.split())} (see {self.prog} --help)\n")


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flopmeter",
        description="What a PyTorch program will cost on a GPU, and why, metered without one.",
        epilog=BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flopmeter {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in commands.items():
        own = added.add_parser(
            name,
            help=command.what,
            description=f"{command.what}.",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--traceback", action="store_true", help="show where an error came from")
        own.set_defaults(run=command.run, parser=own, progress=Progress(name), tells_time=command.tells_time)
        command.add_arguments(own)
    return parser


def parsed(commands: Mapping[str, Command], given: Sequence[str]) -> argparse.Namespace:
    """The options of a command line. Wrong ones are one line on stderr and SystemExit(2), before anything runs."""
    parser = parser_of(commands)
    first = given[0] if given else "--help"
    if first.endswith(".py"):
        parser.error(f"{first} is a script: flopmeter run {first}")
    if not first.startswith("-") and first not in commands:
        near = difflib.get_close_matches(first, commands, n=2) or list(commands)
        parser.error(f"no command is named {first!r}; near to it: {', '.join(near)}")
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        parser.error(f"unrecognized arguments: {first}; the command comes first, as in flopmeter table gpt2-124m")
    options, unknown = parser.parse_known_args(given or ["--help"])
    if unknown:
        own: argparse.ArgumentParser = options.parser
        known = [name for action in own._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.7)
        said = f"; did you mean {near[0]}?" if near else ""
        own.error(f"unrecognized arguments: {' '.join(unknown)}{said}")
    return options


def check_files(options: argparse.Namespace) -> None:
    """Raises ValueError, before any work, for a file that cannot be written."""
    plot, trace = getattr(options, "plot", None), getattr(options, "trace_to", None)
    paths = [path for path in (getattr(options, "output", None), plot, trace) if path]
    if len(paths) > len({Path(path).resolve() for path in paths}):
        raise ValueError(f"two outputs would be written to {paths[0]}: name a file for each")
    for path in paths:
        folder = Path(path).parent
        if not folder.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {folder}")
        if Path(path).is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder; name a file")
    if plot and Path(plot).suffix not in PICTURE_ENDINGS:
        raise ValueError(f"--plot {plot}: end its name in one of {', '.join(PICTURE_ENDINGS)}")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    if trace and not trace.endswith((".json", ".json.gz")):
        raise ValueError(f"--trace {trace}: end its name in .json or .json.gz, by which ui.perfetto.dev knows it")


PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_SHORTER = {"markdown": "md", "text": "txt"}
ENDINGS = {f".{_SHORTER.get(name, name)}": name for name in reversed(FORMATS)}  # of a file of -o: its format


def settle_format(options: argparse.Namespace) -> None:
    """The format that was asked for, by --format or by the ending of the file. Raises ValueError where the two say
    different things."""
    if "format" not in options:
        return
    ending = Path(options.output or "").suffix
    by_ending, asked = ENDINGS.get(ending), options.format
    if ending and not (by_ending or asked):
        picture = "; --plot draws pictures" if ending in PICTURE_ENDINGS and "plot" in options else ""
        raise ValueError(
            f"{options.output}: {ending} says no format: end it in {', '.join(ENDINGS)}, or add --format{picture}"
        )
    if asked and by_ending and asked != by_ending:
        raise ValueError(
            f"--format {asked} contradicts the ending of {options.output}: leave --format out, or name another file"
        )
    known: Sequence[str] = options.formats
    if by_ending and by_ending not in known:
        raise ValueError(f"{options.output}: this command has no {by_ending}; it has {', '.join(known)}")
    options.format = asked or by_ending or "text"


def picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names that the command has, as keyword arguments."""
    return {name: getattr(options, name) for name in names if name in options}


def add_device(parser: argparse.ArgumentParser) -> None:
    help_text = "a name of `flopmeter hardware`, or a YAML file (default: %(default)s)"
    parser.add_argument("--hardware", metavar="NAME", type=one_device, default=DEFAULT_HARDWARE, help=help_text)
    add_mode(parser)


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", dest="trace_to",
        help="also write the predicted timeline to a .json or .json.gz for ui.perfetto.dev",
    )  # fmt: skip


def add_by(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=GROUPINGS, help="rows of the table (default: class)")


def check_by(by: str | None, format: str) -> None:
    """Raises ValueError where --by chooses nothing."""
    if by and format in ("json", "html"):
        raise ValueError(f"{format} holds every grouping: leave --by out")


def save_trace(report: Report, path: str | None) -> None:
    """The timeline to the file of --trace, if there is one."""
    if path:
        with writing(path):
            report.save_trace(path)


def add_clocks(
    parser: argparse._ActionsContainer, default: Clocks | None = "sustained", otherwise: str = "%(default)s"
) -> None:
    parser.add_argument(
        "--clocks", choices=get_args(Clocks), default=default,
        help="those that the power limit leaves in a long run, or those of one too short to feel it"
        f" (default: {otherwise})",
    )  # fmt: skip


def add_energy_price(parser: argparse._ActionsContainer) -> None:
    help_text = "price of a kWh, to say what the energy costs as well"
    parser.add_argument("--kwh", dest="dollars_per_kwh", metavar="DOLLARS", type=dollars, help=help_text)


def add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode", choices=get_args(Mode), help="default: as the program runs, which is eagerly as a rule"
    )


def add_format(
    parser: argparse.ArgumentParser, formats: Iterable[str], flag: str = "--output", instead_of: str = "the terminal"
) -> None:
    """`flag` is the long name of -o, if --output means something else."""
    parser.add_argument("--format", choices=tuple(formats), help="default: what the file of -o ends in, or text")
    parser.add_argument(flag, "-o", dest="output", metavar="FILE", help=f"write to a file instead of {instead_of}")
    parser.set_defaults(formats=tuple(formats))


MOST = 10**9  # the largest number on the command line: no batch and no sequence is longer


def number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:20]) <= MOST:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, at most {MOST:,}, not {text[:40]!r}")
    return int(text)


def _float(wanted: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A reader of such a number."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # no bound holds for it
        if not holds(value):
            raise argparse.ArgumentTypeError(f"expected {wanted}, not {text!r}")
        return value

    return read


positive = _float("a positive number", lambda value: 0 < value < math.inf)
seconds = _float("seconds, from 0 on", lambda value: 0 <= value < math.inf)
dollars = _float("dollars, such as 0.3", lambda value: 0 <= value < math.inf)
share = _float("a share from 0 to 1", lambda value: 0 <= value <= 1)


def one_device(text: str) -> str:
    if "," in text:
        raise argparse.ArgumentTypeError(
            f"expected one device, not {text!r} (several: `flopmeter compare`, or `flopmeter run` for a script)"
        )
    return text


def device_list(text: str) -> list[str]:
    """Raises ValueError for an empty name, as in 'l4,', and for one that stands there twice."""
    names = text.split(",")
    if not all(names):
        raise ValueError(f"--hardware {text!r} has an empty name: write a,b,c without a comma at either end")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--hardware names {twice[0]} twice: name each device once")
    return names


def numbers(text: str) -> list[int]:
    """Numbers from text such as '1,2,4', all different."""
    listed = [number(part) for part in text.split(",")]
    if twice := [size for size in listed if listed.count(size) > 1]:
        raise argparse.ArgumentTypeError(f"{twice[0]} stands there twice in {text!r}: give each size once")
    return listed


def percentage(text: str) -> float:
    """A fraction from text such as '5%'."""
    try:
        if not text.endswith("%") or not float(text[:-1]) >= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a percentage such as 5%, not {text!r}") from None
    return float(text[:-1]) / 100


def show(text: str, options: argparse.Namespace) -> None:
    """Print it, or write it to the file of --output."""
    options.progress.stop()
    if options.output is None:
        print(text.rstrip("\n"))
        return
    with writing(options.output):
        Path(options.output).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
