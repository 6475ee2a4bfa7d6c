"""How far off are the predictions? Error tables from published measurements, beside the plain roofline.

    python scripts/validate.py --neusight DIR      operators and whole fp32 networks of NeuSight (ASPLOS 2025)
    python scripts/validate.py --timm FILE         inference of image models, pytorch-image-models' results/
    python scripts/validate.py --e2e FILE          published end-to-end runs, one a line, on one GPU and on eight
    python scripts/validate.py --parallel FILE     published training runs on eight GPUs and more
    python scripts/validate.py --kernels DIR       kernels of language models, one by one (aiconfigurator, vidur)
    python scripts/validate.py --traces DIR        traces of torch.profiler, op by op
    python scripts/validate.py --measured FILE     what `flopmeter measure` measured on a machine
    python scripts/validate.py --all DIR           each of these that is in DIR, as fetch_measurements.py writes them
    ... --markdown                                 then the table of the README, of the same rows

The files are not part of this repository; scripts/fetch_measurements.py makes most of them. DIR of --neusight holds
linear.csv, bmm.csv, elementwise.csv, softmax.csv, layernorm.csv, conv2d.csv, e2e.csv, and more rows in the same names
with _more; any of them may be missing. --timm needs timm installed, whole networks of NeuSight transformers. The last
line printed is one JSON document with the mean errors in percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from tabulate import tabulate

from flopmeter.device.hardware import Hardware
from flopmeter.records import Cost, Switches
from flopmeter.report.report import Report

Line = dict[str, str]

# Ends of the titles of tables that stand apart: what was measured there is known to have been another kernel.
APART = ("Pascal's anomalous rows", "with math attention, by GPU")


class Row(NamedTuple):
    """One measurement and what was predicted for it; times in seconds."""

    group: str  # operator or model family
    gpu: str
    measured: float
    predicted: float
    low: float  # the band
    high: float
    roofline: float
    name: str = ""  # of the model
    published: tuple[tuple[str, float], ...] = ()  # other predictors' seconds for the same row
    mode: str = "eager"
    held_out: bool = False  # its shape set no constant

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def error_table(title: str, rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, float]:
    """Print one line for each value of `key` and one for all; return the mean errors in percent."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    if len(groups) > 1:
        groups["all"] = list(rows)
    others = sorted({name for row in rows for name, _ in row.published})
    lines = [
        [name, *_summary(members), *(_published(members, other) for other in others)]
        for name, members in groups.items()
    ]
    headers = [
        "",
        "rows",
        "mean %",
        "median %",
        "bias",
        "rank corr.",
        "in band %",
        "band ± %",
        "roofline mean %",
        *(f"{o} mean %" for o in others),
    ]
    print(f"\n{title}\n{tabulate(lines, headers=headers, floatfmt='.1f', disable_numparse=[4, 5])}")
    return {name: round(100 * statistics.fmean(row.error for row in members), 1) for name, members in groups.items()}


def _summary(rows: Sequence[Row]) -> list[object]:
    errors = [100 * row.error for row in rows]
    inside = sum(row.low <= row.measured <= row.high for row in rows) / len(rows)
    width = statistics.median((row.high - row.low) / 2 / row.predicted for row in rows)
    roofline = statistics.fmean(100 * abs(row.roofline / row.measured - 1) for row in rows)
    bias = statistics.median(row.predicted / row.measured for row in rows)
    return [
        len(rows),
        statistics.fmean(errors),
        statistics.median(errors),
        f"{bias:.2f}",
        _rank_correlation(rows),
        100 * inside,
        100 * width,
        roofline,
    ]


def _published(rows: Sequence[Row], predictor: str) -> float:
    errors = [abs(seconds / row.measured - 1) for row in rows for name, seconds in row.published if name == predictor]
    return 100 * statistics.fmean(errors) if errors else float("nan")


def _rank_correlation(rows: Sequence[Row]) -> str:
    """Spearman's: the correlation of the ranks."""
    if len(rows) < 3:
        return "-"
    predicted, measured = (_ranks([getattr(row, field) for row in rows]) for field in ("predicted", "measured"))
    if len(set(predicted)) < 2 or len(set(measured)) < 2:
        return "-"
    return f"{statistics.correlation(predicted, measured):.3f}"


def _ranks(values: Iterable[float]) -> list[float]:
    """Equal values share the mean of their places."""
    places: dict[float, list[int]] = {}
    values = list(values)
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def roofline_seconds(report: Report, device: Hardware) -> float:
    return roofline_of((kernel.cost for kernel in report.kernels), report.switches, device)


def roofline_of(costs: Iterable[Cost], switches: Switches, device: Hardware) -> float:
    """The plain roofline: each kernel at the datasheet's peaks, the larger of the two."""
    total = 0.0
    for cost in costs:
        compute = 0.0
        if cost.macs:
            peak = device.contraction_peak(switches.matmul_dtype(cost))
            compute = cost.executed_flops / peak.flop_per_s
        total += max(compute, cost.bytes / device.bandwidth_bytes_per_s)
    return total


def sampled(lines: list[Line], most: int | None) -> list[Line]:
    """At most so many of the lines, in their order: those whose checksums are lowest, whatever order they were in."""
    if most is None or len(lines) <= most:
        return lines
    drawn = sorted(range(len(lines)), key=lambda place: crc32(repr(sorted(lines[place].items())).encode()))
    return [lines[place] for place in sorted(drawn[:most])]


def _gpu(row: Row) -> str:
    return row.gpu


def _group(row: Row) -> str:
    return row.group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neusight", type=Path, metavar="DIR")
    parser.add_argument("--timm", type=Path, metavar="FILE")
    parser.add_argument("--e2e", type=Path, metavar="FILE")
    parser.add_argument("--parallel", type=Path, metavar="FILE")
    parser.add_argument("--kernels", type=Path, metavar="DIR")
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--measured", type=Path, metavar="FILE", action="append", default=[])
    parser.add_argument("--hardware", metavar="NAME", help="of --measured; default: the profile of its device")
    parser.add_argument("--all", type=Path, metavar="DIR", help="with neusight/, timm/, kernels/, traces/, papers/")
    parser.add_argument("--rows", type=int, metavar="N", help="at most so many of a file of operators or kernels")
    parser.add_argument("--models", type=int, default=200, help="how many timm models to sample (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README, too")
    arguments = parser.parse_args()
    if arguments.all:
        _find(arguments)
    if not any(getattr(arguments, name) for name in (*IN_ALL, "measured")):
        parser.error(f"name at least one of {', '.join(f'--{name}' for name in ('all', *IN_ALL, 'measured'))}")
    _need(arguments)
    results: dict[str, dict[str, float]] = {}
    every_row: list[Row] = []
    tables: dict[str, list[Row]] = {}
    for title, rows, key in _tables(arguments):
        results[title] = error_table(title, rows, key)
        tables[title] = rows
        if key is _gpu and not title.endswith(APART):
            every_row += rows
    if every_row:
        results["all"] = error_table("all rows, by GPU", every_row, _gpu)
    if arguments.traces:
        from validate_traces import traces

        results |= traces(arguments.traces)
    if arguments.markdown:
        from accuracy_table import markdown

        print(f"\n{markdown(tables)}")
    print(json.dumps(results))


# What --all looks for in its folder, by the option that reads it.
IN_ALL = {
    "neusight": "neusight",
    "timm": "timm/dev.csv",
    "e2e": "papers/e2e.csv",
    "parallel": "papers/parallel.csv",
    "kernels": "kernels",
    "traces": "traces",
}


def _find(arguments: argparse.Namespace) -> None:
    """Set the options of what is in the folder; what is missing is told. Ends the program where nothing is."""
    for name, path in IN_ALL.items():
        if (arguments.all / path).exists():
            setattr(arguments, name, arguments.all / path)
        else:
            print(f"left out: {arguments.all / path} is not there")
    if not any(getattr(arguments, name) for name in IN_ALL):
        raise SystemExit(f"{arguments.all} holds none of these: scripts/fetch_measurements.py {arguments.all} fills it")


def _need(arguments: argparse.Namespace) -> None:
    """Ends the program, before anything was predicted, where a package is missing."""
    from validate_networks import network_files
    from validate_runs import uses_transformers
    from validate_timm import declare_torchvision_ops

    declare_torchvision_ops()  # transformers loads torchvision where there is one
    of_networks = arguments.neusight and network_files(arguments.neusight)
    of_runs = arguments.e2e and uses_transformers(arguments.e2e)
    wanted = {"timm": arguments.timm, "transformers": of_networks or of_runs}
    missing = [name for name, is_wanted in wanted.items() if is_wanted and find_spec(name) is None]
    if missing:
        raise SystemExit(f"these files need {' and '.join(missing)}: pip install {' '.join(missing)}")


def _tables(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Row], Callable[[Row], str]]]:
    """What to print: a title, its rows, and what groups them."""
    if arguments.neusight:
        from validate_neusight import operators

        for title, rows in operators(arguments.neusight, arguments.rows):
            yield title, rows, _gpu
        from validate_networks import network_files, networks

        if network_files(arguments.neusight):
            rows = networks(arguments.neusight)
            for mode in sorted({row.mode for row in rows}):
                of_mode = [row for row in rows if row.mode == mode]
                yield f"networks, {mode}, by GPU", of_mode, _gpu
                yield f"networks, {mode}, by model", of_mode, _group
    if arguments.timm:
        from validate_timm import image_models

        for title, rows in image_models(arguments.timm, arguments.models):
            yield f"{title}, by GPU", rows, _gpu
            yield f"{title}, by family", rows, _group
    if arguments.e2e:
        from validate_runs import runs

        for title, rows in runs(arguments.e2e):
            yield title, rows, lambda row: row.name
    for path in filter(None, (arguments.e2e, arguments.parallel)):
        from validate_distributed import sharded_runs

        for title, rows in sharded_runs(path):
            yield title, rows, _group
    if arguments.parallel:
        from validate_parallel import planned_runs

        for title, rows in planned_runs(arguments.parallel):
            yield title, rows, lambda row: row.name
    if arguments.kernels:
        from validate_kernels import kernels

        yield from kernels(arguments.kernels, arguments.rows)
    for path in arguments.measured:
        from validate_measured import measured_suite

        for title, rows in measured_suite(path, arguments.hardware):
            yield f"{title}, {path.stem}", rows, _group


if __name__ == "__main__":
    main()
