"""The subcommand plan: how to split a training step over many GPUs."""

from __future__ import annotations

import argparse
import os
from functools import cache, partial
from typing import Any, get_args

from flopmeter.ask.delays import Delays
from flopmeter.ask.plan import PlanError, plan
from flopmeter.ask.plan.picture import split_bars
from flopmeter.ask.plan.splits import WISHES
from flopmeter.cli.command import Command, add_format, number, one_device, picked, positive, seconds, share, show
from flopmeter.cli.prices import load_prices
from flopmeter.cli.target_options import add_causal
from flopmeter.cli.targets import load_target
from flopmeter.device.cluster import device_in
from flopmeter.device.hardware import load_hardware
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.models import BUILTINS
from flopmeter.report.plots import save
from flopmeter.report.tables import FORMATS


def _plan(options: argparse.Namespace) -> int:
    name = options.hardware or device_in(options.cluster, DEFAULT_HARDWARE)
    device = load_hardware(name)
    prices = load_prices(options.price, [name])
    result = plan(
        _subject(options.target),
        options.gpus,
        device,
        None if options.memory is None else options.memory * 1e9,
        length=options.seq,
        only=_wishes(options.only),
        delays=_delays(options),
        dollars_per_gpu_hour=prices.dollars_per_hour.get(device.name),
        progress=options.progress.over,
        **picked(options, "batch", "cluster", "mode", "async_tp", "fp8", "rows", "whole", "workers", "causal"),
    )
    show(result.with_note(prices.source).with_note(f"ran: {options.command}").render(options.format), options)
    if options.plot:
        save(split_bars(result), options.plot)
    return 0 if result.best else 1


def _delays(options: argparse.Namespace) -> Delays:
    seconds, steps = options.checkpoint
    return Delays(
        data_seconds=options.data, straggling=options.straggling, checkpoint_seconds=seconds, checkpoint_every=steps
    )


def _checkpoint(text: str) -> tuple[float, int]:
    """'30/500': 30 seconds every 500 steps."""
    duration, slash, steps = text.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(f"expected SECONDS/STEPS, such as 30/500, not {text!r}")
    return seconds(duration), number(steps)


def _subject(name: str) -> Any:
    """The model as `plan` takes it; for a target in a file or a module, a function that makes the model. It knows the
    target's name alone: what was loaded from a file cannot be sent to other processes."""
    if name in BUILTINS or name.startswith("hf:"):
        return name
    _loaded(name)  # raises TargetError now
    return partial(_made, name)


_loaded = cache(load_target)


def _made(name: str) -> Any:
    made = _loaded(name).builder()
    return made[0] if isinstance(made, tuple) else made


def _wishes(texts: list[str]) -> dict[str, list[Any]]:
    wishes: dict[str, list[Any]] = {}
    for name, values in map(_wish, texts):
        if name in wishes:
            raise PlanError(f"--only names {name} twice: give it once, with a comma between its values")
        wishes[name] = values
    return wishes


def _wish(text: str) -> tuple[str, list[Any]]:
    """'tp=4,8' or 'recompute=full'."""
    name, _, values = text.partition("=")
    if name not in WISHES or not values:
        raise PlanError(f"--only {text!r}: write NAME=VALUE,... with a name of {', '.join(WISHES)}")
    return name, [int(value) if value.isdigit() else value for value in values.split(",")]


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "target", metavar="TARGET",
        help="a built-in model, hf:CONFIG.json, hf:TYPE, or module:function or file.py:function that makes the model",
    )  # fmt: skip
    add("--gpus", metavar="N", type=number, required=True, help="how many GPUs train the model")
    add(
        "--hardware", metavar="NAME", type=one_device,
        help=f"a name of `flopmeter hardware`, or a YAML file (default: that of --cluster, or {DEFAULT_HARDWARE})",
    )  # fmt: skip
    add("--memory", metavar="GB", type=positive, help="of each GPU for tensors (default: what the device has)")
    add("--batch", metavar="N", type=number, help="sequences of a step, of all GPUs (default: one for each)")
    add("--seq", metavar="N", type=number, help="tokens of a sequence (default: the config's, up to 8,192)")
    add("--cluster", metavar="NAME", help="links between GPUs (default: those that the device comes in)")
    add("--mode", choices=get_args(Mode), default="eager", help="how layers are launched (default: %(default)s)")
    add(
        "--only", metavar="NAME=VALUES", nargs="+", action="extend", default=[],
        help=f"limit what is tried, such as tp=4,8 pp=1 recompute=full; names: {', '.join(WISHES)}",
    )  # fmt: skip
    add("--async-tp", action="store_true", help="products hide the collectives of tensor parallelism next to them")
    add("--fp8", action="store_true", help="products of linear layers in fp8")
    add_causal(parser)
    add(
        "--data", metavar="SECONDS", type=seconds, default=0.0,
        help="in which the hosts make a step's batch (default: 0)",
    )  # fmt: skip
    add(
        "--checkpoint", metavar="SECONDS/STEPS", type=_checkpoint, default=(0.0, 1),
        help="how long all ranks stop to save, and after how many steps, such as 30/500 (default: never)",
    )  # fmt: skip
    add(
        "--straggling", metavar="SHARE", type=share, default=0.0,
        help="standard deviation of a rank's step time, as a share of it; all wait for the slowest (default: 0)",
    )  # fmt: skip
    add("--rows", metavar="N", type=number, default=10, help="how many splits to show (default: %(default)s)")
    add("--whole", metavar="N", type=int, default=0, help="meter so many of them whole (default: %(default)s)")
    add("--price", metavar="NAME=DOLLARS|FILE", nargs="+", action="extend", default=[], help="dollars per GPU and hour")
    add("--plot", metavar="FILE", help="also draw the splits as bars to a .png or .svg (needs matplotlib)")
    add("--workers", metavar="N", type=number, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add_format(parser, FORMATS)


COMMAND = Command(
    _plan,
    "Which way to split a training step over many GPUs fits and is fastest",
    "Example: flopmeter plan llama-3-70b --gpus 1024 --hardware h100-sxm5-80gb --price h100-sxm5-80gb=2.5\n"
    "Exit code 1 where no split fits in memory.\n",
    _arguments,
)
