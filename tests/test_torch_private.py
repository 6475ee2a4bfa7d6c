"""Private names: one table, one clear error where a name is gone, and no use of one that is not in the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import SchedulerNode

from flopmeter.torch_names import compiler, distributed
from flopmeter.torch_names.private import METERING, NAMES, PROPAGATION, WORLDS, PrivateName, lost, needed

PACKAGE = Path(__file__).parents[1] / "flopmeter"
LISTED = {part for names in NAMES.values() for name in names for part in name.attribute.split(".")}
MODULES = {name.module for names in NAMES.values() for name in names}
DOCUMENTED = {
    "_asdict",
    "_fields",
    "_replace",
    "_current_frames",
    "_getframe",
    "_repr_html_",
}  # of namedtuple, sys and notebooks
DOCUMENTED |= {"_ActionsContainer", "_SubParsersAction", "_actions"}  # of argparse: what a parser and its groups share
OPERATORS = re.compile(r"(torch\.ops\.\w+|aten|aten_overloads|c10d|functional|overloads)(\.|$)")


def test_a_name_that_is_gone_is_one_error_that_says_what_it_told(monkeypatch):
    monkeypatch.setitem(NAMES, METERING, NAMES[METERING])
    with pytest.raises(ImportError, match=r"has no torch\._C\._moved_away, which tells flopmeter the time"):
        needed("torch._C", "_moved_away", "the time")
    with pytest.raises(ImportError, match=r"torch\._gone\.name"):
        needed("torch._gone", "name", "nothing")


def test_every_name_says_what_it_is_for():
    assert distributed.FakeStore  # these modules enter their names when they are imported
    assert compiler.COMPILE_FX
    assert all(names for names in NAMES.values()), "a feature without a name"
    assert all(name.used for names in NAMES.values() for name in names)
    assert {METERING, WORLDS} <= NAMES.keys()


def test_names_that_only_instances_have_are_there():
    op = torch.library.custom_op("flopmeter_tests::kept", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    made = {
        "OptimizedModule": torch.compile(torch.nn.Module()),
        "CompiledFxGraph": CompiledFxGraph,
        "Module": torch.nn.Module(),
        "RNNBase": torch.nn.RNN(1, 1),
        "ScriptModule": torch.jit.script(torch.nn.Identity()),
        "autocast": torch.autocast("cpu", enabled=False),
        "CustomOpDef": op,
        "BaseProcess": torch.multiprocessing.Process(),
        "_BaseDataLoaderIter": iter(torch.utils.data.DataLoader([torch.ones(2)])),
        "NestedTensor": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    }
    made["OpOverload"] = torch.ops.aten.mm.default
    made["SchedulerNode"] = SimpleNamespace(**SchedulerNode.__annotations__)  # none is made without a graph
    for name in (name for names in NAMES.values() for name in names if name.on_instances):
        owner, attribute = name.attribute.split(".")
        assert hasattr(made[owner], attribute), f"torch {torch.__version__} has no {name.path}"


def test_what_is_left_out_for_want_of_a_name_is_noted(monkeypatch):
    assert lost(PROPAGATION) == ()
    monkeypatch.setitem(NAMES, PROPAGATION, (PrivateName("torch.nn", "_gone", "the time"),))
    assert lost(PROPAGATION) == (f"without {PROPAGATION}: there is no torch.nn._gone",)


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Private names of other packages in a file: imported, read off an object that is not its own, or by getattr."""
    tree = ast.parse(source)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("flopmeter", "__")):
            is_private = any(part.startswith("_") for part in str(node.module).split("."))
            yield from ((node.lineno, f"{node.module}:{n.name}") for n in node.names if is_private or n.name[0] == "_")
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and not _is_own(node, own):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and _name(node.func) in ("object", "getattr", "hasattr", "setattr"):
            texts = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from ((node.lineno, text) for text in texts if isinstance(text, str) and re.match(r"_[^_]", text))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z][\w.]*", str(node.value)):
            yield node.lineno, str(node.value)


def _is_own(node: ast.Attribute, own: set[str]) -> bool:
    owner = ast.unparse(node.value)
    return owner in ("self", "cls") or node.attr in own or OPERATORS.match(owner) is not None


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def is_listed(use: str) -> bool:
    module, _, name = use.rpartition(":")
    return (name in LISTED and (not module or module in MODULES)) or name in DOCUMENTED


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "torch_names"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_private_name_is_used_that_the_table_does_not_hold(path):
    unlisted = [
        f"{path.name}:{line} {use}" for line, use in uses(path.read_text(encoding="utf-8")) if not is_listed(use)
    ]
    assert not unlisted, "enter it in flopmeter/torch_names/private.py, with what is lost without it"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._dynamo import reset",
        "from torch.nn import _thing",
        "tensor._thing",
        "torch._C._thing()",
        "getattr(tensor, '_thing')",
        "mock.patch.object(torch, '_thing', None)",
        "MODULE = 'torch.nn._thing'",
    ],
)
def test_the_search_finds(source):
    assert [use for _, use in uses(source) if not is_listed(use)]
