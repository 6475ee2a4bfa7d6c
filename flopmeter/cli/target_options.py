"""The options of every command that runs a model: the model, its sizes and types, how it trains, what is assumed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from flopmeter.cli.command import add_clocks, add_energy_price, number, picked, share
from flopmeter.cli.targets import Program, load_target
from flopmeter.cli.training import OptimizerChoice, optimizer_choice
from flopmeter.meter import Causal
from flopmeter.records.dtypes import FLOATS, NARROW_FLOATS

TARGETS = """\
A TARGET is one of
  gpt2-124m              a built-in model (`flopmeter models` lists them)
  hf:CONFIG.json         a Hugging Face model from its config.json, or hf:TYPE (hf:llama) with the type's defaults;
                         needs transformers, but neither weights nor network
  hf:OWNER/NAME          a model of the hub: its config comes from the cache, or else from the network; no weights
  timm:NAME              an image model of timm
  module:function, file.py:function
                         a function that returns (model, inputs); it is called with those of batch, seq, image_size
                         and dtype that its signature names
"""


def add_target(parser: argparse.ArgumentParser, read: Callable[[str], Any] = number, *, batch: bool = True) -> None:
    """The model and its sizes. `read` is for --batch and --seq: one number, or a list."""
    several = "N" if read is number else "N,N,..."
    parser.add_argument("target", metavar="TARGET", help="the model (see below)")
    if batch:
        parser.add_argument("--batch", metavar=several, type=read, help="default: the target's own")
    parser.add_argument("--seq", metavar=several, type=read, help="tokens in each sequence (default: the target's own)")
    parser.add_argument("--image-size", metavar="N", type=number, help="pixels along each side")
    parser.add_argument("--dtype", choices=FLOATS, help="type of weights and data (default: the target's own)")


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--autocast", choices=NARROW_FLOATS, help="run under torch.autocast, weights in fp32")
    group = parser.add_argument_group("training")
    group.add_argument("--train", action="store_true", help="a training step: forward, backward, optimizer")
    group.add_argument(
        "--optimizer", metavar="NAME[,KEY=VALUE...]", type=_optimizer,
        help="of torch.optim, such as sgd,momentum=0.9 or adamw,fused=true (default: adamw)",
    )  # fmt: skip
    group.add_argument(
        "--checkpointing", action="store_true", help="keep only the inputs of blocks, and run them again in backward"
    )


def add_metering(parser: argparse.ArgumentParser, *, clocks: bool = True) -> None:
    """How the program is metered, and what is assumed of values that nobody knows."""
    group = parser.add_argument_group("metering")
    if clocks:
        add_clocks(group)
        add_energy_price(group)
    group.add_argument("--strict", action="store_true", help="an op that no rule covers is an error, not a line")
    add_causal(group)
    group.add_argument(
        "--routing", metavar="balanced|1.3", type=_routing,
        help="tokens take experts in turns, or the first expert gets so many times the mean (1 to 2)",
    )  # fmt: skip
    group.add_argument("--checks", choices=("hold",), help="unknown values are taken to be finite")
    group.add_argument(
        "--mask-fraction", metavar="SHARE", type=share, help="of an unknown mask that selects elements, this is true"
    )


def add_causal(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--causal", choices=get_args(Causal), default="full",
        help="FLOPs of the whole attention square, or of what a mask leaves (default: %(default)s)",
    )  # fmt: skip


def metering(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of FlopMeter."""
    return picked(options, "strict", "causal", "routing", "checks", "mask_fraction", "clocks", "dollars_per_kwh")


def program(options: argparse.Namespace, *, compiled: bool = False) -> Program:
    sizes = program_options(options, batch=options.batch, seq=options.seq)
    return load_target(options.target).program(compiled=compiled, **sizes)


def program_options(options: argparse.Namespace, **sizes: int | None) -> dict[str, Any]:
    """The arguments of Target.program. Raises ValueError for options that exclude each other."""
    if options.dtype and options.autocast:
        raise ValueError("--autocast keeps weights in fp32, --dtype says another type: give one of the two")
    for flag, given in (("--optimizer", options.optimizer), ("--checkpointing", options.checkpointing)):
        if given and not options.train:
            raise ValueError(f"{flag} is of a training step: add --train")
    return {
        **size_options(options, **sizes),
        "train": options.train,
        "autocast": options.autocast and FLOATS[options.autocast],
        "optimizer": options.optimizer,
        "checkpointing": options.checkpointing,
    }


def size_options(options: argparse.Namespace, **sizes: int | None) -> dict[str, Any]:
    """The arguments of a target's own function."""
    return {**sizes, "image_size": options.image_size, "dtype": options.dtype and FLOATS[options.dtype]}


def _optimizer(text: str) -> OptimizerChoice:
    try:
        return optimizer_choice(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _routing(text: str) -> str | dict[str, float]:
    """The value for FlopMeter, which checks the number itself."""
    if text in ("balanced", "independent"):
        return text
    try:
        return {"imbalance": float(text)}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected balanced, independent or a number from 1 to 2, not {text!r}"
        ) from None
