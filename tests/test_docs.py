"""What README.md and docs/*.md show is real: their code runs, and what they print is what is shown.

    python tests/test_docs.py --update     write the true outputs into the pages

A page runs from top to bottom in an empty directory, its ```python blocks in one namespace:

    ```yaml my-gpu.yaml     a block with a file name is written to that file (so is ```python model.py)
    ```python               runs; what it prints stands in the ```text block after it
    ```console              each line `$ flopmeter ...` or `$ python scripts/... ` is followed by its output
    ```sh                   for a reader's own machine: not run

The `flopmeter ...` lines of README.md's ```sh blocks run too, where what they need is installed; what they print is
not looked at.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import flopmeter.distributed
from flopmeter import cli
from flopmeter.costs import RULES
from flopmeter.torch_names.dispatcher import running_version

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"README.md": "transformers", "serving.md": "transformers"}
OF_ONE_TORCH = {"README.md": "2.13", "distributed.md": "2.13", "report.md": "2.13"}  # 2.15 needs other memory (cuBLAS)
SINCE_2_12 = {"plan.md", "tutorial.md"}  # in torch 2.11 a launch of AdamW's has room for fewer blocks (limits.md)
VERSIONS_AND_DATE = "flopmeter 0.1.0, torch 2.13.0, profile 1a2b3c4d · 2026-11-22 12:00 UTC"
FENCE = re.compile(r"^```(?P<language>\w+) *(?P<file>\S*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


TRAIN = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
MY_MODEL = """
import torch

def build(batch: int = 2):
    with torch.device("meta"):
        return torch.nn.Linear(64, 64), torch.empty(batch, 64)
"""


def played(page: str, text: str) -> str:
    """The page with the outputs that its code really has. Files go to the working directory."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    printed = ""  # by the last block of code, and not shown yet

    def play(block: re.Match[str]) -> str:
        nonlocal printed
        language, file, body = block["language"], block["file"], block["body"]
        assert language == "text" or not printed, f"{page}: no ```text block shows {printed!r}"
        if file:
            Path(file).write_text(body)
        elif language == "python":
            printed = _of_code(page, body, namespace, line=text.count("\n", 0, block.start("body")))
        elif language == "console":
            body = "".join(f"$ {command}\n{_of_command(command)}" for command in COMMAND.findall(body))
        elif language == "text" and printed:
            body, printed = printed, ""
        return f"```{language}{' ' + file if file else ''}\n{body}```"

    result = FENCE.sub(play, text)
    assert not printed, f"{page}: no ```text block shows {printed!r}"
    return result


def _of_code(page: str, code: str, namespace: dict[str, Any], line: int) -> str:
    out = io.StringIO()
    with redirect_stdout(out), mock.patch.object(sys, "argv", [f"{Path(page).stem}.py"]):
        exec(compile("\n" * line + code, page, "exec"), namespace)
    return _tidy(out.getvalue())


def _of_command(command: str) -> str:
    """What a command prints, run in this process; a line tells an exit code other than 0."""
    program, *arguments = shlex.split(command)
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), mock.patch.object(sys, "argv", [program, *arguments]):
        code = _PROGRAMS[program](arguments)
    for name, module in list(sys.modules.items()):  # a page may rewrite a file that its script imports
        if Path(getattr(module, "__file__", None) or "/").parent == Path.cwd():
            del sys.modules[name]
    return _tidy(out.getvalue()) + (f"(exit code {code})\n" if code else "")


def _python(arguments: list[str]) -> int:
    script, *rest = arguments
    if script == "-c":
        exec(rest[0], {})
        return 0
    with mock.patch.object(sys, "argv", [script, *rest]):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


_PROGRAMS = {"flopmeter": cli.main, "python": _python}


def _tidy(output: str) -> str:
    """Without white space that no reader sees, and what reports say on a torch whose streams were not compared."""
    output = re.sub(r"^torch \d+\.\d+: ops are dispatched by the rules of .*\n?", "", output, flags=re.MULTILINE)
    output = re.sub(r"flopmeter \S+, torch \S+, profile \w+ · [\d-]+ [\d:]+ UTC", VERSIONS_AND_DATE, output)
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def _somewhere_else() -> Iterator[None]:
    """In an empty directory; rules that a page registers are taken back."""
    home, rules = Path.cwd(), dict(RULES)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(home)
            RULES.clear()
            RULES.update(rules)


def _lacks(page: Path) -> bool:
    """Whether a package that the page's commands need is missing."""
    return page.name in NEEDS and find_spec(NEEDS[page.name]) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_code_prints(page):
    if _lacks(page):
        pytest.skip(f"{NEEDS[page.name]} is not installed")
    if page.name in OF_ONE_TORCH and not torch.__version__.startswith(OF_ONE_TORCH[page.name]):
        pytest.skip(f"shows what torch {OF_ONE_TORCH[page.name]} does")
    if page.name in SINCE_2_12 and running_version() < (2, 12):
        pytest.skip("shows what torch 2.12 and newer ones do")
    text = page.read_text(encoding="utf-8")
    with _somewhere_else():
        assert played(page.name, text) == text, "python tests/test_docs.py --update writes the true outputs"


def _commands_without_output() -> list[str]:
    blocks = [body for language, _, body in FENCE.findall(PAGES[0].read_text(encoding="utf-8")) if language == "sh"]
    lines = "".join(blocks).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.startswith("flopmeter ")]


@pytest.mark.parametrize("command", _commands_without_output())
def test_a_command_shown_without_its_output_runs(command):
    for part, package in (("timm:", "timm"), ("hf:", "transformers"), ("--plot", "matplotlib")):
        if part in command and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with _somewhere_else():
        Path("my_model.py").write_text(MY_MODEL)
        Path("train.py").write_text(TRAIN)
        assert "(exit code" not in _of_command(command)
        written = re.findall(r"(?:-o|--plot|--trace) (\S+)", command)
        assert all(Path(file).stat().st_size for file in written)


def test_a_wrong_output_is_noticed():
    assert played("page", "```python\nprint(6 * 7)\n```\n```text\n41\n```") == (
        "```python\nprint(6 * 7)\n```\n```text\n42\n```"
    )
    assert "0.1.0" not in played("page", "```console\n$ flopmeter explain relu\n0.1.0\n```")
    with pytest.raises(AssertionError, match="no ```text block shows"):
        played("page", "```python\nprint(6 * 7)\n```")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_repository_leads_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", prose):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def _anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_a_source_file_exists(page):
    """`flopmeter/costs/arithmetic/pointwise.py` and the like, in backquotes."""
    names = re.findall(r"`((?:flopmeter|scripts|tests|hardware)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name).exists() and "NAME" not in name] == []


def test_every_make_target_that_the_docs_name_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))) <= targets


def _pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for below in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _pages_of(below)


def test_the_site_lists_every_page_once():
    nav = yaml.safe_load((ROOT / ".mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(_pages_of(nav)) == sorted(pages), "nav in .mkdocs.yml"


def test_the_reference_has_every_public_name():
    names = re.findall(r"^::: flopmeter\.([\w.]+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    for name in names:
        *place, last = name.split(".")
        assert hasattr(importlib.import_module(".".join(["flopmeter", *place])), last), name
    assert set(flopmeter.__all__) - set(names) == set()


def test_the_arguments_of_a_docstring_become_a_list():
    site_docstrings = pytest.importorskip("griffe") and runpy.run_path(str(ROOT / "scripts/site_docstrings.py"))
    text = "Does it.\n\nname: what it is,\n    at length.\nother, more: two.\n\nRaises ValueError: never."
    listed = "Does it.\n\n- `name`: what it is,\n    at length.\n- `other, more`: two.\n\nRaises ValueError: never."
    assert site_docstrings["with_lists"](text) == listed


def _update() -> None:
    for page in PAGES:
        if _lacks(page):
            print(f"left {page.name} as it is: {NEEDS[page.name]} is not installed")
            continue
        text = page.read_text(encoding="utf-8")
        with _somewhere_else():
            new = played(page.name, text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python tests/test_docs.py --update")
    _update()
