"""Kinds of small faults that scripts/mutate.py draws from. Each yields the edits that it can make in one module.

Left out is what nobody could notice by a test, and what raises whenever it runs, which any test would notice.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

from syntax import Edit, Module, first_line, is_lacking, name_of, replaced

# --- arithmetic: constants and operators --------------------------------------------------------------------

FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
EXTREMA = {"min": "max", "max": "min", "any": "all", "all": "any"}


def number(module: Module) -> Iterator[Edit]:
    """An integer one more or one less, another number doubled or halved."""
    for node in module.nodes(ast.Constant):
        up = module.parent[node]
        if isinstance(up, ast.Subscript) and name_of(up.value) == "outputs" and node.value == 0:
            continue  # most ops return one tensor: the last of one is the first, and there is no second
        if type(node.value) is int:
            # The last of one is the first: so [0] becomes [1] alone.
            is_first = isinstance(up, ast.Subscript) and ast.unparse(up.slice) == "0"
            yield from (Edit(node, "value", node.value + step, node) for step in ((1,) if is_first else (1, -1)))
        elif type(node.value) is float and node.value:
            yield from (Edit(node, "value", node.value * factor, node) for factor in (2, 0.5))


def operator(module: Module) -> Iterator[Edit]:
    """Another arithmetic operator."""
    for node in module.nodes(ast.BinOp, ast.AugAssign):
        if type(node.op) in FLIPS:
            yield Edit(node, "op", FLIPS[type(node.op)](), node)


def comparison(module: Module) -> Iterator[Edit]:
    """A comparison one step further, or turned round."""
    for node in module.nodes(ast.Compare):
        if type(node.ops[0]) in FLIPS:
            yield Edit(node, "ops", [FLIPS[type(node.ops[0])](), *node.ops[1:]], node)


def logic(module: Module) -> Iterator[Edit]:
    """and/or, min/max and any/all exchanged, `not` left out."""
    for node in module.nodes(ast.BoolOp):
        yield Edit(node, "op", FLIPS[type(node.op)](), node)
    for node in module.nodes(ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield Edit(node, "op", ast.UAdd(), node)  # `+x` of a truth value keeps it
    for node in module.nodes(ast.Name):
        if node.id in EXTREMA:
            yield Edit(node, "id", EXTREMA[node.id], node)


# --- structure: what is passed, read, done and returned -----------------------------------------------------

# `zip(strict=)`, `dataclass(frozen=)` and `patch(create=)` check or allow; `default=` and `key=` stay.
CHECKS = ("strict", "frozen", "slots", "eq", "create", "check_invariants")
SYMMETRIC = (
    "min",
    "max",
    "gcd",
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "rule",
    "find_spec",
    "overlap",
    "_present",
)

ONE_OF_ITS_KIND = {"call", "scope", "known", "self", "private", "mock", "torch"}  # no other argument is taken for it


def keyword(module: Module) -> Iterator[Edit]:
    """A keyword argument left out, where the callee does without; of functions of this file that is known."""
    defaults = {node.name: _defaults(node) for node in module.nodes(ast.FunctionDef, ast.ClassDef)}
    for call in module.nodes(ast.Call):
        for keyword in call.keywords:
            optional = defaults.get(name_of(call.func))
            if keyword.arg in CHECKS or (optional is not None and keyword.arg not in optional):
                continue
            rest = [other for other in call.keywords if other is not keyword]
            yield Edit(call, "keywords", rest, call, f"{_head(call)}: without {ast.unparse(keyword)}")


def _defaults(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Parameters, or fields, that need not be given."""
    if isinstance(node, ast.ClassDef):
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign) and child.value is not None]
        return {name_of(child.target) for child in fields}
    taken = node.args
    ordinary = taken.args[len(taken.args) - len(taken.defaults) :]
    only = [each for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is not None]
    return {each.arg for each in (*ordinary, *only)}


def _head(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}(...)"


def exchange(module: Module) -> Iterator[Edit]:
    """Two neighbours among the arguments of a call, or the names of a tuple, that could be taken for one another."""
    lists = [(call, "args", call.args) for call in module.nodes(ast.Call) if name_of(call.func) not in SYMMETRIC]
    lists += [(target, "elts", target.elts) for target in module.nodes(ast.Tuple) if isinstance(target.ctx, ast.Store)]
    for owner, field, items in lists:
        for place, (first, second) in enumerate(pairwise(items)):
            is_safe = ast.unparse(first) == ast.unparse(second) or {name_of(first), name_of(second)} & ONE_OF_ITS_KIND
            if not is_safe and not isinstance(second, ast.Starred):
                yield Edit(owner, field, [*items[:place], second, first, *items[place + 2 :]], owner)


SIBLINGS = [
    ("inputs", "outputs"), ("nbytes", "numel"), ("numel", "distinct_elements"), ("bytes_read", "bytes_written"),
    ("bytes", "bytes_read"), ("shape", "stride"), ("m", "n"), ("n", "k"), ("k", "m"), ("flops", "macs"),
    ("flops", "executed_flops"), ("compute_seconds", "memory_seconds"), ("work_seconds", "compute_seconds"),
    ("seconds", "work_seconds"), ("start_seconds", "end_seconds"), ("flop_per_s", "sustained_flop_per_s"),
    ("bandwidth_bytes_per_s", "sustained_bandwidth_bytes_per_s"), ("start", "stop"), ("born", "died"),
    ("reads", "writes"), ("rows", "row_bytes"), ("below", "above"), ("reserved_bytes", "allocated_bytes"),
    ("overloadpacket", "namespace"), ("ranks", "rank"), ("read", "written"), ("args", "kwargs"),
]  # fmt: skip
_BESIDE: dict[str, list[str]] = defaultdict(list)
for _one, _other in SIBLINGS:
    _BESIDE[_one].append(_other)
    _BESIDE[_other].append(_one)


def sibling(module: Module) -> Iterator[Edit]:
    """An attribute, or an argument, of another name that such objects have too."""
    for node in module.nodes(ast.Attribute):
        is_method = isinstance(up := module.parent[node], ast.Call) and up.func is node
        is_counted = isinstance(up, ast.Call) and name_of(up.func) == "len"  # shapes and strides have the same length
        if not is_method and not is_counted and isinstance(node.ctx, ast.Load):  # a called method is none of a record's
            yield from (Edit(node, "attr", other, node) for other in _BESIDE.get(node.attr, ()))
    for call in module.nodes(ast.Call):
        given = {each.arg: each for each in call.keywords}
        for each in call.keywords:
            for other in _BESIDE.get(each.arg or "", ()):
                if other not in given:
                    yield Edit(each, "arg", other, call)
                elif (each.arg or "") < other and ast.unparse(each.value) != ast.unparse(given[other].value):
                    yield Edit(each, "value", given[other].value, call)


def variable(module: Module) -> Iterator[Edit]:
    """Another variable: of the same tuple, or a parameter of the same type."""
    for function in module.nodes(ast.FunctionDef):
        beside: dict[str, set[str]] = defaultdict(set)
        for group in _alike(function):
            for name in group:
                beside[name] |= set(group) - {name}
        for node in ast.walk(function):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or not module.is_code(node):
                continue
            if module.function(node) is function:
                yield from (Edit(node, "id", other, node) for other in sorted(beside.get(node.id, ())))


def _alike(function: ast.FunctionDef) -> Iterator[list[str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
            yield [each.id for each in node.elts if isinstance(each, ast.Name) and each.id != "_"]
    by_type = defaultdict(list)
    for parameter in (*function.args.args, *function.args.kwonlyargs):
        if parameter.annotation is not None:
            by_type[ast.unparse(parameter.annotation)].append(parameter.arg)
    yield from by_type.values()


SEVERAL = ("shape", "stride", "compute_capability")  # of other sequences the first is often the only one


def subscript(module: Module) -> Iterator[Edit]:
    """The first for the last, of what has several the other way round too; all of a sequence for a part of it."""
    for node in module.nodes(ast.Subscript):
        index = ast.unparse(node.slice)
        if index == "-1" or (index == "0" and name_of(node.value) in SEVERAL):
            yield Edit(node, "slice", ast.Constant(-1 if index == "0" else 0), node)
        elif isinstance(node.slice, ast.Slice) and not (node.slice.lower is None and node.slice.upper is None):
            yield Edit(node, "slice", ast.Slice(None, None, node.slice.step), node)


def statement(module: Module) -> Iterator[Edit]:
    """A statement deleted, where the names that it binds are bound without it."""
    for node in module.nodes(ast.stmt):
        up = module.parent[node]
        field = next((name for name in ("body", "orelse", "finalbody") if node in getattr(up, name, ())), None)
        if field is None or not _can_go(module, node):
            continue
        others = [ast.Pass() if each is node else each for each in getattr(up, field)]
        yield Edit(up, field, others, node, f"deleted: {first_line(node)}")


def _can_go(module: Module, node: ast.stmt) -> bool:
    if isinstance(node, (ast.AugAssign, ast.Expr, ast.Continue, ast.Break, ast.Delete)):
        return True
    function = module.function(node)
    if function is None:
        return False
    if isinstance(node, ast.Return):
        return node is not function.body[-1]
    if not isinstance(node, ast.Assign):
        return False
    bound = {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)
             and isinstance(each.ctx, ast.Store)}  # fmt: skip
    before = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and each.lineno < node.lineno
              and isinstance(each.ctx, ast.Store)}  # fmt: skip
    return bound <= before | {each.arg for each in function.args.args}


def condition(module: Module) -> Iterator[Edit]:
    """A condition that always holds, or never."""
    for node in module.nodes(ast.If, ast.IfExp):
        yield from (
            Edit(node, "test", ast.Constant(held), node.test, f"{_test(node)}  ->  {held}") for held in (True, False)
        )
    for node in module.nodes(ast.comprehension):
        for place, test in enumerate(node.ifs):
            rest = [*node.ifs[:place], *node.ifs[place + 1 :]]
            yield Edit(node, "ifs", rest, test, f"without: if {ast.unparse(test)}")


def _test(node: ast.If | ast.IfExp) -> str:
    return f"if {ast.unparse(node.test)}"


EMPTY = {"int": "0", "float": "0.0", "tuple": "()", "list": "[]", "dict": "{}", "set": "set()", "str": "''",
         "Cost": "()", "None": "None"}  # fmt: skip


def result(module: Module) -> Iterator[Edit]:
    """What is returned: the opposite, nothing, none, or an argument of the same type."""
    for node in module.nodes(ast.Return):
        function = module.function(node)
        if node.value is None or function is None or function.returns is None or isinstance(node.value, ast.Lambda):
            continue
        kind = ast.unparse(function.returns)
        alike = [each.arg for each in function.args.args if each.annotation and ast.unparse(each.annotation) == kind]
        others = [ast.Name(name, ast.Load()) for name in alike] if kind not in ("Any", "None") else []
        if kind == "bool":
            others.append(cast(Any, ast.UnaryOp(ast.Not(), node.value)))
        for name in {part.partition("[")[0].strip() for part in kind.split("|")} & EMPTY.keys():
            others.append(cast(Any, ast.parse(EMPTY[name], mode="eval").body))
        for other in others:
            if ast.unparse(other) != ast.unparse(node.value):
                yield Edit(node, "value", other, node)


def entry(module: Module) -> Iterator[Edit]:
    """An entry of a table, an element of a tuple of three or more, or an op of a rule left out."""
    for node in module.nodes(ast.Dict):
        for place, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            if key is None or is_lacking(key) or module.function(node) is not None:
                continue
            new = ast.Dict(
                [*node.keys[:place], *node.keys[place + 1 :]], [*node.values[:place], *node.values[place + 1 :]]
            )
            text = f"without the entry {ast.unparse(key)}: {first_line(value)}"
            yield from replaced(module, node, new, text)
    for node in module.nodes(ast.Tuple, ast.List, ast.Set, ast.Call):
        if isinstance(node, ast.Call):
            field, is_table = "args", name_of(node.func) == "rule" and len(node.args) > 1
        else:
            field, is_table = "elts", module.function(node) is None and len(node.elts) > 2
        for place, each in enumerate(getattr(node, field) if is_table else ()):
            items = getattr(node, field)
            if not is_lacking(each):
                rest = [*items[:place], *items[place + 1 :]]
                yield Edit(node, field, rest, each, f"without the entry {ast.unparse(each)}")


def string(module: Module) -> Iterator[Edit]:
    """Another string, where it is a name: what is said to the reader has spaces or ends as a sentence."""
    for node in module.nodes(ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"[\w:.,=]+", node.value):
            yield Edit(node, "value", f"{node.value}_", node)


def truth(module: Module) -> Iterator[Edit]:
    """True for False and the other way round."""
    for node in module.nodes(ast.Constant):
        up = module.parent[node]
        if type(node.value) is bool and not (isinstance(up, ast.keyword) and up.arg in CHECKS):
            yield Edit(node, "value", not node.value, up if isinstance(up, (ast.expr, ast.stmt)) else node)


# --- portions: a part of what is computed left out ------------------------------------------------------------


def operand(module: Module) -> Iterator[Edit]:
    """One side of an arithmetic operation alone."""
    for node in module.nodes(ast.BinOp):
        if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)):
            for side in (node.left, node.right):
                yield from replaced(module, node, side, f"{ast.unparse(node)}  ->  {ast.unparse(side)}")


def clause(module: Module) -> Iterator[Edit]:
    """One of the conditions that `and` or `or` joins left out."""
    for node in module.nodes(ast.BoolOp):
        for place, each in enumerate(node.values):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            yield from replaced(module, node, new, f"{ast.unparse(node)}  ->  without {ast.unparse(each)}")


def loop(module: Module) -> Iterator[Edit]:
    """A loop that leaves out the first, or the last."""
    for node in module.nodes(ast.For, ast.comprehension):
        for part in ("[1:]", "[:-1]"):
            new = ast.parse(f"[*({ast.unparse(node.iter)})]{part}", mode="eval").body
            yield Edit(node, "iter", new, node.iter, f"for {ast.unparse(node.target)} in {ast.unparse(new)}")
