"""FlopMeter(compile=True): the outermost module calls and the optimizer steps of a program go through torch.compile.

Module calls are met at `nn.Module.__call__`. A step is met inside the wrapper that torch puts around the `step` of each
optimizer class: it asks the hooks first and looks its function up afterwards, so a hook can put another one there for
this call. That also meets steps that a learning-rate scheduler wrapped, or that the program kept.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CellType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from flopmeter.records import Trace
from flopmeter.trace.module_paths import compiled_module


class OutermostCalls:
    """A context: each module that the program calls in this thread, and each optimizer's step, is compiled, once.

    What was compiled is kept, with its module or optimizer, until the context is left; `left_eager` gets the functions
    that ran eagerly, and why. A step that is given a closure runs eagerly, so that the model in it is what is compiled.
    """

    def __init__(self, trace: Trace, left_eager: dict[str, None]) -> None:
        self._trace, self._left_eager = trace, left_eager
        self._thread = threading.get_ident()
        self._compiled: dict[int, tuple[object, Callable[..., Any]]] = {}  # by the id of a module or optimizer
        self._is_open = False
        self._undo = ExitStack()
        self.is_inside = False  # one of these calls runs

    def __enter__(self) -> OutermostCalls:
        torch.compile(_nothing)  # torch adapts its optimizers to the compiler when it is first asked for
        self._plain_call = nn.Module.__call__
        self._our_call = self._around_call(self._plain_call)
        self._is_open = True
        self._undo.callback(self._close)
        _set_call(self._our_call)
        self._undo.callback(register_optimizer_step_pre_hook(self._meet_step).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _close(self) -> None:
        self._is_open = False
        _set_call(self._plain_call)
        self._compiled.clear()

    @property
    def notes(self) -> Iterator[str]:
        yield (
            "compile=True: the outermost calls of modules, and optimizer steps, ran as if the program compiled them; "
            "what it does between them, such as a loss outside of a module, ran eagerly"
        )

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """In this context `nn.Module.__call__` is torch's own: inside of compiled code Dynamo would trace into ours."""
        if nn.Module.__call__ is not self._our_call:
            yield
            return
        _set_call(self._plain_call)
        try:
            yield
        finally:
            _set_call(self._our_call)

    @property
    def _is_here(self) -> bool:
        return self._is_open and threading.get_ident() == self._thread

    def _around_call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_here:
                return plain(module, *args, **kwargs)
            if compiled_module(module) is not None:  # the program compiled it
                with self.hidden():
                    return plain(module, *args, **kwargs)
            return self._run(module, module, type(module).__name__, args, kwargs)

        return call

    def _meet_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook of the step. After the hooks, the step's wrapper calls the function that its cell holds."""
        if not self._is_here or self.is_inside:
            return
        name = f"{type(optimizer).__name__}.step"
        cell = _cell_of_step(type(optimizer))
        if cell is None:
            self._left_eager[f"{name}: torch did not wrap it as flopmeter knows"] = None
            return
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer
            self._left_eager[f"{name}: it is given a closure, whose modules are compiled"] = None
            return
        plain = cell.cell_contents

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            cell.cell_contents = plain
            return self._run(optimizer, MethodType(plain, optimizer), name, args, kwargs)

        cell.cell_contents = step

    def _run(
        self, owner: object, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the compiled function; note where torch ran it op by op."""
        first, self.is_inside = len(self._trace.ops), True
        try:
            with self.hidden():
                if id(owner) not in self._compiled:
                    self._compiled[id(owner)] = owner, torch.compile(function)
                return self._compiled[id(owner)][1](*args, **kwargs)
        finally:
            self.is_inside = False
            ops = self._trace.ops[first:]
            if ops and all(op.graph is None and op.region is None for op in ops):
                self._left_eager[f"{name}: torch compiles nothing of it"] = None


def _cell_of_step(kind: type[Optimizer]) -> CellType | None:
    """Where the wrapper that `Optimizer.profile_hook_step` made for this class looks its function up."""
    wrapper = Optimizer.profile_hook_step(_nothing).__code__
    function: Any = kind.step
    while function is not None and function.__code__ is not wrapper:
        function = getattr(function, "__wrapped__", None)
    if function is None or "func" not in wrapper.co_freevars:
        return None
    return function.__closure__[wrapper.co_freevars.index("func")]


def _set_call(call: Any) -> None:
    nn.Module.__call__ = call  # type: ignore[method-assign]


def _nothing() -> None:
    pass
