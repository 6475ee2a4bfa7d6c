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
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from validation_rows import Row, error_table

# Ends of the titles of tables that stand apart: what was measured there is known to have been another kernel.
APART = ("Pascal's anomalous rows", "with math attention, by GPU")


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
