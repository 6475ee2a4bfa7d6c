"""The subcommand models: what is built in, with its size and what its options are by default."""

from __future__ import annotations

import argparse
import inspect

from flopmeter.cli.command import Command, add_format, show
from flopmeter.cli.targets import OPTIONS
from flopmeter.models import BUILTINS
from flopmeter.report.tables import FORMATS, Column, Document, Table


def _models(options: argparse.Namespace) -> int:
    records = [_record(name) for name in BUILTINS]
    table = Table(
        [Column("model", "<"), Column("parameters"), Column("takes (default)", "<")],
        [(str(each["model"]), f"{float(each['parameters']) / 1e6:,.1f} M", str(each["takes"])) for each in records],
    )
    notes = [
        "any other model: hf:CONFIG.json, hf:TYPE, hf:OWNER/NAME (the hub), timm:NAME, file.py:function",
        "example: flopmeter table gpt2-124m --train --hardware h100-sxm5-80gb",
    ]
    document = Document("models", "built-in models", [table], notes, {"models": records}, records)
    show(document.render(options.format), options)
    return 0


def _record(name: str) -> dict[str, int | str]:
    model, _ = BUILTINS[name]()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    defaults = inspect.signature(BUILTINS[name]).parameters
    takes = ", ".join(
        f"{option} {str(defaults[option].default).removeprefix('torch.')}" for option in OPTIONS if option in defaults
    )
    return {"model": name, "parameters": parameters, "takes": takes}


COMMAND = Command(
    _models,
    "The built-in models, their size and what they take",
    "Example: flopmeter models\n",
    lambda parser: add_format(parser, FORMATS),
)
