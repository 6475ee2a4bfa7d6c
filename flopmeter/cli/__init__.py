"""The `flopmeter` command: what a model will cost, from a shell. Everything here is done by library functions."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence

from flopmeter.cli import (
    completion,
    explain,
    file_commands,
    hardware_table,
    measure_command,
    model_commands,
    model_list,
    plan_command,
    run_command,
    serve_command,
)
from flopmeter.cli.command import check_files, parsed, settle_format
from flopmeter.costs import UncountedError
from flopmeter.known_values import DataDependentError

COMMANDS = {
    "run": run_command.COMMAND,
    **model_commands.COMMANDS,
    "serve": serve_command.COMMAND,
    "plan": plan_command.COMMAND,
    **file_commands.COMMANDS,
    "measure": measure_command.COMMAND,
    "hardware": hardware_table.COMMAND,
    "models": model_list.COMMAND,
    "explain": explain.COMMAND,
}
COMMANDS["completion"] = completion.command_of(COMMANDS)
# Warnings of other packages, about which the user of a command can do nothing.
HARMLESS = r"Using `torch.compile\(module\)` when there are global hooks"
# Errors that a user can put right; every error class of flopmeter is one of these.
KNOWN_ERRORS = (ValueError, DataDependentError, UncountedError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0; 1 where the answer is no (`diff --fail-above`, `fit`, `serve`, `plan`); 2 for an
    error, told in one line; 130 if it was interrupted."""
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        options = parsed(COMMANDS, given)
        options.command = shlex.join(["flopmeter", *given])
        check_files(options)
        settle_format(options)
        with options.progress if options.tells_time else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", HARMLESS)
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output (`head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("flopmeter: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as a shell tells it
    except SystemExit as stop:  # argparse: --help, --version and wrong arguments
        return stop.code if isinstance(stop.code, int) else 2
    except KNOWN_ERRORS as error:
        if options.traceback:
            traceback.print_exc()
        print(f"flopmeter: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
