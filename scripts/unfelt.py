"""Which small faults change no value in any test, so that none can notice them?

    python scripts/unfelt.py                                                # all tests: an hour on two cores
    python scripts/unfelt.py --in flopmeter/costs --tests test_costs_by_hand.py --kinds operand

scripts/mutate.py asks of one fault at a time whether a test fails. Here the tests run once: each expression of the
package is computed beside itself with every fault of scripts/kinds.py that it can have, until that gives another value.
Faults that never do are printed by line; where none of them means anything, part of the line may be superfluous. A
fault that is felt can still go unnoticed. Not computed are what a fault does to statements, tables and whatever calls
something that may change a state, and nothing is seen of tests in processes of their own. A few tests fail, those that
count references to a tensor among them: an expression's names live longer here.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib.machinery
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from kinds import KINDS
from mutants import EQUIVALENT
from mutate import Import, enter_copy_of_checkout, options_of, single_kinds
from reached import in_turn, module_of, run_tests
from syntax import Edit, Module, name_of

MEMORY_BYTES = 7 * 2**30  # with a fault a tuple may be multiplied by a number of bytes
ALWAYS, SOMETIMES = 500, 20  # a fault is computed so often, then once in so many times
MOST_SECONDS = 0.2  # for one fault: what calls much, such as a whole report, is computed a few times alone
NOT_COMPUTED = ("string", "entry", "statement")  # they change tables and what is done, not what is computed
# What may change a state, and what else may be called where any call could.
CHANGING = {
    "append", "add", "pop", "popleft", "update", "extend", "setdefault", "clear", "remove", "insert", "next", "discard",
    "write", "push", "popitem", "appendleft", "sort", "open", "exec", "send", "record", "super",
}  # fmt: skip
HARMLESS = {
    "min", "max", "sum", "len", "any", "all", "ceil", "prod", "abs", "sorted", "tuple", "list", "set", "dict",
    "frozenset", "isinstance", "issubclass", "getattr", "hasattr", "zip", "enumerate", "range", "map", "filter", "int",
    "float", "bool", "str", "get", "items", "values", "keys", "numel", "size", "dim", "element_size", "stride", "type",
    "floor", "log2", "startswith", "endswith", "partition", "reversed", "divmod", "gcd", "pairwise", "accumulate",
    "chain", "islice",
}  # fmt: skip
# Elsewhere functions compute from their arguments alone.
WITH_STATE = (
    "flopmeter/as_cuda", "flopmeter/known_values", "flopmeter/distributed", "flopmeter/trace",
    "flopmeter/launch/fusion", "flopmeter/timing/allocator.py", "flopmeter/timing/concurrency.py",
    "flopmeter/timing/contention.py", "flopmeter/timing/timeline.py", "flopmeter/timing/peak_memory.py",
)  # fmt: skip
FELT = "__felt__"  # the name by which the changed code calls `Record.felt`
Fault = str


class Record:
    """How often each fault was computed, and which gave another value."""

    def __init__(self) -> None:
        self.computed, self.different = defaultdict[Fault, int](int), set[Fault]()
        self._seconds = defaultdict[Fault, float](float)
        self._inside = False

    def felt(self, faults: Sequence[Fault], values: Sequence[Callable[[], object]], value: Any) -> Any:
        """The value of an expression, of which each of `values` has one fault."""
        if self._inside:  # what is called by an expression with a fault is none of its own
            return value
        for fault, faulty in zip(faults, values, strict=True):
            number = self.computed[fault] = self.computed[fault] + 1
            if fault in self.different or (number > ALWAYS and number % SOMETIMES):
                continue
            if self._seconds[fault] > MOST_SECONDS:
                continue
            self._inside, start = True, time.perf_counter()
            try:
                if not are_same(value, faulty()):
                    self.different.add(fault)
            except Exception:  # so would it in the program
                self.different.add(fault)
            finally:
                self._inside = False
                self._seconds[fault] += time.perf_counter() - start
        return value


def are_same(one: Any, other: Any) -> bool:
    """Also of what cannot be compared: nobody knows that it differs."""
    if one is other:
        return True
    if type(one) is not type(other):
        return isinstance(one, (int, float)) and isinstance(other, (int, float)) and one == other
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    comparing: object = type(one).__eq__
    if comparing is object.__eq__:
        fields = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        is_ours = type(one).__module__.startswith("flopmeter")
        return not is_ours or all(are_same(getattr(one, name, None), getattr(other, name, None)) for name in fields)
    return bool(one == other)


# --- the changed code


class _Place(NamedTuple):
    """An expression, and each fault of it with the whole expression as it then is."""

    whole: ast.expr
    faults: list[tuple[Fault, ast.expr]]


def with_faults(file: str, source: str, kinds: Iterable[str]) -> ast.Module:
    """The module, whose expressions are computed with their faults too."""
    module, places = Module(source), dict[int, _Place]()
    for kind in kinds:
        for edit in KINDS[kind](module):
            whole = _whole(file, module, edit)
            change = f"{file}: {module.describe(edit)}"
            if whole is None or change in EQUIVALENT:
                continue
            fault = f"{file}:{getattr(edit.shown, 'lineno', 1)}: {kind}: {change.partition(': ')[2]}"
            places.setdefault(id(whole), _Place(whole, [])).faults.append((fault, _changed(whole, edit)))

    class Insert(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            place = places.get(id(node))
            new = self.generic_visit(node)
            if place is None:
                return new
            nothing = ast.arguments([], [], None, [], [], None, [])
            names = ast.Tuple([ast.Constant(fault) for fault, _ in place.faults], ast.Load())
            values = ast.Tuple([ast.Lambda(nothing, faulty) for _, faulty in place.faults], ast.Load())
            return ast.Call(ast.Name(FELT, ast.Load()), [names, values, cast(ast.expr, new)], [])

    tree: ast.Module = Insert().visit(module.tree)
    return ast.fix_missing_locations(tree)


def _changed(whole: ast.expr, edit: Edit) -> ast.expr:
    if isinstance(edit.owner, ast.stmt):
        return copy.deepcopy(edit.new)
    before = getattr(edit.owner, edit.field)
    setattr(edit.owner, edit.field, edit.new)
    changed = copy.deepcopy(whole)
    setattr(edit.owner, edit.field, before)
    return changed


def _whole(file: str, module: Module, edit: Edit) -> ast.expr | None:
    """The largest expression around the edit, of a statement in a function, that can be computed again."""
    if module.function(edit.owner) is None:
        return None
    if isinstance(edit.owner, ast.stmt):
        old = getattr(edit.owner, edit.field)
        can = isinstance(old, ast.expr) and isinstance(edit.new, ast.expr) and not isinstance(edit.owner, ast.For)
        return old if can and _is_pure(file, old) and _is_pure(file, edit.new) else None
    found = None
    for node in (edit.owner, *module.above(edit.owner)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.arguments)):
            return None  # the head of a function is read once
        if isinstance(node, (ast.stmt, ast.Lambda)):
            return found
        if not isinstance(node, ast.expr) or isinstance(node, (ast.GeneratorExp, ast.Starred, ast.Slice)):
            continue
        if isinstance(getattr(node, "ctx", None), (ast.Load, type(None))) and _is_pure(file, node):
            found = node
    return None


def _is_pure(file: str, node: ast.AST) -> bool:
    for each in ast.walk(node):
        if isinstance(each, (ast.Yield, ast.YieldFrom, ast.Await)):
            return False
        if isinstance(each, ast.Call):
            name = name_of(each.func)
            is_harmless = name in HARMLESS or name[:1].isupper() or not file.startswith(WITH_STATE)
            if name in CHANGING or not is_harmless:
                return False
    return True


class _Faulty(importlib.machinery.SourceFileLoader):
    """Runs the changed code in place of the file."""

    def __init__(self, file: str, path: Path, kinds: Iterable[str]):
        super().__init__(module_of(file), str(path))
        self._file, self._kinds = file, kinds

    def get_code(self, fullname: str) -> CodeType:
        return compile(with_faults(self._file, Path(self.path).read_text("utf-8"), self._kinds), self.path, "exec")


def run(folder: Path, parts: Sequence[str], kinds: Sequence[str], found: Path, files: Iterator[str]) -> int:
    """Run these tests, and write what each fault did."""
    record = Record()
    setattr(builtins, FELT, record.felt)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    paths = (path for part in parts for path in sorted((folder / part).rglob("*.py")) or [folder / part])
    files_of = {str(path.relative_to(folder)): path for path in paths}
    sys.meta_path.insert(0, Import(*(_Faulty(file, path, kinds) for file, path in files_of.items())))
    for file in files:
        run_tests([file], plugin=object())
    found.write_text(json.dumps((record.computed, sorted(record.different))), encoding="utf-8")
    return 0


def main() -> int:
    chosen = options_of(__doc__).parse_args()
    kinds = [kind for kind in single_kinds(chosen.kinds) if kind not in NOT_COMPUTED]
    os.environ.update(OMP_NUM_THREADS="1")
    computed, different = defaultdict[Fault, int](int), set[Fault]()
    with tempfile.TemporaryDirectory() as name:
        folder = enter_copy_of_checkout(Path(name))
        work = functools.partial(run, folder, chosen.parts, kinds)
        for part in in_turn(folder, chosen.tests, chosen.jobs, work):
            times, felt = json.loads(part.read_text(encoding="utf-8"))
            different.update(felt)
            for fault, number in times.items():
                computed[fault] += number
    unfelt = sorted(computed.keys() - different, key=_by_line)
    for fault in unfelt:
        print(f"{fault} (computed {computed[fault]} times)")
    print(f"{len(unfelt)} of {len(computed)} faults that tests reach changed no value in them")
    return 0


def _by_line(fault: Fault) -> tuple[str, int]:
    file, line, *_ = fault.split(":")
    return file, int(line)


if __name__ == "__main__":
    sys.exit(main())
