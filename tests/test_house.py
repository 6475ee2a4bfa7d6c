"""How the package is built: which file imports which. (`make check` holds the order of the packages.)"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flopmeter"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it: for types alone and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in FILES else str(node.module) for name in names)


def circle(graph: dict[str, set[str]]) -> str:
    """A circle in the graph, as 'a -> b -> a'; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))  # it lists each after what imports it
    return ""


def test_no_files_import_each_other_in_a_circle():
    assert not circle({name: set(imported(path)) & FILES.keys() - {name} for name, path in FILES.items()})


def test_a_circle_is_named():
    assert circle({"a": {"b", "d"}, "b": {"c"}, "c": {"b"}, "d": set()}) in ("b -> c -> b", "c -> b -> c")
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == ""
    three = circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert three in "a -> b -> c -> a -> b -> c", three


PATCHES = re.compile(r"\bmock\.patch|\bscope\.patch|\bpatch\.object|\.replaced\(")
FOR_OTHERS = "flopmeter.torch_names.private"  # puts in place what it is given


@pytest.mark.parametrize(
    "name", [name for name, path in FILES.items() if PATCHES.search(path.read_text("utf-8")) and name != FOR_OTHERS]
)
def test_a_file_that_patches_a_library_says_what_it_works_around_and_until_when(name):
    opening = ast.get_docstring(ast.parse(FILES[name].read_text("utf-8"))) or ""
    assert re.search(r"^Works around: .+\n(.+\n)*Until: ", opening, re.MULTILINE), name


@pytest.mark.parametrize("arguments", [["table", "gpt2-124m", "--batch", "2"], ["run", "SCRIPT"]])
def test_the_command_needs_no_package_that_it_does_not_depend_on(tmp_path, arguments):
    """In an empty environment torch, tabulate, PyYAML and networkx are there, and NumPy is not."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(5):\n"
        "    model(torch.rand(2, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    given = [str(script) if each == "SCRIPT" else each for each in arguments]
    program = (
        "import sys\n"
        "for name in ('numpy', 'matplotlib', 'transformers', 'triton', 'scipy', 'distributed', 'shtab'):\n"
        "    sys.modules[name] = None\n"
        "from flopmeter.cli import main\n"
        f"sys.exit(main({[given[0], '--hardware', 'l4', *given[1:]]!r}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "predicted" in ran.stdout + ran.stderr
