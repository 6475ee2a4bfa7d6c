"""Which tests reach which lines of the package, under coverage: scripts/mutate.py picks the tests of a mutant by it."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mutants import PARTS, Mutant

# Tests that do not count, and why.
LEFT_OUT = {
    "test_docs": "expects what flopmeter printed when the pages were written",
    "test_examples": "runs the examples in processes of their own",
    "test_article_script": "runs a script in a process of its own",
    "test_overhead": "times, which other work on the machine spoils",
    "test_wheel": "an installed copy",
    "test_page_browser": "starts a browser, which takes longer than all else",
    "test_makefile": "runs make, which installs an environment, and needs the Makefile",
}
RECORDS = "tests/test_recorded_prices.py"  # they reach much, and take longest


class Reached(NamedTuple):
    """What the tests reach."""

    seconds: dict[str, float]  # of each test
    lines: dict[str, dict[str, list[str]]]  # file -> line -> tests, or files of tests whose fixtures reach it

    def tests(self, mutant: Mutant) -> set[str]:
        """The tests that reach the change; for one that runs on import those that reach its file, or its folder."""
        known = [(file, str(line)) for file, line in mutant.used if str(line) in self.lines.get(file, {})]
        found = self._of(self.lines[file][line] for file, line in known)
        if not found and known:
            beside = (lines for file, lines in self.lines.items() if Path(file).parent == Path(mutant.file).parent)
            found = self._of(self.lines.get(mutant.file, {}).values()) or self._of(
                tests for lines in beside for tests in lines.values()
            )
        return found

    def _of(self, contexts: Iterable[Iterable[str]]) -> set[str]:
        named = {name for names in contexts for name in names if name}
        return {test for test in self.seconds if test in named or test.partition("::")[0] in named}

    def rarity_in(self, file: str) -> dict[str, int]:
        """For each test that reaches the file: how many tests reach the least reached of the lines that it does."""
        found = dict[str, int]()
        for named in sorted(self.lines.get(file, {}).values(), key=len, reverse=True):
            found |= dict.fromkeys(named, len(named))
        return {
            test: found[name] for test in self.seconds if (name := test if test in found else file_of(test)) in found
        }

    def lines_of_tests(self) -> Counter[str]:
        """How many lines each test reaches by itself, without the fixtures of its file."""
        return Counter(name for lines in self.lines.values() for names in lines.values() for name in names)


class _Contexts:
    """A pytest plugin: tells coverage which test runs, and notes how long each takes."""

    def __init__(self, coverage: Any):
        self.coverage, self.seconds = coverage, dict[str, float]()
        self.left_out: set[str] = set()  # they fail without a mutant, or are skipped
        self.start = 0.0

    def pytest_runtest_setup(self, item: Any) -> None:
        self.start = time.process_time()  # other work on the machine is none of the test's
        self.coverage.switch_context(item.nodeid.partition("::")[0])  # a fixture may serve all tests of its file

    def pytest_runtest_call(self, item: Any) -> None:
        _clear_caches()
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.seconds[item.nodeid] = time.process_time() - self.start
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"left out, since it fails without a mutant: {report.nodeid}", file=sys.__stderr__)
        if report.failed or report.skipped:
            self.left_out.add(report.nodeid)


def _clear_caches() -> None:
    """What an earlier test made flopmeter remember would hide the lines that this one needs."""
    kind = type(functools.cache(len))
    mutable = tuple(module_of(part) for part in PARTS)
    for name, module in list(sys.modules.items()):
        if name.startswith(mutable):
            for value in list(vars(module).values()):
                if isinstance(value, kind):
                    value.cache_clear()


def measure_all(copy: Path, only: list[str], jobs: int) -> Reached:
    """What every test that counts reaches."""
    parts = in_turn(copy, only, jobs, functools.partial(measure, copy))
    return merged(Reached(*json.loads(part.read_text(encoding="utf-8"))) for part in parts)


def in_turn(copy: Path, only: list[str], jobs: int, work: Callable[[Path, Iterator[str]], int]) -> list[Path]:
    """What processes write that run all tests that count. Each takes the next file of tests when it is done with one,
    since some take a hundred times as long as others; the recorded prices, which take longest, come first."""
    every = (path for path in sorted((copy / "tests").glob("test_*.py")) if path.stem not in LEFT_OUT)
    files = [f"tests/{path.name}" for path in every if not only or path.name in only]
    files.sort(key=RECORDS.__ne__)
    taken = multiprocessing.Value("i", 0)

    def left() -> Iterator[str]:
        while True:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(files):
                return
            yield files[number]

    parts = [copy / f"found-{number}.json" for number in range(jobs)]
    running = [in_child(functools.partial(work, part, left())) for part in parts]
    statuses = [os.waitpid(pid, 0)[1] for pid in running]
    if any(statuses):
        sys.exit("a process that runs tests ended early")
    return parts


def merged(parts: Iterable[Reached]) -> Reached:
    seconds, lines = dict[str, float](), defaultdict[str, dict[str, list[str]]](dict)
    for part in parts:
        seconds |= part.seconds
        for file, found in part.lines.items():
            for line, tests in found.items():
                lines[file].setdefault(line, []).extend(tests)
    return Reached(seconds, lines)


def measure(copy: Path, found: Path, files: Iterable[str]) -> int:
    """Run these tests, and write what each reaches. Those that fail without a mutant do not count."""
    import coverage

    measured = coverage.Coverage(data_file=None, source=[str(copy / "flopmeter")], config_file=False)
    measured.set_option("run:core", "ctrace")  # which can tell contexts
    plugin = _Contexts(measured)
    measured.start()
    for file in files:
        run_tests([file], plugin=plugin)
    measured.stop()
    for test in plugin.left_out & plugin.seconds.keys():
        del plugin.seconds[test]
    data = measured.get_data()
    lines = {str(Path(file).relative_to(copy)): data.contexts_by_lineno(file) for file in sorted(data.measured_files())}
    found.write_text(json.dumps(Reached(plugin.seconds, lines)), encoding="utf-8")
    return 0


def run_tests(files: Iterable[str], *options: str, plugin: object) -> int:
    """pytest's exit status, quietly."""
    import hypothesis
    import pytest

    # The first example that fails says enough: no smaller one is looked for.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    arguments = ["-q", "-m", "not slow", "-p", "no:xdist", "-p", "no:unraisableexception", "--hypothesis-seed=0"]
    arguments += ["--tb=no", *options, *files]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        return int(pytest.main(arguments, plugins=[plugin]))


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


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def file_of(test: str) -> str:
    return test.partition("::")[0]
