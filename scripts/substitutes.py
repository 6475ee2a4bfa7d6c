"""Kinds of small faults beside those of mutations.py and neighbours.py: what runs too seldom, or another of its kind.

Left out is a constant of the same value, and what raises wherever it runs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from syntax import Edit, Module, first_line, name_of, replaced


def constant(module: Module) -> Iterator[Edit]:
    """The next named number of this file, of the same type."""
    numbers = dict[str, int | float]()
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(getattr(node, "value", None), "value", None)
        if isinstance(target, ast.Name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[target.id] = value
    for node in module.nodes(ast.Name):
        own = numbers.get(node.id)
        if own is None or not isinstance(node.ctx, ast.Load):
            continue
        names = [name for name, value in numbers.items() if type(value) is type(own)]
        after = names.index(node.id) + 1
        others = (name for name in [*names[after:], *names[:after]] if numbers[name] != own)
        if other := next(others, None):
            yield Edit(node, "id", other, node)


def callee(module: Module) -> Iterator[Edit]:
    """The next function of this file, or method of this class, that takes and returns the same types."""
    alike = defaultdict[tuple[str, ...], list[str]](list)
    for node in module.nodes(ast.FunctionDef):
        if node.returns is not None and not node.decorator_list and ast.unparse(node.returns) != "None":
            owner = module.parent[node]
            kinds = [*map(_kind, (*node.args.args, *node.args.kwonlyargs)), ast.unparse(node.returns)]
            alike[(getattr(owner, "name", ""), *kinds)].append(node.name)
    following = {
        name: other
        for names in alike.values() if len(names) > 1
        for name, other in zip(names, [*names[1:], names[0]], strict=True)
    }  # fmt: skip
    for call in module.nodes(ast.Call):
        other = following.get(name_of(call.func))
        if other is not None and isinstance(call.func, ast.Name):
            yield Edit(call.func, "id", other, call.func)
        elif other is not None and isinstance(call.func, ast.Attribute) and name_of(call.func.value) == "self":
            yield Edit(call.func, "attr", other, call.func)


def _kind(parameter: ast.arg) -> str:
    return parameter.arg if parameter.annotation is None else ast.unparse(parameter.annotation)


def once(module: Module) -> Iterator[Edit]:
    """A loop that ends after its first turn."""
    for node in module.nodes(ast.For):
        if not isinstance(node.body[-1], (ast.Return, ast.Raise, ast.Break)):
            text = f"once: for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            yield Edit(node, "body", [*node.body, ast.Break()], node.iter, text)


def default(module: Module) -> Iterator[Edit]:
    """What stands in for what is not there left out."""
    for call in module.nodes(ast.Call):
        if call.keywords or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        is_get = isinstance(call.func, ast.Attribute) and call.func.attr == "get" and len(call.args) == 2
        is_next = ast.unparse(call.func) == "next" and len(call.args) == 2
        is_getattr = ast.unparse(call.func) == "getattr" and len(call.args) == 3
        if (is_get and ast.unparse(call.args[1]) != "None") or is_next or is_getattr:
            text = f"{ast.unparse(call)}  ->  without {ast.unparse(call.args[-1])}"
            yield Edit(call, "args", call.args[:-1], call, text)


def first(module: Module) -> Iterator[Edit]:
    """The last that fits in place of the first."""
    for call in module.nodes(ast.Call):
        if ast.unparse(call.func) == "next" and isinstance(call.args[0], ast.GeneratorExp):
            found = ast.unparse(ast.List([ast.Starred(call.args[0], ast.Load())], ast.Load()))
            new = ast.parse(f"next(iter({found}[::-1]))", mode="eval").body
            assert isinstance(new, ast.Call)
            new.args += call.args[1:]
            yield from replaced(module, call, new, f"the last of {ast.unparse(call.args[0])}")


def link(module: Module) -> Iterator[Edit]:
    """One of two comparisons in a chain."""
    for node in module.nodes(ast.Compare):
        if len(node.ops) == 2:
            one, other = (
                ast.Compare(left, [op], [right])
                for left, op, right in zip((node.left, node.comparators[0]), node.ops, node.comparators, strict=True)
            )
            for new in (one, other):
                yield from replaced(module, node, new, f"{ast.unparse(node)}  ->  {ast.unparse(new)}")


def handler(module: Module) -> Iterator[Edit]:
    """An error that is not caught."""
    for node in module.nodes(ast.Try):
        for place, each in enumerate(node.handlers):
            rest = [other for other in node.handlers if other is not each]
            text = f"not caught: {first_line(each) if each.type is None else ast.unparse(each.type)}"
            shown = each.type or node.body[0]
            if rest:
                yield Edit(node, "handlers", rest, shown, text)
            else:
                never = ast.ExceptHandler(ast.Tuple([], ast.Load()), None, each.body)
                yield Edit(node, "handlers", [*node.handlers[:place], never], shown, text)


DTYPES = {
    "float32": "float64", "float64": "float32", "bfloat16": "float16", "float16": "bfloat16", "int64": "int32",
    "int32": "int64", "bool": "int64", "uint8": "int64", "float8_e4m3fn": "float8_e5m2", "complex64": "complex128",
}  # fmt: skip


def dtype(module: Module) -> Iterator[Edit]:
    """Another type of numbers."""
    for node in module.nodes(ast.Attribute):
        if name_of(node.value) == "torch" and node.attr in DTYPES:
            yield Edit(node, "attr", DTYPES[node.attr], node)
