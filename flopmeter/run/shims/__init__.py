"""Stand-ins for packages of compiled CUDA kernels: one file a package, in which SHIMS names what a program may import.

Works around: packages such as flash-attn, which do not install without a CUDA compiler.
Until: never; their kernels run on a GPU alone.

A shim has the package's public functions and no kernels: each calls the operator of torch that does the same work.
It is used where the user asks for it and the package is not installed, and the report says so. (Not without being
asked: libraries look whether a package is there, and then want its internals.)
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from flopmeter.run.shims import flash_attn

SHIMS: Mapping[str, Mapping[str, Mapping[str, object]]] = {"flash_attn": flash_attn.MODULES}
"""By package: its modules, each with what is in it."""


@contextmanager
def importable(packages: Iterable[str], note: Callable[[str], None]) -> Iterator[None]:
    """Programs may import the shims of these packages inside, where the packages are not installed."""
    added = []
    for package in packages:
        modules = SHIMS[package]
        if importlib.util.find_spec(package) is None:
            for name, contents in modules.items():
                sys.modules[name] = _module(name, contents, note)
                added.append(name)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


class _Shim(types.ModuleType):
    """Says in the report, when something is taken from it, that a shim stands in."""

    def __init__(self, name: str, contents: Mapping[str, object], note: Callable[[str], None]) -> None:
        super().__init__(name, f"flopmeter's shim of {name}.")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._contents, self._note = contents, note

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._contents:
            raise ImportError(
                f"flopmeter's shim of {self.__name__} has no {name!r}; it has {', '.join(self._contents)}"
            )
        self._note(f"{self.__name__}.{name} is flopmeter's shim: it runs torch's operator of the same work")
        return self._contents[name]


def _module(name: str, contents: Mapping[str, object], note: Callable[[str], None]) -> types.ModuleType:
    return _Shim(name, contents, note)
