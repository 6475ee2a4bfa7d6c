"""The program's own code: which it is, and whether what is loaded of it has words of training, capturing or timing."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from flopmeter.run.patches import Patch

_IMPORTS = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
_TRAINS = re.compile(r"\.(backward|fit|train)\(")  # a pass of its own, or a trainer's; `.train()` also of a module

_CAPTURES = re.compile(r"\b(CUDAGraph|cuda\.graph)\(")
_TAKES_TIMES = re.compile(r"\b(time|perf_counter|monotonic)(_ns)?\(\)|\b(enable_timing|elapsed_time|Timer|do_bench)\b")


class OwnCode:
    """The code of the program that starts now: its main file, and the modules that it imports from beside it. Installed
    packages are not its own, since nearly all of them can train, except the one that a command enters (`-m package`, or
    the few lines that pip writes for `yolo` or `tune`)."""

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._found: set[re.Pattern[str]] = set()  # what is loaded stays

    def may_train(self) -> bool:
        return self._has(_TRAINS)

    def may_capture(self) -> bool:
        """Whether it has words of a CUDA graph that it captures itself."""
        return self._has(_CAPTURES)

    def may_take_times(self) -> bool:
        """Whether it has words of a clock, of timing events or of a timer, though it may not have come to them yet."""
        return self._has(_TAKES_TIMES)

    def _has(self, words: re.Pattern[str]) -> bool:
        if words not in self._found and any(words.search(file.read_text(errors="replace")) for file in self._files()):
            self._found.add(words)
        return words in self._found

    def _files(self) -> Iterator[Path]:
        for name, module in list(sys.modules.items()):
            file = _names_of(module).get("__file__") or ""
            is_of_program = name == "__main__" or (name not in self._before and is_own(name, file))
            if is_of_program and file.endswith(".py") and Path(file).is_file():
                yield Path(file)


@contextmanager
def forgotten_after() -> Iterator[None]:
    """What the program imports of its own code in this context is imported again when it runs again, as in a new
    process: modules hold what may be made only once, such as a mesh. (A compiled module cannot be loaded twice: the new
    import finds the one that is loaded.)"""
    before = set(sys.modules)
    try:
        yield
    finally:
        files = {name: _file_of(module) for name, module in list(sys.modules.items()) if name not in before}
        for name, file in files.items():
            if file and is_own(name, file):
                module = sys.modules.pop(name)
                if file.endswith(_COMPILED):
                    _Loaded.keep(module)


class _Loaded(MetaPathFinder, Loader):
    """Finds compiled modules that this process has loaded, by their files."""

    _modules: ClassVar[dict[str, ModuleType]] = {}

    @classmethod
    def keep(cls, module: ModuleType) -> None:
        cls._modules[_file_of(module)] = module
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin not in self._modules:
            return None
        return spec_from_file_location(name, spec.origin, loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.origin or ""]

    def exec_module(self, module: ModuleType) -> None: ...


def _file_of(module: ModuleType) -> str:
    """The module's file; of a package without one its folder; '' for built-in modules, and for a folder in a package
    whose import failed and which is not there any more."""
    names = _names_of(module)
    try:
        return names.get("__file__") or next(iter(names.get("__path__") or ()), "")
    except KeyError:
        return ""


def _names_of(module: Any) -> dict[str, Any]:
    """The module's names so far. Asked for another one, it may import what the program defers or cannot import."""
    return vars(module) if isinstance(module, ModuleType) else {}


def imported_by_name(undoing: Iterable[Patch]) -> Iterator[Patch]:
    """Where modules of the program that began before the run hold functions that are patched now, as after `from
    torch import zeros` in a notebook. `undoing`: what `applied` yielded."""
    functions = [was for was in undoing if isinstance(was.owner, ModuleType) and callable(was.value)]
    now = {id(was.value): vars(was.owner)[was.name] for was in functions}
    for name, module in list(sys.modules.items()):
        names = _names_of(module)
        if now.keys().isdisjoint(map(id, names.values())) or not is_own(name, names.get("__file__") or ""):
            continue
        for held, value in list(names.items()):
            if id(value) in now:
                yield Patch(module, held, now[id(value)], "the program imported it by name before the run")


def is_own(module: str, file: str) -> bool:
    """Whether a module belongs to the program. `file`: what its code says of itself; there may be none of that name."""
    package = module.partition(".")[0]
    return package != "flopmeter" and (package in _entered() or not _is_installed(file))


def _entered() -> set[str]:
    """The package that a command enters."""
    main: Any = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return {main.__spec__.name.partition(".")[0]}
    file = Path(getattr(main, "__file__", None) or "")
    return set(_IMPORTS.findall(file.read_text(errors="replace"))) if file.parent.name in _COMMANDS else set()


def _is_installed(file: str) -> bool:
    if file.startswith((_STANDARD_LIBRARY, _FROZEN)) or not _PACKAGES.isdisjoint(Path(file).parts):
        return True
    return any(file.startswith(folder + os.sep) and _has_records_of_pip(folder) for folder in sys.path if folder)


@functools.cache
def _has_records_of_pip(folder: str) -> bool:
    """Whether pip installed into this folder, as with --target."""
    return any(Path(folder).glob("*.dist-info"))


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FROZEN = "<frozen "  # of modules of the standard library that are part of the interpreter, such as abc
_COMMANDS = {"bin", "Scripts"}  # folders in which pip writes them
_COMPILED = tuple(EXTENSION_SUFFIXES)
_PACKAGES = {"site-packages", "dist-packages"}  # folders that pip and Debian install into
