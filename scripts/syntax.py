"""The syntax tree of a module, and edits of it: what the kinds of scripts/mutations.py and neighbours.py share.

An edit gives one field of one node of the tree another value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch


class Edit(NamedTuple):
    """`owner.field = new`; `shown` is the node that is printed before and after, unless `text` says it all."""

    owner: ast.AST
    field: str
    new: Any
    shown: ast.expr | ast.stmt | ast.expr_context
    text: str = ""

    def apply(self) -> str:
        """Change the tree; what was done, in words."""
        before = ast.unparse(self.shown)
        setattr(self.owner, self.field, self.new)
        return self.text or f"{before}  ->  {ast.unparse(self.shown)}"


class Module:
    """The tree of one file, and what the kinds ask about it."""

    def __init__(self, source: str):
        self.tree = ast.parse(source)
        self.parent: dict[ast.AST, ast.AST] = {}
        skipped = [node for node in ast.walk(self.tree) if _is_no_code(node)]
        for table in (node for node in ast.walk(self.tree) if isinstance(node, ast.Dict)):
            for key, value in zip(table.keys, table.values, strict=True):
                if key is not None and is_lacking(key):
                    skipped += [key, value]
        self._skipped = {id(child) for node in skipped for child in ast.walk(node)}
        for node in ast.walk(self.tree):
            self.parent.update((child, node) for child in ast.iter_child_nodes(node))
            self._skipped.update(id(child) for part in _types(node) for child in ast.walk(part))

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """The nodes of these kinds that are code, in a fixed order."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds) and self.is_code(node))

    def is_code(self, node: ast.AST) -> bool:
        return id(node) not in self._skipped

    def describe(self, edit: Edit) -> str:
        """What the edit would do, and where a name or a number stands."""
        old = getattr(edit.owner, edit.field)
        line = first_line(next(up for up in (edit.shown, *self.above(edit.shown)) if isinstance(up, ast.stmt)))
        text = edit.apply()
        setattr(edit.owner, edit.field, old)
        return f"{text}  in  {_short(line)}" if isinstance(edit.shown, (ast.Name, ast.Constant)) else _short(text)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (up := self.parent.get(node)) is not None:
            yield up
            node = up

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        return next((up for up in self.above(node) if isinstance(up, ast.FunctionDef)), None)


def _types(node: ast.AST) -> Iterator[ast.AST]:
    yield from filter(None, (getattr(node, name, None) for name in ("annotation", "returns")))


# As in `Pair = tuple[int, int]`.
TYPES = ("Literal", "Callable", "Union", "tuple", "list", "dict", "set", "frozenset", "type")


def _is_no_code(node: ast.AST) -> bool:
    """Docstrings, what only a type checker reads, what an error or a note says, and rules of ops that this torch lacks,
    which nothing calls."""
    if isinstance(node, ast.FunctionDef):
        ops = [each for up in node.decorator_list for each in ast.walk(up) if _is_op(each)]
        return bool(ops) and all(map(is_lacking, ops))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test) or (_asks_version(node.test) and not node.orelse)
    if isinstance(node, ast.Compare):
        return _asks_version(node)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        value = node.value
        is_type = isinstance(value, ast.Subscript) and name_of(value.value) in TYPES
        return is_type or name_of(target) in ("__all__", "__slots__") or "_OF_2_" in name_of(target)
    return isinstance(node, (ast.Raise, ast.JoinedStr)) or (isinstance(node, ast.Call) and name_of(node.func) == "cast")


def _is_op(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and name_of(node.value) == "aten"


def is_lacking(node: ast.AST) -> bool:
    """An op that this torch does not have."""
    return _is_op(node) and not hasattr(torch.ops.aten, node.attr)


def _asks_version(test: ast.expr) -> bool:
    """What the installed torch never runs, or always: tests on the other versions see it."""
    return "running_version" in ast.unparse(test)


def name_of(node: ast.AST | None) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _short(text: str) -> str:
    return text if len(text) <= 240 else f"{text[:237]}..."


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def replaced(module: Module, node: ast.expr, new: ast.expr, text: str) -> Iterator[Edit]:
    up = module.parent[node]
    for field, value in ast.iter_fields(up):
        if value is node:
            yield Edit(up, field, new, node, text)
        elif isinstance(value, list) and node in value:
            yield Edit(up, field, [new if each is node else each for each in value], node, text)
