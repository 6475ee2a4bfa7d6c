"""docs/contributing.md is true: each file and each name in it exists, and each package has a row."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:flopmeter|tests|scripts)/[\w/]+\.py)::([\w.]+)`", PAGE)
WALKS = re.findall(r"^### One (?:op|collective|`)[^\n]*\n\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
WORDS = (
    "GEMM, matmul", "contiguous", "occupancy", "L2 hit, L2 miss", "tile", "wave", "epilogue", "launch", "stream",
    "exposed communication", "operator, op", "kernel", "arithmetic intensity", "ridge point", "regime", "MFU", "HFU",
    "FLOPs, FLOP/s", "meta tensor", "dispatch mode", "fake tensor", "region", "storage", "view", "fusion",
    "graph break", "CUDA graph", "eager", "recompute", "activation", "collective", "wire bytes",
)  # fmt: skip


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """What a file defines: functions, classes with their methods, and names that are assigned."""
    return frozenset(_defined(ast.parse((ROOT / file).read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner}" for inner in _defined(node.body))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids=lambda part: part)
def test_what_the_page_names_is_in_its_file(file, name):
    assert (ROOT / file).exists()
    assert name in names_in(file)


def test_every_package_has_a_row():
    packages = {path.parent.name for path in (ROOT / "flopmeter").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `flopmeter/(\w+)` \|", PAGE, re.MULTILINE))


def test_three_walks_through_the_code_have_ten_steps_each():
    assert [re.findall(r"^\d+(?=\.)", walk, re.MULTILINE) for walk in WALKS] == [[str(n) for n in range(1, 11)]] * 3


@pytest.mark.parametrize("word", WORDS)
def test_the_glossary_has_the_words_of_the_field(word):
    assert f"\n| {word} | " in GLOSSARY


def test_the_glossary_is_in_order_and_has_each_word_once():
    words = re.findall(r"^\| (?!word )([^|]+?) \|", GLOSSARY, re.MULTILINE)[1:]
    assert words == sorted(set(words), key=str.lower)
