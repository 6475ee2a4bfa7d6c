"""Stand-ins for packages of compiled CUDA kernels: one file a package, whose MODULES say what a program may import.

Works around: packages such as flash-attn, which do not install without a CUDA compiler.
Until: never; their kernels run on a GPU alone.

A shim has the package's public functions and no kernels: each calls the operator of torch that does the same work, or
an operator of flopmeter's own (kernel.py) with the shapes and the cost of the package's kernel.
A shim that keeps something from call to call has a function `begin`, which forgets what the last program left, and
one that a program may put in the place of something of torch's a function `end`, which takes it back. OPERATORS are
functions in the place of compiled operators, which a program may call as torch.ops.NAMESPACE.NAME.
It is used where the user asks for it, also in place of a package that is installed, whose kernels cannot run here; the
report says so. (Not without being asked: libraries look whether a package is there, and then want its internals.)
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

import torch

from flopmeter.run.shims.kernel import left_out

_ANY = DistributionFinder.Context()
_STANDS_IN = "flopmeter's shim: it runs operators of the same work"
SHIMS = tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name != "kernel")
"""The packages that there is a shim of."""


def shim_of(package: str) -> Any:
    """The module of the shim."""
    return importlib.import_module(f"{__name__}.{package}")


def compiled_parts(package: str) -> Collection[str]:
    """The shims that an installed package needs: its own, or those of the compiled parts that its Python calls."""
    return getattr(shim_of(package), "COMPILED_PARTS", (package,))


@contextmanager
def importable(packages: Collection[str], note: Callable[[str], None]) -> Iterator[None]:
    """In this context programs import the shims of these packages, even where the packages are installed."""
    shims = [*map(shim_of, packages)]
    tops = {name.partition(".")[0] for shim in shims for name in shim.MODULES}
    before = [name for name in sys.modules if name.partition(".")[0] in tops]
    stood = {name: sys.modules.pop(name) for name in before}  # what a package that is installed had imported
    modules = _modules(shims, note)
    finder = _Finder([_Metadata(shim) for shim in shims if "__version__" in _top_of(shim)[1]], modules)
    with ExitStack() as undo:
        for shim in shims:
            getattr(shim, "begin", _nothing)()
            undo.callback(getattr(shim, "end", _nothing))
            for namespace, functions in getattr(shim, "OPERATORS", {}).items():
                _add_operators(namespace, functions, note, undo)
        sys.modules.update(modules)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [each for each in sys.modules if each.partition(".")[0] in tops]:
                del sys.modules[name]
            sys.modules.update(stood)


def _modules(shims: Iterable[Any], note: Callable[[str], None]) -> dict[str, types.ModuleType]:
    """What the program imports; two shims may have parts of one package."""
    contents: dict[str, dict[str, object]] = {}
    for shim in shims:
        for name, of_module in shim.MODULES.items():
            contents[name] = {**of_module, **contents.get(name, {})}
    modules = {name: _Shim(name, of_module, note) for name, of_module in contents.items()}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return dict(modules)


def _add_operators(
    namespace: str, functions: Mapping[str, Callable[..., Any]], note: Callable[[str], None], undo: ExitStack
) -> None:
    place = getattr(torch.ops, namespace)
    for name, function in functions.items():
        setattr(place, name, _noted(function, f"torch.ops.{namespace}.{name}", note))
        undo.callback(delattr, place, name)


def _noted(function: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        note(f"{name} is {_STANDS_IN}")
        return function(*args, **options)

    return noted


def _top_of(shim: Any) -> tuple[str, Mapping[str, object]]:
    """The package that a shim stands for, or is a part of, and what it has."""
    name, contents = next(iter(shim.MODULES.items()))
    return name, contents


def _nothing() -> None:
    """What most shims do before and after a program."""


class _Metadata(Distribution):
    """What pip would have written of the package: libraries (transformers, diffusers) ask importlib.metadata for it."""

    def __init__(self, shim: Any) -> None:
        package, contents = _top_of(shim)
        self._text = {
            "METADATA": f"Name: {shim.DISTRIBUTION}\nVersion: {contents['__version__']}\n",
            "top_level.txt": package,
        }

    def read_text(self, filename: str) -> str | None:
        return self._text.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(str(path))  # there is no file


class _Finder(DistributionFinder):
    def __init__(self, found: list[_Metadata], modules: Mapping[str, types.ModuleType]) -> None:
        self._found, self._loader = found, _Loader(modules)

    def find_spec(self, name: str, *args: object) -> importlib.machinery.ModuleSpec | None:
        """For a program that imports a package again, or reloads it."""
        return self._loader.spec_of(name)

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterator[Distribution]:
        def plain(name: str) -> str:
            return name.lower().replace("_", "-")

        return (each for each in self._found if context.name is None or plain(context.name) == plain(each.name))


class _Loader(Loader):
    """Gives the modules that there are already."""

    def __init__(self, modules: Mapping[str, types.ModuleType]) -> None:
        self._modules = modules

    def spec_of(self, name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in self._modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run: a shim's module is as it was made."""


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
            self._note(f"{self.__name__}.{name} is {_STANDS_IN}")
        return self._contents[name]
