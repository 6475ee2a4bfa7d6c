"""Run the long sweeps and write what came of them to docs/sweep.md.

    make sweep                            # or: python scripts/sweep.py; about an hour on two cores
    python scripts/sweep.py -- -k wheel   # some of them, printed and not written

Runs the tests marked `slow`, and those that search for an example that breaks a law: `make test` lets hypothesis draw
the same examples each time, so that no search stops somebody else's change; this draws new ones. Those over torch's
op_db tell how many entries, samples and ops they ran: every sample of every entry, forward and, where there is one,
backward. Exit status 1 if any test fails or none swept op_db; the page names what failed and which files did not run.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sweep.md"
COLUMNS = ("entries", "samples", "refused", "sparse", "calls", "ops", "uncounted", "failures")
COMPILED = ("kernels", "by rules", "MB", "MB by rules")
COMPILED_LEGEND = """\
Each row is one program, compiled by torch's own compiler up to its Scheduler, whose **kernels** were recorded one for
one (or the test fails), and the same program **by the rules** of `flopmeter/launch/fusion`; **MB** are read and
written, the eager kernels around the graphs included."""
LEGEND = """\
Each row is one pass over torch's op_db: **entries** of the database, **samples** of them; those **refused** by torch
itself (no kernel for meta, a shape that depends on data), with or without the meter; those with **sparse** tensors,
whose work depends on values. Of the rest, the **calls** that were priced, of so many **ops** (overloads); the ops that
were **uncounted**; the **failures**: calls without a rule that the test does not name, or with bytes out of bounds."""


class Result(NamedTuple):
    """One test, or a file that was skipped as a whole for want of a package; that has no name."""

    file: str
    name: str
    outcome: str  # passed, failed, skipped
    figures: dict[str, str]  # that the test recorded
    reason: str = ""  # why it was skipped


def run(arguments: list[str]) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "--dist",
            "worksteal",
            "-m",
            "slow or hypothesis",
            f"--junitxml={path}",
            *arguments,
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        return [_result(case) for case in ET.parse(path).iter("testcase")]


def _result(case: ET.Element) -> Result:
    tags = {child.tag for child in case}
    outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
    figures = {entry.get("name", ""): entry.get("value", "") for entry in case.iter("property")}
    skipped = case.find("skipped")
    reason = "" if skipped is None else (skipped.text or "").rpartition("Skipped: ")[2].strip("')\"")
    module, name = case.get("classname", ""), case.get("name", "")
    if not module:  # a file that is skipped as a whole: pytest has it as a test of its name, without a class
        module, name = name, ""
    return Result(module.rpartition(".")[2], name, outcome, figures, reason)


def page(results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    total = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    head = f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}: {total}."
    swept, compiled = _table(results, COLUMNS), _table(results, COMPILED)
    files = {result.file for result in results}
    by_file = [(f"`{file}`", *_outcomes(result for result in results if result.file == file)) for file in sorted(files)]
    failed = [f"- `{result.file}`: `{result.name}`" for result in results if result.outcome == "failed"]
    absent = [f"- `{result.file}`: {result.reason}" for result in results if not result.name]
    return "\n\n".join((
        "# The long sweeps",
        "Written by `make sweep`.",
        head,
        "## Every op of torch's database",
        LEGEND,
        tabulate(swept, headers=("run", *COLUMNS), tablefmt="github"),
        "## Compiled programs",
        COMPILED_LEGEND,
        tabulate(compiled, headers=("program", *COMPILED), tablefmt="github"),
        "## All tests marked slow, and searches by hypothesis",
        tabulate(by_file, headers=("file", "passed", "skipped", "failed"), tablefmt="github"),
        "\n".join(["Failures:", "", *failed]) if failed else "Failures: none.",
        *(["\n".join(["Files skipped as a whole, which may hold such tests:", "", *absent])] if absent else []),
    )) + "\n"  # fmt: skip


def _table(results: Iterable[Result], columns: tuple[str, ...]) -> list[tuple[str | None, ...]]:
    """A row for each test that recorded these figures."""
    rows = (result for result in results if columns[0] in result.figures)
    return [(_parameters(result), *map(result.figures.get, columns)) for result in rows]


def _parameters(result: Result) -> str:
    return result.name.partition("[")[2].rstrip("]").replace("-torch.", ", ")


def _outcomes(results: Iterable[Result]) -> tuple[int, ...]:
    counts = Counter(result.outcome for result in results)
    return tuple(counts[outcome] for outcome in ("passed", "skipped", "failed"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="of pytest, after --; then nothing is written")
    chosen = parser.parse_args()
    results = run(chosen.pytest)
    text = page(results)
    print(text)
    if results and not chosen.pytest:
        PAGE.write_text(text, encoding="utf-8")
    incomplete = not results if chosen.pytest else not _table(results, COLUMNS)
    return int(incomplete or any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
