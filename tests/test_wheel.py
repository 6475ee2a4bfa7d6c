"""The wheel, installed away from the checkout, is all that a user needs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROFILES = len(list((ROOT / "hardware").glob("*.yaml")))
RUN_TIME = {"torch", "tabulate", "pyyaml", "networkx"}


def run(*arguments, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the checkout stays clean."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    copy, built = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in ("flopmeter", "hardware", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(copy), cwd=copy)
    (path,) = built.glob("flopmeter-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment that holds the wheel, and of the tests' own only what it depends on."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    interpreter = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(interpreter, "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel), cwd=home)
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    import torch

    (site / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return interpreter


@pytest.mark.slow
def test_the_wheel_depends_on_four_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", text, re.MULTILINE)
    assert {name.lower() for name in required} == RUN_TIME


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_profiles_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    profiles = {Path(name).name for name in names if name.startswith("flopmeter/profiles/")}
    assert profiles == {path.name for path in (ROOT / "hardware").rglob("*.yaml")}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {str(path.relative_to(ROOT)) for path in (ROOT / "flopmeter").rglob("*.py")}
    assert "flopmeter/py.typed" in names


@pytest.mark.slow
def test_the_installed_wheel_finds_its_profiles(python, tmp_path):
    code = "import flopmeter; print(len(flopmeter.available_hardware()), flopmeter.__file__)"
    count, file = run(python, "-c", code, cwd=tmp_path).split()
    assert int(count) == PROFILES
    assert not Path(file).is_relative_to(ROOT)


@pytest.mark.slow
def test_the_installed_wheel_loads_each_of_its_profiles(python, tmp_path):
    code = "import flopmeter; print(*[flopmeter.load_hardware(n).name for n in flopmeter.available_hardware()])"
    assert len(run(python, "-c", code, cwd=tmp_path).split()) == PROFILES


@pytest.mark.slow
def test_the_installed_wheel_runs_the_first_example_of_the_readme(python, tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    output = run(python, script, cwd=tmp_path)
    assert "tensor contraction" in output
    assert "predicted" in output


@pytest.mark.slow
def test_the_installed_wheel_has_its_command(python, tmp_path):
    assert "h100-sxm5-80gb" in run(python, "-m", "flopmeter", "hardware", cwd=tmp_path)


@pytest.mark.slow
def test_the_installed_wheel_writes_an_html_report_with_its_style_and_script(python, tmp_path):
    page = tmp_path / "report.html"
    run(python, "-m", "flopmeter", "table", "encoder-layer", "--format", "html", "-o", str(page), cwd=tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "prefers-color-scheme" in text
    assert "makeSortable" in text


@pytest.mark.slow
def test_the_installed_wheel_runs_the_first_commands_of_the_readme(python, tmp_path):
    """Those of the quick start, by the names that they have there."""
    pytest.importorskip("transformers")
    block = re.search(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    programs = {"python": [python], "flopmeter": [Path(python).with_name("flopmeter")]}
    commands = re.findall(r"^\$ (.*)\n([^$\n]*)", block, re.MULTILINE)
    assert len(commands) == 2
    for command, first_line in commands:
        program, *arguments = shlex.split(command)
        assert first_line in run(*programs[program], *arguments, cwd=tmp_path)
