"""More kinds of small faults, beside those of mutations.py: a value that stands beside the right one.

Left out is what has the same value by its type, a field that tensors have too, and what `SIBLINGS` has already.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from mutations import SIBLINGS
from syntax import Edit, Module, name_of, replaced

PACKAGE = Path(__file__).parents[1] / "flopmeter"


def wrapper(module: Module) -> Iterator[Edit]:
    """A number that is not rounded up or bounded; an argument of the type of the result, in place of a call."""
    passed = {node.name: _of_the_type_of_its_result(node) for node in module.nodes(ast.FunctionDef)}
    for call in module.nodes(ast.Call):
        called, given = ast.unparse(call.func), call.args
        if any(isinstance(each, ast.Starred) for each in given) or not given:
            continue
        if called == "ceil":
            yield Edit(call, "func", ast.Name("int", ast.Load()), call)
        elif called in ("min", "max") and len(given) > 1:
            for each in given:
                rest = [other for other in given if other is not each]
                new = rest[0] if len(rest) == 1 else ast.Call(call.func, rest, call.keywords)
                yield from _instead(module, call, new)
        elif called in ("abs", "sorted", "reversed"):
            yield from _instead(module, call, given[0])
        else:
            for place in passed.get(called, ()):
                if place < len(given):
                    yield from _instead(module, call, given[place])


def _of_the_type_of_its_result(function: ast.FunctionDef) -> list[int]:
    """Places of arguments."""
    if function.returns is None or (kind := ast.unparse(function.returns)) in ("None", "Any"):
        return []
    parameters = enumerate(function.args.args)
    return [place for place, each in parameters if each.annotation and ast.unparse(each.annotation) == kind]


def _instead(module: Module, call: ast.Call, new: ast.expr) -> Iterator[Edit]:
    yield from replaced(module, call, new, f"{ast.unparse(call)}  ->  {ast.unparse(new)}")


def field(module: Module) -> Iterator[Edit]:
    """The next field of the same type of a record, by names that one record alone has."""
    for node in module.nodes(ast.Attribute):
        up = module.parent[node]
        is_method = isinstance(up, ast.Call) and up.func is node
        other = _next_fields().get(node.attr)
        if other is not None and not is_method and isinstance(node.ctx, ast.Load):
            yield Edit(node, "attr", other, node)


@functools.cache
def _next_fields() -> dict[str, str]:
    records = [
        [child for child in node.body if isinstance(child, ast.AnnAssign)]
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    owners = defaultdict[str, int](int)
    for fields in records:
        for each in fields:
            owners[name_of(each.target)] += 1
    known = {frozenset(pair) for pair in SIBLINGS}
    found = {}
    for fields in records:
        by_type = defaultdict[str, list[str]](list)
        for each in fields:
            by_type[ast.unparse(each.annotation)].append(name_of(each.target))
        for names in by_type.values():
            for name, other in zip(names, [*names[1:], names[0]], strict=True):
                is_new = frozenset((name, other)) not in known and not hasattr(torch.Tensor, name)
                if is_new and owners[name] == 1 and name != other:
                    found[name] = other
    return found


AGGREGATES = {"sum": "max", "prod": "sum"}


def aggregate(module: Module) -> Iterator[Edit]:
    """The largest of several in place of their sum, the sum in place of their product."""
    for call in module.nodes(ast.Call):
        other = AGGREGATES.get(ast.unparse(call.func))
        if other is None or len(call.args) != 1 or call.keywords:
            continue
        of_none = [ast.keyword("default", ast.Constant(0))] if other == "max" else []
        new = ast.Call(ast.Name(other, ast.Load()), call.args, of_none)
        yield from _instead(module, call, new)


def member(module: Module) -> Iterator[Edit]:
    """One of the values, or types, that a value is asked to be left out."""
    for node in module.nodes(ast.Compare):
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            yield from _without_one(node.comparators[0])
    for call in module.nodes(ast.Call):
        if name_of(call.func) in ("isinstance", "issubclass"):
            yield from _without_one(call.args[1])


OF_ANOTHER = {"bool": "int", "torch.nn.Parameter": "torch.Tensor"}  # types, each a part of the other


def _without_one(several: ast.expr) -> Iterator[Edit]:
    if isinstance(several, (ast.Tuple, ast.List, ast.Set)) and len(several.elts) > 1:
        named = {*map(ast.unparse, several.elts)}
        for each in several.elts:
            if OF_ANOTHER.get(ast.unparse(each)) in named:
                continue
            rest = [other for other in several.elts if other is not each]
            yield Edit(several, "elts", rest, several)


def accumulation(module: Module) -> Iterator[Edit]:
    """What is added to others in place of all of them."""
    for node in module.nodes(ast.AugAssign):
        text = f"{ast.unparse(node)}  ->  {ast.unparse(node.target)} = {ast.unparse(node.value)}"
        up = module.parent[node]
        for name, value in ast.iter_fields(up):
            if isinstance(value, list) and node in value:
                new = ast.Assign([node.target], node.value, lineno=node.lineno)
                yield Edit(up, name, [new if each is node else each for each in value], node, text)
