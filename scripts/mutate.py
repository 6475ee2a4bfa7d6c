"""Mutation testing of the cost and time models: does a test notice when a constant or an operator is wrong?

    python scripts/mutate.py --mutants 60 --seed 1      # about a quarter of a minute of CPU each
    python scripts/mutate.py --list                     # how many mutants there are, by module

A mutant is the package with one change in flopmeter/costs or flopmeter/timing: an integer one more or one less, another
number doubled or halved, one arithmetic operator, comparison, and/or, min/max or `not` flipped. Mutants are drawn by
seed. Each runs in a copy of the checkout under the tests of its part, the quick files first, until one fails or the
time is up (an endless loop counts as noticed). Prints the survivors, then the rate; exit status 1 if it is below 90 %.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("flopmeter", "hardware", "tests", "scripts", "pyproject.toml", "README.md")
GOAL = 0.9

# Tests of each part, the quick ones first.
TESTS = {
    "flopmeter/costs": (
        ("test_costs_by_hand", "test_costs_cases", "test_costs_counter", "test_costs_attention", "test_costs_bytes",
         "test_costs_custom", "test_costs_devices", "test_costs_laws", "test_bert_table", "test_report"),
        ("test_costs_rules", "test_costs_sweep", "test_costs_jax"),
    ),
    "flopmeter/timing": (
        ("test_timing", "test_timing_laws", "test_timing_timeline", "test_timing_bands", "test_article",
         "test_bert_table", "test_modes", "test_report"),
    ),
}  # fmt: skip

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
    line: int
    change: str


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
        return type(node.value) in (int, float)
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


def mutated(source: str, place: int, seed: int) -> tuple[str, int, str]:
    """The source with one change, the line of it, and what it is."""
    tree = ast.parse(source)
    node = list(places(tree))[place]
    what = change(node, random.Random(f"{seed} {place}"))
    return ast.unparse(tree), getattr(node, "lineno", 0), what


def all_mutants(seed: int) -> list[Mutant]:
    found = []
    for part in TESTS:
        for path in sorted((ROOT / part).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            for place in range(len(list(places(ast.parse(source))))):
                _, line, what = mutated(source, place, seed)
                found.append(Mutant(str(path.relative_to(ROOT)), place, line, what))
    return found


def is_noticed(mutant: Mutant, copy: Path, seed: int, seconds: float) -> bool:
    """Whether a test fails on the mutant."""
    file = copy / mutant.file
    original = file.read_text(encoding="utf-8")
    file.write_text(mutated(original, mutant.place, seed)[0], encoding="utf-8")
    try:
        return any(not passes(group, copy, seconds) for group in TESTS[str(Path(mutant.file).parent)])
    finally:
        file.write_text(original, encoding="utf-8")


def passes(tests: tuple[str, ...], copy: Path, seconds: float) -> bool:
    files = [f"tests/{name}.py" for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def copy_of_checkout(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, help="how many to draw (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run of tests (default 300)")
    parser.add_argument("--list", action="store_true", help="print how many mutants there are")
    chosen = parser.parse_args()
    mutants = all_mutants(chosen.seed)
    if chosen.list:
        for file, count in Counter(mutant.file for mutant in mutants).items():
            print(f"{count:5} {file}")
        return 0
    drawn = random.Random(chosen.seed).sample(mutants, min(chosen.mutants, len(mutants)))
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder))
        for groups in TESTS.values():
            if not all(passes(group, copy, chosen.timeout) for group in groups):
                parser.exit(2, "the tests fail without a mutant\n")
        for number, mutant in enumerate(drawn, 1):
            noticed = is_noticed(mutant, copy, chosen.seed, chosen.timeout)
            print(f"{number}/{len(drawn)} {'noticed ' if noticed else 'SURVIVED'} {mutant.file}", file=sys.stderr)
            if not noticed:
                survivors.append(mutant)
                print(f"survived: {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    rate = 1 - len(survivors) / len(drawn)
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} mutants noticed ({rate:.0%}), seed {chosen.seed}")
    return int(rate < GOAL)


if __name__ == "__main__":
    sys.exit(main())
