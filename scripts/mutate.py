"""Mutation testing: does a test notice when a constant or an operator of the models of cost and time is wrong?

    python scripts/mutate.py                            # 300 mutants: half an hour on two cores
    python scripts/mutate.py --mutants 100 --seed 1 --in flopmeter/costs
    python scripts/mutate.py --list                     # how many mutants there are, by module

A mutant is the package with one change: an integer one more or one less, another number doubled or halved, one
arithmetic operator, comparison, and/or, min/max or `not` flipped. They are drawn by seed. First the tests run once
under coverage, which tells the tests that reach each line; a mutant then runs the tests that reach its statement, the
fastest first, until one fails or a limit of CPU time ends it (an endless loop counts as noticed). Tests that expect
what flopmeter itself printed earlier do not count. Prints the survivors, then the rate, and writes both to
docs/mutants.md where all modules were drawn from; exit status 1 if the rate is below 90 %.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("flopmeter", "hardware", "tests", "scripts", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
PARTS = (
    "flopmeter/costs", "flopmeter/timing", "flopmeter/fusion", "flopmeter/modes.py", "flopmeter/memory.py",
    "flopmeter/allocator.py",
)  # fmt: skip
GOAL = 0.9
PAGE = ROOT / "docs" / "mutants.md"
# Survivors that change nothing that anyone could see, and why: `file: change`, without the line.
EQUIVALENT: dict[str, str] = {}
# Tests that do not count, and why.
LEFT_OUT = {
    "test_docs": "expects what flopmeter printed when the pages were written",
    "test_examples": "runs the examples in processes of their own",
    "test_article_script": "runs a script in a process of its own",
    "test_overhead": "times, which other work on the machine spoils",
    "test_leaks": "holds nothing of cost or time",
    "test_hugging_face": "needs transformers",
    "test_wheel": "an installed copy",
}
# Imported once, before the processes of the mutants are forked from this one.
PRELOADED = ("torch", "hypothesis", "torch.testing._internal.common_methods_invocations", "matplotlib.pyplot")
ENOUGH_SECONDS = 30.0  # of tests for one mutant: of those that reach it, the slowest are left out beyond
MEMORY_BYTES = 8 * 2**30  # that a mutant may ask for

FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change: in this file, at this place of the sequence that `places` yields."""

    file: str
    place: int
    lines: range  # of the statement, or of the head of a compound one
    line: int  # of the change itself
    change: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    @property
    def reason(self) -> str | None:
        """Why nobody could notice it."""
        return EQUIVALENT.get(f"{self.file}: {self.change}")


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that can be changed, in a fixed order; annotations and docstrings are no code."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        docstring = [node.value] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else []
        for part in filter(None, (*annotations, *docstring)):
            skipped.update(id(child) for child in ast.walk(part))
        if id(node) not in skipped and _can_change(node):
            yield node


def _can_change(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int or (type(node.value) is float and node.value != 0)
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        return type(node.op) in FLIPS
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in FLIPS
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Name) and node.id in NAMES


def change(node: ast.AST, rng: random.Random) -> str:
    """Change the node; what was done, in words."""
    before = ast.unparse(node)
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, (int, float))
        if isinstance(node.value, int):
            node.value += rng.choice((1, -1))
        else:
            node.value *= rng.choice((2, 0.5))
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        node.op = FLIPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops[0] = FLIPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.Name):
        node.id = NAMES[node.id]
    else:
        assert isinstance(node, ast.UnaryOp)
        node.op = ast.UAdd()  # `+x` of a truth value keeps it
    return f"{before}  ->  {ast.unparse(node)}"


def mutated(source: str, place: int, seed: int) -> tuple[str, ast.AST, str]:
    """The source with one change, the node that was changed, and what was done."""
    tree = ast.parse(source)
    node = list(places(tree))[place]
    what = change(node, random.Random(f"{seed} {place}"))
    return ast.unparse(tree), node, what


def all_mutants(parts: Iterable[str], seed: int) -> list[Mutant]:
    found = []
    for part in parts:
        for path in sorted((ROOT / part).glob("*.py")) or [ROOT / part]:
            source = path.read_text(encoding="utf-8")
            statements = list(_statements(ast.parse(source)))
            for place in range(len(list(places(ast.parse(source))))):
                _, node, what = mutated(source, place, seed)
                line: int = getattr(node, "lineno", 1)
                lines = min((lines for lines in statements if line in lines), key=len)
                found.append(Mutant(str(path.relative_to(ROOT)), place, lines, line, what))
    return found


def _statements(tree: ast.AST) -> Iterator[range]:
    """The lines of each statement; of a compound one those before its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
            yield range(node.lineno, end + 1)


class Reached(NamedTuple):
    """What the tests reach."""

    seconds: dict[str, float]  # of each test
    lines: dict[str, dict[str, list[str]]]  # file -> line -> tests, or files of tests whose fixtures reach it

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach the statement; for one that runs on import those that reach its file, or its folder."""
        here = self.lines.get(mutant.file, {})
        found = self._of(here[str(line)] for line in mutant.lines if str(line) in here)
        if not found and any(str(line) in here for line in mutant.lines):
            beside = (lines for file, lines in self.lines.items() if Path(file).parent == Path(mutant.file).parent)
            found = self._of(here.values()) or self._of(tests for lines in beside for tests in lines.values())
        return self._fastest(found)

    def _of(self, contexts: Iterable[Iterable[str]]) -> set[str]:
        named = {name for names in contexts for name in names if name}
        return {test for test in self.seconds if test in named or test.partition("::")[0] in named}

    def _fastest(self, tests: set[str]) -> list[str]:
        chosen, total = [], 0.0
        for test in sorted(tests, key=self.seconds.__getitem__):
            total += self.seconds[test]
            if total > ENOUGH_SECONDS:
                break
            chosen.append(test)
        return chosen


class _Contexts:
    """A pytest plugin: tells coverage which test runs, and notes how long each takes."""

    def __init__(self, coverage: Any):
        self.coverage, self.seconds = coverage, dict[str, float]()
        self.failed: list[str] = []

    def pytest_runtest_setup(self, item: Any) -> None:
        self.coverage.switch_context(item.nodeid.partition("::")[0])  # a fixture may serve all tests of its file

    def pytest_runtest_call(self, item: Any) -> None:
        _clear_caches()
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_teardown(self) -> None:
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call":
            self.seconds[report.nodeid] = report.duration


def _clear_caches() -> None:
    """What an earlier test made flopmeter remember would hide the lines that this one needs."""
    kind = type(functools.cache(len))
    mutable = tuple(_module(part) for part in PARTS)
    for name, module in list(sys.modules.items()):
        if name.startswith(mutable):
            for value in list(vars(module).values()):
                if isinstance(value, kind):
                    value.cache_clear()


class _Chosen:
    """A pytest plugin: runs these tests, in this order."""

    def __init__(self, tests: list[str]):
        self.order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])


class _Mutant(importlib.machinery.SourceFileLoader):
    """Runs the mutant in place of the file."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec")


class _Import(importlib.abc.MetaPathFinder):
    """Finds the module that has the mutant."""

    def __init__(self, module: str, path: Path, source: str):
        self.module, self.path = module, path
        self.loader = _Mutant(module, str(path))
        self.loader.source = source

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        inside = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return spec_from_file_location(fullname, self.path, loader=self.loader, submodule_search_locations=inside)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def run_tests(files: Iterable[str], *options: str, plugin: object) -> int:
    """pytest's exit status, quietly."""
    import pytest

    arguments = ["-q", "-m", "not slow", "-p", "no:xdist", "--hypothesis-seed=0", *options, *files]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        return int(pytest.main(arguments, plugins=[plugin]))


def measure(copy: Path, found: Path) -> int:
    """Run every test that counts, and write what it reaches. Those that fail without a mutant do not count."""
    import coverage

    measured = coverage.Coverage(data_file=None, source=[str(copy / "flopmeter")], config_file=False)
    measured.set_option("run:core", "ctrace")  # which can tell contexts
    plugin = _Contexts(measured)
    files = [f"tests/{path.name}" for path in sorted((copy / "tests").glob("test_*.py")) if path.stem not in LEFT_OUT]
    measured.start()
    run_tests(files, plugin=plugin)
    measured.stop()
    for test in plugin.failed:
        print(f"left out, since it fails without a mutant: {test}", file=sys.__stderr__)
        plugin.seconds.pop(test, None)
    data = measured.get_data()
    lines = {str(Path(file).relative_to(copy)): data.contexts_by_lineno(file) for file in sorted(data.measured_files())}
    found.write_text(json.dumps(Reached(plugin.seconds, lines)), encoding="utf-8")
    return int(not plugin.seconds)


def attempt(mutant: Mutant, tests: list[str], seed: int, seconds: float) -> int:
    """0 if the tests pass on the mutant."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    signal.alarm(int(10 * seconds))  # for one that waits
    path = Path(mutant.file).absolute()
    source = mutated(path.read_text(encoding="utf-8"), mutant.place, seed)[0]
    sys.meta_path.insert(0, _Import(_module(mutant.file), path, source))
    return run_tests(sorted({test.partition("::")[0] for test in tests}), "-x", plugin=_Chosen(tests))


def in_child(work: Callable[[], int]) -> int:
    """Fork; the process id of the child, which exits with what the work returns."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.__stderr__)
    finally:
        os._exit(status)


def survivors_of(drawn: list[Mutant], reached: Reached, seed: int, jobs: int) -> Iterator[tuple[Mutant, int]]:
    """The mutants that no test notices, with how many tests ran on them."""
    waiting, running = list(reversed(drawn)), dict[int, tuple[Mutant, int]]()
    done = 0
    while waiting or running:
        if waiting and len(running) < jobs:
            mutant = waiting.pop()
            tests = reached.tests(mutant)
            limit = 30 + 4 * sum(map(reached.seconds.__getitem__, tests))
            work = functools.partial(attempt, mutant, tests, seed, limit) if tests else int
            running[in_child(work)] = (mutant, len(tests))
            continue
        pid, status = os.wait()
        mutant, count = running.pop(pid)
        done += 1
        noticed = os.waitstatus_to_exitcode(status) != 0
        print(f"{done}/{len(drawn)} {'noticed ' if noticed else 'SURVIVED'} {mutant.file}", file=sys.stderr, flush=True)
        if not noticed:
            yield mutant, count


def copy_of_checkout(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def main() -> int:
    chosen = _arguments()
    mutants = all_mutants(chosen.parts, chosen.seed)
    if chosen.list:
        for file, count in Counter(mutant.file for mutant in mutants).items():
            print(f"{count:5} {file}")
        return 0
    drawn = random.Random(chosen.seed).sample(mutants, min(chosen.mutants, len(mutants)))
    os.environ.update(OMP_NUM_THREADS="1")
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder))
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]
        os.environ["PYTHONPATH"] = str(copy)
        found = chosen.reached or copy / "reached.json"
        if not found.exists():
            start = time.monotonic()
            _, status = os.waitpid(in_child(functools.partial(measure, copy, found)), 0)
            print(f"what tests reach: {time.monotonic() - start:.0f} s", file=sys.stderr)
            if status:
                sys.exit("no test passes without a mutant")
        reached = Reached(*json.loads(found.read_text(encoding="utf-8")))
        survivors = []
        for mutant, count in survivors_of(drawn, reached, chosen.seed, chosen.jobs):
            print(f"survived: {mutant} ({count} tests)", flush=True)
            survivors.append(mutant)
    verdict, rate = summary(drawn, survivors, chosen.seed)
    print(verdict)
    if chosen.parts == PARTS and len(drawn) == chosen.mutants:
        PAGE.write_text(page(verdict, survivors), encoding="utf-8")
    return int(rate < GOAL)


def summary(drawn: list[Mutant], survivors: list[Mutant], seed: int) -> tuple[str, float]:
    """One line, and the share that was noticed. Equivalent mutants count as survivors too."""
    noticed, equivalent = len(drawn) - len(survivors), sum(mutant.reason is not None for mutant in survivors)
    rate = noticed / len(drawn)
    return f"{noticed} of {len(drawn)} mutants noticed ({rate:.1%}), {equivalent} equivalent, seed {seed}", rate


def page(verdict: str, survivors: list[Mutant]) -> str:
    lines = [f"- `{mutant}`" + (f": {mutant.reason}" if mutant.reason else "") for mutant in sorted(survivors, key=str)]
    return "\n".join((
        "# Mutants", "", "Written by `make mutants`: small faults in the models of cost and time.", "",
        f"{date.today()}, torch {version('torch')}: {verdict}.", "", "Survivors:", "", *(lines or ["none"]), "",
    ))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, help="how many to draw (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in", dest="parts", nargs="+", default=PARTS, metavar="PATH", help=f"of {' '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one a core)")
    parser.add_argument("--reached", type=Path, metavar="FILE", help="keeps what the tests reach from run to run")
    parser.add_argument("--list", action="store_true", help="print how many mutants there are")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
