"""The subcommands that run a model: count, table, compare, sweep, fit."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import get_args

from flopmeter.ask.compare import Sort, compare
from flopmeter.ask.counting import count
from flopmeter.ask.largest_batch import MOST_TRIED, largest_batch
from flopmeter.ask.sweep import sweep
from flopmeter.ask.sweep_curve import sweep_curve
from flopmeter.cli.command import (
    Command,
    add_by,
    add_device,
    add_format,
    add_mode,
    add_trace,
    check_by,
    device_list,
    number,
    numbers,
    save_trace,
    show,
)
from flopmeter.cli.prices import load_prices
from flopmeter.cli.target_options import (
    TARGETS,
    add_metering,
    add_target,
    add_training,
    metering,
    program,
    program_options,
    size_options,
)
from flopmeter.cli.targets import Programs, blaming, load_target
from flopmeter.device.hardware import load_hardware
from flopmeter.launch.modes import MODES
from flopmeter.meter import FlopMeter
from flopmeter.report.drawers import FORMATS as REPORT_FORMATS
from flopmeter.report.formats import grouped
from flopmeter.report.plots import PICTURES, save
from flopmeter.report.tables import FORMATS, Document

DEFAULT_COMPARISON = "a100-sxm4-80gb,h100-sxm5-80gb,b200-sxm-180gb"
DEFAULT_BATCHES = [1, 2, 4, 8, 16, 32, 64]

PICTURE_HELP = (
    "the roofline with every kernel (an eager run beside what torch.compile makes of it),"
    " bars of the classes, modules or ops, or the memory over the run"
)


def _table(options: argparse.Namespace) -> int:
    _check_table(options)
    one_run = program(options, compiled=options.compiler or options.explain_compile)
    with FlopMeter(options.hardware, **metering(options)) as meter:
        one_run.run()
    report = meter.report(mode=options.mode)
    report = replace(report, ran=report.ran._replace(program=options.command))
    if options.explain_compile:
        show(f"{grouped(report, 'text', options.by or 'class')}\n\n{report.explain_compile()}", options)
    elif options.speed_up:
        show(report.speed_up().render(options.format), options)
    else:
        show(grouped(report, options.format, options.by or "class"), options)
    if options.plot:
        save(PICTURES[options.picture or "roofline"](report), options.plot)
    save_trace(report, options.trace_to)
    return 0


def _check_table(options: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other."""
    compiled, format, speed_up = options.compiler or options.explain_compile, options.format, options.speed_up
    shows_eager = speed_up or (options.mode and not MODES[options.mode].fuses)
    for excluded, why in (
        (
            compiled and shows_eager,
            "--compiler and --explain-compile run the model compiled, so there is no eager run to show: give them "
            "alone, or with --mode compiled or cudagraph",
        ),
        (speed_up and options.mode, "--speed-up sets eager beside compiled: leave --mode out"),
        (options.picture and not options.plot, "--picture says what --plot draws: add --plot FILE.png"),
        (speed_up and format not in FORMATS, f"--speed-up has no {format}; it has {', '.join(FORMATS)}"),
        (speed_up and options.by, "--speed-up has rows of its own: leave --by out"),
        (options.explain_compile and format != "text", f"--explain-compile is text: leave --format {format} out"),
    ):
        if excluded:
            raise ValueError(why)
    check_by(options.by, format)


def _table_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_training(parser)
    add_device(parser)
    add_metering(parser)
    add_format(parser, REPORT_FORMATS)
    _add_plot(parser, "a picture")
    parser.add_argument("--picture", choices=PICTURES, help=f"what --plot draws: {PICTURE_HELP} (default: roofline)")
    add_trace(parser)
    add_by(parser)
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
    devices = device_list(options.hardware)
    prices = load_prices(options.price, devices)
    one_run = program(options)
    comparison = compare(
        one_run.run,
        devices,
        options.mode or "eager",
        items=one_run.items,
        unit=one_run.unit,
        prices=prices.dollars_per_hour,
        sort=options.sort,
        progress=options.progress.over,
        **metering(options),
    )
    show(comparison.with_note(prices.source).render(options.format), options)
    return 0


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_training(parser)
    parser.add_argument(
        "--hardware", metavar="A,B,C", default=DEFAULT_COMPARISON, help="devices (default: %(default)s)"
    )
    parser.add_argument(
        "--price", metavar="NAME=DOLLARS|FILE", nargs="+", action="extend", default=[],
        help="dollars per hour of a device, or a YAML file with `date` and `dollars_per_hour: {name: amount}`",
    )  # fmt: skip
    add_mode(parser)
    add_metering(parser)
    parser.add_argument("--sort", choices=get_args(Sort), default="seconds", help="default: %(default)s")
    add_format(parser, FORMATS)


def _sweep(options: argparse.Namespace) -> int:
    over, sizes, fixed = _swept(options)
    programs = Programs(load_target(options.target), over, **program_options(options, **fixed))
    first = programs.of(sizes[0])
    result = sweep(
        programs,
        sizes,
        options.hardware,
        options.mode or "eager",
        over=over,
        items=1 if first.items is None else first.items / sizes[0],
        unit="samples" if first.items is None else first.unit,
        progress=options.progress.over,
        **metering(options),
    )
    show(result.render(options.format), options)
    if options.plot:
        save(sweep_curve(result), options.plot)
    return 0


def _swept(options: argparse.Namespace) -> tuple[str, list[int], dict[str, int | None]]:
    """Which size is swept, over which values, and the value of the other size."""
    lists = {"batch": options.batch, "seq": options.seq}
    swept = [name for name, sizes in lists.items() if sizes and len(sizes) > 1]
    if len(swept) > 1:
        raise ValueError("sweep one of --batch and --seq, and give one value for the other")
    over = swept[0] if swept else "batch"
    other = "seq" if over == "batch" else "batch"
    return over, sorted(lists[over] or DEFAULT_BATCHES), {other: lists[other][0] if lists[other] else None}


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, numbers)
    add_training(parser)
    add_device(parser)
    add_metering(parser)
    add_format(parser, FORMATS)
    _add_plot(parser, "the curves")


def _fit(options: argparse.Namespace) -> int:
    device = load_hardware(options.hardware)
    programs = Programs(load_target(options.target), "batch", **program_options(options, seq=options.seq))
    largest = largest_batch(programs, device, mode=options.mode, **metering(options))
    what = "a training step" if options.train else "inference"
    answer = {"target": options.target, "hardware": device.name, "train": options.train, "largest_batch": largest}
    note = f"the largest batch that fits is {largest}" if largest else "not even a batch of 1 fits"
    if largest == MOST_TRIED:
        note = f"a batch of {largest:,} fits; larger ones were not tried"
    title = f"{options.target}, {what} · {device.title}"
    show(Document("fit", title, [], [note], answer, [answer]).render(options.format), options)
    return 0 if largest else 1


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, batch=False)
    add_training(parser)
    add_device(parser)
    add_metering(parser, clocks=False)
    add_format(parser, FORMATS)


def _count(options: argparse.Namespace) -> int:
    target = load_target(options.target)
    sizes = size_options(options, batch=options.batch, seq=options.seq)
    model, arguments, keywords = target.built(**sizes)
    with blaming(options.target):
        counted = count(model, *arguments, **keywords)
    show(counted.down_to(options.depth).render(options.format), options)
    return 0


def _count_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--depth", metavar="N", type=number, default=2, help="how deep the tree of modules goes (default: %(default)s)"
    )
    add_format(parser, FORMATS)


def _add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", metavar="FILE", help=f"also draw {what} to a .png or .svg (needs matplotlib)")


COMMANDS = {
    "count": Command(
        _count,
        "FLOPs of one forward pass; parameters, output shape and FLOPs of each module",
        "Example: flopmeter count resnet-50 --depth 1\n\n" + TARGETS,
        _count_arguments,
    ),
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
