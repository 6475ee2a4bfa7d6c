"""Stand-ins for packages of compiled CUDA kernels: one file a package, whose MODULES say what a program may import.

Works around: packages such as flash-attn, which do not install without a CUDA compiler.
Until: never; their kernels run on a GPU alone.

A shim has the package's public functions and no kernels: each calls the operator of torch that does the same work, or
an operator of flopmeter's own (kernel.py) with the shapes and the cost of the package's kernel.
A shim that keeps something from call to call has a function `begin`, which forgets what the last program left.
It is used where the user asks for it, also in place of a package that is installed, whose kernels cannot run here; the
report says so. (Not without being asked: libraries look whether a package is there, and then want its internals.)
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from flopmeter.run.shims.kernel import left_out

_ANY = DistributionFinder.Context()
SHIMS = tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name != "kernel")
"""The packages that there is a shim of."""


def modules_of(package: str) -> Mapping[str, Mapping[str, object]]:
    """The modules of a shim, each with its contents."""
    return importlib.import_module(f"{__name__}.{package}").MODULES


def compiled_parts(package: str) -> Collection[str]:
    """The shims that an installed package needs: its own, or those of the compiled parts that its Python calls."""
    return getattr(importlib.import_module(f"{__name__}.{package}"), "COMPILED_PARTS", (package,))


@contextmanager
def importable(packages: Collection[str], note: Callable[[str], None]) -> Iterator[None]:
    """In this context programs import the shims of these packages, even where the packages are installed."""
    tops = {name.partition(".")[0] for package in packages for name in modules_of(package)}
    before = [name for name in sys.modules if name.partition(".")[0] in tops]
    stood = {name: sys.modules.pop(name) for name in before}  # what a package that is installed had imported
    for package in packages:
        begin = getattr(importlib.import_module(f"{__name__}.{package}"), "begin", None)
        if begin is not None:
            begin()
        modules = {name: _Shim(name, contents, note) for name, contents in modules_of(package).items()}
        for name, module in modules.items():
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(modules[parent], own, module)
            sys.modules[name] = module
    finder = _Finder([_Metadata(package) for package in packages if "__version__" in modules_of(package)[package]])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(stood)


class _Metadata(Distribution):
    """What pip would have written of the package: libraries (transformers, diffusers) ask importlib.metadata for it."""

    def __init__(self, package: str) -> None:
        shim = importlib.import_module(f"{__name__}.{package}")
        self._text = {
            "METADATA": f"Name: {shim.DISTRIBUTION}\nVersion: {shim.MODULES[package]['__version__']}\n",
            "top_level.txt": package,
        }

    def read_text(self, filename: str) -> str | None:
        return self._text.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(str(path))  # there is no file


class _Finder(DistributionFinder):
    def __init__(self, found: list[_Metadata]) -> None:
        self._found = found

    def find_spec(self, *args: object) -> None:
        """It finds no module: those of shims are in sys.modules."""

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterator[Distribution]:
        def plain(name: str) -> str:
            return name.lower().replace("_", "-")

        return (each for each in self._found if context.name is None or plain(context.name) == plain(each.name))


class _Shim(types.ModuleType):
    """A module of a shim. When the program takes something from it, the report says that a shim stands in."""

    def __init__(self, name: str, contents: Mapping[str, object], note: Callable[[str], None]) -> None:
        super().__init__(name, f"flopmeter's shim of {name}.")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._contents, self._note = contents, note
        vars(self).update({name: value for name, value in contents.items() if name.startswith("__")})

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._contents and name.startswith("_"):
            return left_out(self.__name__, name)
        if name not in self._contents:
            raise ImportError(
                f"flopmeter's shim of {self.__name__} has no {name!r}; it has {', '.join(self._contents)}"
            )
        if callable(self._contents[name]):
            self._note(f"{self.__name__}.{name} is flopmeter's shim: it runs operators of the same work")
        return self._contents[name]
