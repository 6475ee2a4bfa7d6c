"""Mutation testing: does a test notice a small fault in the models of cost and time, or in what feeds them?

    python scripts/mutate.py                            # 300 mutants: half an hour on two cores
    python scripts/mutate.py --mutants 100 --seed 1 --in flopmeter/costs --kinds number keyword
    python scripts/mutate.py --list                     # how many mutants there are, by module

A mutant is the package with one change of one of the kinds in scripts/kinds.py: `--kinds arithmetic` changes constants
and operators, `--kinds structure` what is passed, read, done and returned, `--kinds portions` leaves out a part of what
is computed, `--kinds neighbours` takes a value that stands beside the right one, `--kinds substitutes` another constant
or function of its kind. They are drawn by seed. First the tests run once under coverage, which tells the tests that
reach each line; a mutant then runs the tests that reach its statement, those first that name what it names, then those
about its file, then quick and narrow ones, until one fails or a limit of time ends it (an endless loop counts as
noticed). Tests that expect what flopmeter itself printed earlier do not count. Prints the survivors, then the rate;
writes both to docs/mutants.md where all modules were drawn from; exit status 1 if the rate is below 93 %.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import date
from importlib.metadata import version
from importlib.util import spec_from_file_location
from itertools import accumulate, zip_longest
from math import ceil
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from kinds import GROUPS, KINDS
from mutants import EQUIVALENT, PARTS, ROOT, Mutant, all_mutants, draw, mutated, words
from reached import RECORDS, Reached, file_of, in_child, measure_all, module_of, run_tests

COPIED = (
    "flopmeter", "hardware", "tests", "scripts", "docs", "validation", "pyproject.toml", "README.md", "CHANGELOG.md",
)  # fmt: skip
GOAL = 0.93
PAGE = ROOT / "docs" / "mutants.md"
BY_A_RECORD = 71  # exit status: recorded prices count, but say nothing of the truth, so they are told apart
NO_TESTS = 5  # exit status of pytest: the tests are skipped, or gone since the recording
# Imported once, before the processes of the mutants are forked from this one.
PRELOADED = ("torch", "hypothesis", "torch.testing._internal.common_methods_invocations", "matplotlib.pyplot")
FEW = 8  # tests of few files: importing the files of all takes longer
ENOUGH_SECONDS = 50.0  # of CPU for one mutant: of the tests that reach it, those in front
FIRST_SECONDS = 2.0  # of CPU: tests that run before the files of the others are imported, which often takes longer
NAMED_SECONDS = 8.0  # of CPU: tests that name what the mutant names run before all others, the rarest names first
MOST_NAMED = 200  # tests that may have a word, of which it then tells something
RECORDS_SECONDS = 25.0  # of CPU: recorded prices that run next; they reach much, and would else come last
BESIDE_SECONDS = 8.0  # of CPU: then those that reach what few others reach of the same file: they are about it
QUICK_SECONDS = 12.0  # of CPU: the quickest of the others, which are hundreds, before slow ones of every file
LEAST_SECONDS = 0.01  # of a test, with what pytest does around it
MEMORY_BYTES = 8 * 2**30  # that a mutant may ask for


class _Chosen:
    """A pytest plugin: runs these tests, in this order."""

    def __init__(self, tests: list[str]):
        self.order = {test: place for place, test in enumerate(tests)}
        self.noticed_by = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.noticed_by = report.nodeid


class _Mutant(importlib.machinery.SourceFileLoader):
    """Runs the mutant in place of the file."""

    def __init__(self, module: str, path: Path, source: str):
        super().__init__(module, str(path))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")


class Import(importlib.abc.MetaPathFinder):
    """Loads these modules otherwise than from their files."""

    def __init__(self, *loaders: importlib.machinery.SourceFileLoader):
        self.loaders = {loader.name: loader for loader in loaders}

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        loader = self.loaders.get(fullname)
        if loader is None:
            return None
        file = Path(loader.path)
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)


def attempt(mutant: Mutant, parts: tuple[list[str], ...], seconds: float) -> int:
    """0 if the tests pass on the mutant, BY_A_RECORD if a recorded price is the first that fails."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    signal.alarm(int(10 * seconds))  # for one that waits
    path = Path(mutant.file).absolute()
    source = mutated(path.read_text(encoding="utf-8"), mutant.kind, mutant.place)
    sys.meta_path.insert(0, Import(_Mutant(module_of(mutant.file), path, source)))
    for tests in filter(None, parts):
        chosen = _Chosen(tests)
        status = run_tests(sorted({*map(file_of, tests)}), "-x", plugin=chosen)
        if status not in (0, NO_TESTS):
            return BY_A_RECORD if file_of(chosen.noticed_by) == RECORDS else status
    return 0


class Verdict(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    tests: int  # that ran on it, or would have
    status: int  # 0: none of them failed

    @property
    def word(self) -> str:
        return {0: "SURVIVED", BY_A_RECORD: "recorded"}.get(self.status, "noticed ")


class Trial(NamedTuple):
    """A mutant, the tests that are to notice it, and the CPU seconds after which it counts as endless."""

    mutant: Mutant
    tests: tuple[list[str], ...]  # in stages: the files of the next are not imported before those of one have passed
    seconds: float


def trials_of(drawn: list[Mutant], reached: Reached) -> list[Trial]:
    lines = reached.lines_of_tests()
    # Those come first that are quick, and about little else.
    ranks = {test: (seconds + LEAST_SECONDS) * lines[test] for test, seconds in reached.seconds.items()}
    named_by, rarity_in = tests_that_name(reached.seconds), functools.cache(reached.rarity_in)
    trials = []
    for mutant in drawn:
        readers = (named_by.get(table, ()) for table in mutant.tables)
        tests = sorted(reached.tests(mutant).union(*readers), key=ranks.__getitem__)
        rarity = dict[str, int]()
        for word in sorted(mutant.names & named_by.keys(), key=lambda word: -len(named_by[word])):
            rarity |= dict.fromkeys(named_by[word], len(named_by[word]))  # a rarer word comes later
        named = sorted((test for test in tests if test in rarity), key=rarity.__getitem__)
        first = _within(named, NAMED_SECONDS, reached)
        first += _within(_without(first, tests), FIRST_SECONDS, reached)
        beside = rarity_in(mutant.file)
        near = sorted((test for test in tests if file_of(test) != RECORDS and test in beside), key=beside.__getitem__)
        first += _within(_without(first, near), BESIDE_SECONDS, reached)
        rest = _without(first, tests)
        records = [test for test in rest if file_of(test) == RECORDS]
        # Narrow ones that all do the same say less than narrow and broad ones in turn.
        spread = _spread(records, RECORDS_SECONDS, reached)
        rest = _without(spread, rest)
        quick = _within(sorted(rest, key=reached.seconds.__getitem__), QUICK_SECONDS, reached)
        by_file = defaultdict[str, list[str]](list)
        for test in _without(quick, rest):
            by_file[file_of(test)].append(test)
        in_turn = [test for turn in zip_longest(*by_file.values()) for test in turn if test]
        others = _within([*spread, *quick, *in_turn], ENOUGH_SECONDS, reached)
        seconds = sum(reached.seconds[test] for test in (*first, *others))
        trials.append(Trial(mutant, (first[:FEW], first[FEW:], others), 30 + 4 * seconds))
    return trials


def tests_that_name(tests: Collection[str]) -> dict[str, list[str]]:
    """Word -> the tests that have it in their name, that of their file, their case or their code; words of many tests
    say nothing, nor do names of what has a recorded price."""
    code = {file: _functions(Path(file)) for file in {file_of(test) for test in tests}}
    found = defaultdict[str, list[str]](list)
    for test in tests:
        if file_of(test) == RECORDS:
            continue
        file, _, name = test.partition("::")
        told = code[file].get(re.split(r"::|\[", name)[0], frozenset())
        for word in words(Path(file).stem) | words(name) | told:
            found[word].append(test)
    return {word: named for word, named in found.items() if len(named) <= MOST_NAMED}


def _functions(file: Path) -> dict[str, frozenset[str]]:
    """The words of each function of a file of tests."""
    text = file.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = {}
    for node in functions:
        first = min((each.lineno for each in node.decorator_list), default=node.lineno)
        found[node.name] = words("\n".join(lines[first - 1 : node.end_lineno]))
    return found


def _without(some: list[str], tests: list[str]) -> list[str]:
    those = {*some}
    return [test for test in tests if test not in those]


def _spread(tests: list[str], seconds: float, reached: Reached) -> list[str]:
    """Tests from all over the list that take so long together."""
    whole = sum(reached.seconds[test] for test in tests)
    return tests[:: max(1, ceil(whole / seconds))]


def _within(tests: list[str], seconds: float, reached: Reached) -> list[str]:
    """Those in front that take so long together."""
    return tests[: bisect_right(list(accumulate(reached.seconds[test] for test in tests)), seconds)]


def verdicts_on(trials: list[Trial], jobs: int) -> Iterator[Verdict]:
    """In the order in which they come."""
    waiting, running = list(reversed(trials)), dict[int, tuple[Mutant, int]]()
    done = 0
    gc.collect()
    gc.freeze()  # else each collection in a child walks, and so copies, what this process holds
    while waiting or running:
        if waiting and len(running) < jobs:
            trial = waiting.pop()
            running[in_child(functools.partial(attempt, *trial))] = (trial.mutant, sum(map(len, trial.tests)))
            continue
        pid, status = os.wait()
        verdict = Verdict(*running.pop(pid), os.waitstatus_to_exitcode(status))
        done += 1
        print(f"{done}/{len(trials)} {verdict.word} {verdict.mutant}", file=sys.stderr, flush=True)
        yield verdict


def known_verdicts(log: Path | None, drawn: list[Mutant]) -> dict[Mutant, Verdict]:
    """Those of a run that was cut off."""
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    known = {(file, kind, place): rest for file, kind, place, *rest in map(json.loads, lines)}
    return {mutant: Verdict(mutant, *known[mutant[:3]]) for mutant in drawn if mutant[:3] in known}


def single_kinds(names: Iterable[str]) -> list[str]:
    """Each kind of the groups."""
    return [kind for name in names for kind in GROUPS.get(name, [name])]


def enter_copy_of_checkout(folder: Path) -> Path:
    """Go on in a copy, from which this process and those that it starts import."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    os.environ["PYTHONPATH"] = str(folder)
    return folder


def main() -> int:
    chosen = _arguments()
    kinds = single_kinds(chosen.kinds)
    mutants = all_mutants(chosen.parts, kinds)
    if chosen.list:
        for file, count in Counter(mutant.file for mutant in mutants).items():
            print(f"{count:5} {file}")
        return 0
    drawn = draw(mutants, chosen.mutants, random.Random(chosen.seed))
    os.environ.update(OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = False  # in the copy: else each mutant's process compiles the package and the tests
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = enter_copy_of_checkout(Path(folder))
        found = chosen.reached or copy / "reached.json"
        if not found.exists():
            start = time.monotonic()
            found.write_text(json.dumps(measure_all(copy, chosen.tests, chosen.jobs)), encoding="utf-8")
            print(f"what tests reach: {time.monotonic() - start:.0f} s", file=sys.stderr)
        reached = Reached(*json.loads(found.read_text(encoding="utf-8")))
        if not reached.seconds:
            sys.exit("no test passes without a mutant")
        known = known_verdicts(chosen.verdicts, drawn)
        verdicts = [known[mutant] for mutant in drawn if mutant in known]
        trials = trials_of([mutant for mutant in drawn if mutant not in known], reached)
        del reached
        for verdict in verdicts_on(trials, chosen.jobs):
            verdicts.append(verdict)
            if chosen.verdicts:
                with chosen.verdicts.open("a", encoding="utf-8") as log:
                    print(json.dumps((*verdict.mutant[:3], verdict.tests, verdict.status)), file=log)
            if not verdict.status:
                print(f"survived: {verdict.mutant} ({verdict.tests} tests)", flush=True)
    said, rate = summary(verdicts, f"{' and '.join(chosen.kinds)}, seed {chosen.seed}")
    print(said)
    if chosen.parts == PARTS and len(drawn) == chosen.mutants:
        survivors = [verdict.mutant for verdict in verdicts if not verdict.status]
        PAGE.write_text(page(said, survivors), encoding="utf-8")
    return int(rate < GOAL)


def summary(verdicts: list[Verdict], how: str) -> tuple[str, float]:
    """One line, and the share that was noticed."""
    noticed = [verdict for verdict in verdicts if verdict.status]
    records, rate = sum(verdict.status == BY_A_RECORD for verdict in noticed), len(noticed) / len(verdicts)
    count = f"{len(noticed)} of {len(verdicts)} mutants noticed ({rate:.1%})"
    return f"{count}, {records} of them by a recorded price before any other test; {how}", rate


def page(verdict: str, survivors: list[Mutant]) -> str:
    lines = [f"- `{mutant}`" for mutant in sorted(survivors, key=str)]
    never = [f"- `{change}`: {reason}" for change, reason in sorted(EQUIVALENT.items())]
    return "\n".join((
        "# Mutants", "",
        "Written by `make mutants`: small faults in the models of cost and time and in what feeds them.", "",
        f"{date.today()}, torch {version('torch')}: {verdict}.", "", "Survivors:", "", *(lines or ["none"]), "",
        "Never drawn, since nobody could see them:", "", *(never or ["none"]), "",
    ))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--mutants", type=int, default=300, help="how many to draw (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reached", type=Path, metavar="FILE", help="keeps what the tests reach from run to run")
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help="keeps verdicts, for a run that is cut off")
    parser.add_argument("--list", action="store_true", help="print how many mutants there are")
    return parser.parse_args()


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Which faults, and which tests."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="parts", nargs="+", default=PARTS, metavar="PATH", help=f"of {' '.join(PARTS)}")
    parser.add_argument(
        "--kinds", nargs="+", default=list(GROUPS), choices=[*GROUPS, *KINDS], metavar="KIND",
        help=f"of {' '.join(KINDS)}; or {' and '.join(GROUPS)} (default)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one a core)")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="FILE", help="of tests/: no others run (default: all)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
