"""What is to be done once a program imports a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def entered_once_imported(module: str, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter the context at once if the module is imported, or else when the program imports it; leave it with this
    one."""
    with ExitStack() as undo:
        if module in sys.modules:
            undo.enter_context(context())
        else:
            finder = _Awaits(module, lambda: undo.enter_context(context()))
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
        yield


@contextmanager
def no_folder_instead_of(package: str) -> Iterator[None]:
    """Where the package is not installed, an import of it fails, also beside a folder of that name, which Python would
    take for a part of it: NVIDIA's examples have a folder `triton`, and torch would look for Triton there."""
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        yield
        return
    before = {package: sys.modules[package]} if package in sys.modules else {}
    sys.modules[package] = None  # type: ignore[assignment]  # as Python wants it of what cannot be imported
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(before)


class _Awaits(MetaPathFinder):
    """Finds the module as the other finders do, and calls back when it has run."""

    def __init__(self, module: str, call_back: Callable[[], object]) -> None:
        self._module, self._call_back, self._is_asking = module, call_back, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_call_back(spec.loader)  # type: ignore[method-assign,assignment]
        return spec

    def _then_call_back(self, loader: Loader) -> Callable[[ModuleType], None]:
        execute = loader.exec_module

        def run(module: ModuleType) -> None:
            execute(module)
            self._call_back()

        return run
