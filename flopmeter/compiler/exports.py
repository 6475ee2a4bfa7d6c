"""torch.export and AOTInductor under a meter: a program that is read, a package that is compiled from it and called.

Exporting runs nothing: the recorder lets those ops pass. For a package torch would compile machine code for the CPU,
since meta tensors are on no GPU, and nobody would see its calls. What AOTInductor writes for a GPU are inductor's
kernels of the exported program, so a call of the package is a call of that program through torch.compile. No file is
written: there would be no code to put into it.

Works around: AOTInductor compiles a program on meta for the CPU, and no dispatch mode sees what its package runs.
Until: it compiles for a device that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

from flopmeter.compiler.hidden import hooks_hidden
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import AOT_COMPILE, AOTI_COMPILE, AOTI_LOAD


class Exports:
    """A context: the meter's hooks are no part of what the program exports, and packages of AOTInductor are run by
    torch.compile, those of CPU programs by torch."""

    def __init__(self) -> None:
        self._compiled: dict[object, Callable[..., Any]] = {}  # by the path or the file that the program named
        self._undo = ExitStack()
        self._is_installed = False

    @property
    def notes(self) -> Iterator[str]:
        if self._compiled:
            names = ", ".join(dict.fromkeys(os.path.basename(str(key)) for key in self._compiled))
            yield f"AOTInductor: a call of {names} counts as torch.compile of the exported program; no file was written"

    def __enter__(self) -> Exports:
        """Nothing of inductor is imported, which takes a second, until there is an exported program to compile."""
        init = self._when_first_exporting(ExportedProgram.__init__)
        self._undo.enter_context(mock.patch.object(ExportedProgram, "__init__", init))
        self._undo.enter_context(mock.patch.object(torch.export, "export", _without_hooks(torch.export.export)))
        if AOTI_COMPILE.loaded:  # there may be exported programs already
            self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @around
    def _when_first_exporting(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._install()
        init(*args, **kwargs)

    def _install(self) -> None:
        if self._is_installed:
            return
        self._is_installed = True
        for name, wrapper in (
            (AOTI_COMPILE, self._in_place_of_compile),
            (AOTI_LOAD, self._in_place_of_load),
            (AOT_COMPILE, _refused_off_the_cpu),
        ):
            if hasattr(name.owner, name.attribute):
                self._undo.enter_context(name.replaced(wrapper(name.value)))

    @around
    def _in_place_of_compile(
        self,
        plain: Callable[..., Any],
        program: ExportedProgram,
        *args: Any,
        package_path: Any = None,
        inductor_configs: Any = None,
    ) -> Any:
        if _is_on_cpu((program.example_inputs, *program.state_dict.values())):
            return plain(program, *args, package_path=package_path, inductor_configs=inductor_configs)
        path = f"{id(self):x}_{len(self._compiled)}.pt2" if package_path is None else package_path
        dynamic = None if program.range_constraints else False
        run = torch.compile(program.module(), dynamic=dynamic, options=inductor_configs)
        self._compiled[_key(path)] = torch.no_grad()(run)
        return path

    @around
    def _in_place_of_load(self, plain: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._compiled.get(_key(path)) or plain(path, *args, **kwargs)


@around
def _without_hooks(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with hooks_hidden():
        return plain(*args, **kwargs)


def _key(path: Any) -> object:
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else path


def _is_on_cpu(values: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_in(values))


@around
def _refused_off_the_cpu(plain: Callable[..., Any], graph: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
    if not _is_on_cpu((args, *graph.state_dict().values())):
        raise RuntimeError(
            "aot_compile makes code for a GPU that is not there, whose calls nobody would count: use "
            "torch._inductor.aoti_compile_and_package and aoti_load_package"
        )
    return plain(graph, args, *rest, **kwargs)
