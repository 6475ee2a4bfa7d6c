"""The subcommands that run a model: table, compare, sweep, fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from flopmeter.ask.compare import Sort, compare
from flopmeter.ask.largest_batch import largest_batch
from flopmeter.ask.sweep import sweep
from flopmeter.ask.sweep_curve import sweep_curve
from flopmeter.cli.command import (
    Command,
    add_clocks,
    add_device,
    add_energy_price,
    add_format,
    add_mode,
    device_list,
    number,
    numbers,
    show,
    writing,
)
from flopmeter.cli.prices import load_prices
from flopmeter.cli.progress import on_terminal
from flopmeter.cli.targets import Program, Programs, load_target
from flopmeter.device.hardware import load_hardware
from flopmeter.meter import FlopMeter
from flopmeter.records.dtypes import FLOATS, NARROW_FLOATS
from flopmeter.report.drawers import FORMATS as REPORT_FORMATS
from flopmeter.report.formats import csv_of, summary, table
from flopmeter.report.plots import PICTURES, save
from flopmeter.report.report import GROUPINGS, By, Report
from flopmeter.report.tables import FORMATS, Document

DEFAULT_COMPARISON = "a100-sxm4-80gb,h100-sxm5-80gb,b200-sxm-180gb"
DEFAULT_BATCHES = [1, 2, 4, 8, 16, 32, 64]

PICTURE_HELP = (
    "the roofline with every kernel (an eager run beside what torch.compile makes of it),"
    " bars of the classes, modules or ops, or the memory over the run"
)
TARGETS = """\
A TARGET is one of
  gpt2-124m              a built-in model (a wrong name lists the near ones)
  hf:CONFIG.json         a Hugging Face model from its config.json, or hf:TYPE (hf:llama) with the type's defaults;
                         needs transformers, but neither weights nor network
  timm:NAME              an image model of timm
  module:function, file.py:function
                         a function that returns (model, inputs); it is called with those of batch, seq, image_size
                         and dtype that its signature names
"""


def _table(options: argparse.Namespace) -> int:
    compiled = options.compiler or options.explain_compile
    if compiled and (options.mode in ("eager", "eager-cudagraph") or options.speed_up):
        raise ValueError(
            "--compiler and --explain-compile run the model compiled, so there is no eager run to show: give them "
            "alone, or with --mode compiled or cudagraph"
        )
    program = _program(options, compiled=compiled)
    with FlopMeter(options.hardware, clocks=options.clocks, dollars_per_kwh=options.kwh) as meter:
        program.run()
    report = meter.report(mode=options.mode)
    report = replace(report, ran=report.ran._replace(program=options.command))
    if options.explain_compile:
        show(f"{_rendered(report, 'text', options.by)}\n\n{report.explain_compile()}", options)
    elif options.speed_up:
        show(report.speed_up().render(options.format), options)
    else:
        show(_rendered(report, options.format, options.by), options)
    if options.plot:
        save(PICTURES[options.picture](report), options.plot)
    if options.trace:
        with writing(options.trace):
            report.save_trace(options.trace)
    return 0


def _rendered(report: Report, format: str, by: By) -> str:
    """The report by another grouping than the op class; json and html hold all groupings anyway."""
    rows = report.rows(by)
    if format == "csv":
        return csv_of(report, rows)
    if by == "class" or format not in ("text", "markdown"):
        return report.render(format)
    body = table(report, rows, by, "simple" if format == "text" else "github", indent=by == "module")
    return "\n".join((report.headline, "", body, "", *summary(report)))


def _table_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser, number)
    add_device(parser)
    add_clocks(parser)
    add_energy_price(parser)
    add_format(parser, REPORT_FORMATS)
    _add_plot(parser, "a picture")
    parser.add_argument(
        "--picture", choices=PICTURES, default="roofline",
        help=f"what --plot draws: {PICTURE_HELP} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="FILE", help="also write the predicted timeline to a .json or .json.gz for ui.perfetto.dev"
    )
    parser.add_argument("--by", choices=GROUPINGS, default="class", help="rows of the table (default: %(default)s)")
    parser.add_argument(
        "--compiler", action="store_true",
        help="compile the model and its optimizer by torch's own compiler (slow; --mode alone goes by rules)",
    )  # fmt: skip
    parser.add_argument(
        "--explain-compile", action="store_true", help="as --compiler, and add graphs, breaks and kernels"
    )
    parser.add_argument(
        "--speed-up", action="store_true", help="instead: eager and compiled side by side, what fusion saves by region"
    )


def _compare(options: argparse.Namespace) -> int:
    prices = load_prices(options.price)
    program = _program(options)
    devices = device_list(options.hardware)
    names = {load_hardware(name).name for name in devices}
    comparison = compare(
        program.run,
        devices,
        options.mode or "eager",
        items=program.items,
        unit=program.unit,
        prices={name: dollars for name, dollars in prices.dollars_per_hour.items() if name in names},
        sort=options.sort,
        progress=on_terminal("comparing"),
        clocks=options.clocks,
        dollars_per_kwh=options.kwh,
    )
    show(comparison.with_note(prices.source).render(options.format), options)
    return 0


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser, number)
    parser.add_argument(
        "--hardware", metavar="A,B,C", default=DEFAULT_COMPARISON, help="devices (default: %(default)s)"
    )
    parser.add_argument(
        "--price", metavar="NAME=DOLLARS|FILE", nargs="+", action="extend", default=[],
        help="dollars per hour of a device, or a YAML file with `date` and `dollars_per_hour: {name: amount}`",
    )  # fmt: skip
    add_mode(parser)
    add_clocks(parser)
    add_energy_price(parser)
    parser.add_argument("--sort", choices=get_args(Sort), default="seconds", help="default: %(default)s")
    add_format(parser, FORMATS)


def _sweep(options: argparse.Namespace) -> int:
    over, sizes, fixed = _swept(options)
    programs = Programs(load_target(options.target), over, **_options(options, **fixed))
    first = programs.of(sizes[0])
    result = sweep(
        programs,
        sizes,
        options.hardware,
        options.mode or "eager",
        over=over,
        items=1 if first.items is None else first.items / sizes[0],
        unit="samples" if first.items is None else first.unit,
        progress=on_terminal("sweeping"),
        clocks=options.clocks,
        dollars_per_kwh=options.kwh,
    )
    show(result.render(options.format), options)
    if options.plot:
        save(sweep_curve(result), options.plot)
    return 0


def _swept(options: argparse.Namespace) -> tuple[str, list[int], dict[str, int | None]]:
    """What is swept, over which sizes, and the other size."""
    lists = {"batch": options.batch, "seq": options.seq}
    swept = [name for name, sizes in lists.items() if sizes and len(sizes) > 1]
    if len(swept) > 1:
        raise ValueError("sweep one of --batch and --seq, and give one value for the other")
    over = swept[0] if swept else "batch"
    other = "seq" if over == "batch" else "batch"
    return over, sorted(lists[over] or DEFAULT_BATCHES), {other: lists[other][0] if lists[other] else None}


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser, numbers)
    add_device(parser)
    add_clocks(parser)
    add_energy_price(parser)
    add_format(parser, FORMATS)
    _add_plot(parser, "the curves")


def _fit(options: argparse.Namespace) -> int:
    device = load_hardware(options.hardware)
    programs = Programs(load_target(options.target), "batch", **_options(options, seq=options.seq))
    largest = largest_batch(programs, device)
    what = "a training step" if options.train else "inference"
    answer = {"target": options.target, "hardware": device.name, "train": options.train, "largest_batch": largest}
    note = f"the largest batch that fits is {largest}" if largest else "not even a batch of 1 fits"
    title = f"{options.target}, {what} · {device.title}"
    show(Document("fit", title, [], [note], answer, [answer]).render(options.format), options)
    return 0 if largest else 1


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser, number, batch=False)
    add_device(parser, mode=False)
    add_format(parser, FORMATS)


def _program(options: argparse.Namespace, *, compiled: bool = False) -> Program:
    sizes = _options(options, batch=options.batch, seq=options.seq)
    return load_target(options.target).program(compiled=compiled, **sizes)


def _options(options: argparse.Namespace, **sizes: int | None) -> dict[str, Any]:
    """Of Target.program. Autocast is for models kept in fp32, so that is their type unless the user says another."""
    dtype = options.dtype or ("fp32" if options.autocast else None)
    return {
        **sizes,
        "image_size": options.image_size,
        "dtype": dtype and FLOATS[dtype],
        "train": options.train,
        "autocast": options.autocast and FLOATS[options.autocast],
    }


def _add_target(parser: argparse.ArgumentParser, read: Callable[[str], Any], *, batch: bool = True) -> None:
    """`read` is for --batch and --seq: one number, or a list."""
    several = "N" if read is number else "N,N,..."
    parser.add_argument("target", metavar="TARGET", help="the model (see below)")
    if batch:
        parser.add_argument("--batch", metavar=several, type=read, help="default: the target's own")
    parser.add_argument("--seq", metavar=several, type=read, help="tokens in each sequence (default: the target's own)")
    parser.add_argument("--image-size", metavar="N", type=number, help="pixels along each side")
    parser.add_argument("--train", action="store_true", help="a training step: forward, backward, AdamW")
    parser.add_argument("--dtype", choices=FLOATS, help="type of weights and data (default: the target's own)")
    parser.add_argument("--autocast", choices=NARROW_FLOATS, help="run under torch.autocast, weights in fp32")


def _add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", metavar="FILE", help=f"also draw {what} to a .png or .svg (needs matplotlib)")


COMMANDS = {
    "table": Command(
        _table,
        "What one run of a model costs on one device",
        "Example: flopmeter table gpt2-124m --hardware h100-sxm5-80gb --train --batch 8\n\n" + TARGETS,
        _table_arguments,
    ),
    "compare": Command(
        _compare,
        "One model on many devices: time, throughput, regime, memory, price, and what would help",
        "Example: flopmeter compare hf:llama --hardware a100-sxm4-80gb,l40s --price l40s=0.9\n\n" + TARGETS,
        _compare_arguments,
    ),
    "sweep": Command(
        _sweep,
        "One model at many batches or lengths: the knee, the overhead, what fits",
        "Example: flopmeter sweep resnet-50 --batch 1,2,4,8,16,32 --hardware rtx-4090\n\n" + TARGETS,
        _sweep_arguments,
    ),
    "fit": Command(
        _fit,
        "The largest batch that fits a device's memory",
        "Example: flopmeter fit llama-3-8b --seq 4096 --hardware h200-sxm-141gb\n\n" + TARGETS,
        _fit_arguments,
    ),
}
