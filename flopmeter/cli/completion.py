"""The subcommand completion: a script for the shell, which then completes commands, options, devices and models.

shtab writes the script once, from the parser. argcomplete would start flopmeter at each press of the tab key, and
importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from flopmeter.cli.command import Command, parser_of
from flopmeter.device.hardware import available_hardware
from flopmeter.models import BUILTINS

SHELLS = ("bash", "zsh", "tcsh")
EPILOG = """\
Example: flopmeter completion bash > ~/.local/share/bash-completion/completions/flopmeter
         flopmeter completion zsh > DIRECTORY_OF_FPATH/_flopmeter
"""


def command_of(commands: Mapping[str, Command]) -> Command:
    """The subcommand `completion`, which completes the given ones and itself."""

    def run(options: argparse.Namespace) -> int:
        try:
            shtab = importlib.import_module("shtab")
        except ImportError as error:
            raise ValueError("completion needs shtab: pip install 'flopmeter[completion]'") from error
        print(shtab.complete(_parser(commands), options.shell))
        return 0

    return Command(run, "A script that completes this command in a shell", EPILOG, _arguments)


def _parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The command's own parser, which also completes devices and models."""
    parser = parser_of(commands)
    names = {"hardware": list(available_hardware()), "names": list(available_hardware()), "target": list(BUILTINS)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                for option in own._actions:
                    option.choices = option.choices or names.get(option.dest)
    return parser


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
