"""What a subcommand is, the parser of them all, and the arguments and the output that several share."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args

from flopmeter import __version__
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.records import Clocks


class Command(NamedTuple):
    """A subcommand. It runs to an exit code: 0, or 1 where the answer is no."""

    run: Callable[[argparse.Namespace], int]
    what: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every error of the command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"flopmeter: {message} (see {self.prog} --help)\n")


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flopmeter",
        description="What a PyTorch program will cost on a GPU, and why, metered without one.",
        epilog="Exit codes: 0; 1 where the answer is no (diff --fail-above, fit); 2 for an error.",
    )
    parser.add_argument("--version", action="version", version=f"flopmeter {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in commands.items():
        own = added.add_parser(
            name,
            help=command.what,
            description=f"{command.what}.",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--traceback", action="store_true", help="show where an error came from")
        own.set_defaults(run=command.run)
        command.add_arguments(own)
    return parser


def add_device(parser: argparse.ArgumentParser, *, mode: bool = True) -> None:
    help_text = "a name of `flopmeter hardware`, or a YAML file (default: %(default)s)"
    parser.add_argument("--hardware", metavar="NAME", default=DEFAULT_HARDWARE, help=help_text)
    if mode:
        add_mode(parser)


def add_clocks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clocks", choices=get_args(Clocks), default="sustained",
        help="those that the power limit leaves in a long run, or those of one too short to feel it"
        " (default: %(default)s)",
    )  # fmt: skip


def add_energy_price(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kwh", metavar="DOLLARS", type=dollars, help="price of a kWh, to say what the energy costs as well"
    )


def add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode", choices=get_args(Mode), help="default: as the program runs, which is eagerly as a rule"
    )


def add_format(parser: argparse.ArgumentParser, formats: Iterable[str], flag: str = "--output") -> None:
    """`flag` is the long name of -o, where --output means something else."""
    parser.add_argument("--format", choices=tuple(formats), default="text", help="default: %(default)s")
    parser.add_argument(flag, "-o", dest="output", metavar="FILE", help="write to a file instead of the terminal")


def number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, not {text!r}")
    return int(text)


def dollars(text: str) -> float:
    try:
        if not 0 <= float(text) < math.inf:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected dollars, such as 0.3, not {text!r}") from None
    return float(text)


def share(text: str) -> float:
    try:
        if not 0 <= float(text) <= 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, not {text!r}") from None
    return float(text)


def device_list(text: str) -> list[str]:
    """Raises ValueError for an empty name, as in 'l4,'."""
    names = text.split(",")
    if not all(names):
        raise ValueError(f"--hardware {text!r} has an empty name: write a,b,c without a comma at either end")
    return names


def numbers(text: str) -> list[int]:
    return [number(part) for part in text.split(",")]


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
    if options.output is None:
        print(text)
        return
    with writing(options.output):
        Path(options.output).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
