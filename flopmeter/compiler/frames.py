"""Around the frames that Dynamo traces: there it sees torch as it is without a meter."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from flopmeter.as_cuda.autocast import traced_tensors_cast
from flopmeter.compiler.hidden import made_inside
from flopmeter.compiler.outermost import OutermostCalls
from flopmeter.compiler.pace import undisturbed
from flopmeter.compiler.replay import name_of
from flopmeter.known_values import entry_points
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PrivateName, no_dispatch_modes
from flopmeter.trace import triton_kernels

AroundTracing = Callable[[], AbstractContextManager[tuple[Any, ...]]]
"""A context in which torch is as it is without stand-ins; gives what these stand in for outside of it."""


def nothing_around() -> AbstractContextManager[tuple[Any, ...]]:
    return contextlib.nullcontext(())


class Frames:
    """The frames of the thread that made it. `outermost`: what compiles the program's modules, if anything does.
    `left_eager` gets the functions that Dynamo leaves as they are, and why."""

    def __init__(
        self, around_tracing: AroundTracing, outermost: OutermostCalls | None, left_eager: dict[str, None]
    ) -> None:
        self._around_tracing, self._outermost, self._left_eager = around_tracing, outermost, left_eager
        self._thread = threading.get_ident()
        self._stood_in_for: frozenset[int] = frozenset()  # the ids of functions of torch, while Dynamo traces
        self.has_compiled = False  # whether Dynamo has made code of any function

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def wrappers(self) -> Iterator[tuple[PrivateName, Callable[[Any], Any]]]:
        yield names.CONVERT_FRAME, self._around
        yield names.NOT_COMPILED, self._around_giving_up
        yield names.GUARD_IDENTITY, self._around_identity_guard
        yield names.RULES, functools.partial(made_inside, self.as_torch_is)
        yield names.HANDLERS, functools.partial(made_inside, self.as_torch_is)

    def _around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo compiles only functions of the program, and sees torch as it is without a meter."""
        skip = names.CONVERT_FRAME.owner.ConvertFrameReturn(
            frame_exec_strategy=names.FRAME_STRATEGY.value(names.FRAME_ACTION.value.SKIP, names.FRAME_ACTION.value.SKIP)
        )

        @undisturbed
        @functools.wraps(plain)
        def convert(callback: Any, frame: Any, *args: Any) -> Any:
            if frame.f_code.co_filename.startswith(_PACKAGE) and not frame.f_code.co_filename.startswith(_MODELS):
                return skip
            # torch forgets the modes where DDP splits the graph.
            with self.as_torch_is(), traced_tensors_cast(True), no_dispatch_modes():
                try:
                    converted = plain(callback, frame, *args)
                    self.has_compiled |= converted.guarded_code is not None
                    return converted
                except Exception as error:
                    if not (self.is_here and self._outermost and self._outermost.is_inside):
                        raise
                    self._left_eager[f"{name_of(frame.f_code)}: {text_of(error)}"] = None
                    return names.CONVERT_FRAME.owner.ConvertFrameReturn()

        return convert

    @around
    def _around_giving_up(self, plain: Callable[..., str], error: Exception, code: CodeType, *args: Any) -> str:
        """Wraps a message that Dynamo makes where it leaves a whole function uncompiled, such as one with a graph break
        in a loop; functions that it calls are compiled on their own."""
        if self.is_here and not _is_of_python(code):
            self._left_eager[f"{name_of(code)}: {_reasons(error)}"] = None
        return plain(error, code, *args)

    @contextlib.contextmanager
    def as_torch_is(self) -> Iterator[None]:
        """In this context this thread sees torch's own functions, without stand-ins."""
        if not self.is_here:
            yield
            return
        here = (entry_points.as_torch_has_them(), self._around_tracing(), triton_kernels.without_device())
        with here[0] as theirs, here[1] as ours, here[2]:
            functions = (*theirs, *ours)
            codes = (function.__code__ for function in functions if hasattr(function, "__code__"))
            self._stood_in_for = frozenset(map(id, (*functions, *codes)))
            yield

    @around
    def _around_identity_guard(self, plain: Callable[..., None], builder: Any, guard: Any, *args: Any) -> None:
        """Wraps a guard. If it fails only because the running program sees a stand-in where Dynamo saw torch's
        function, that is no reason to compile again."""
        if not self.is_here or id(builder.get(guard)) not in self._stood_in_for:
            plain(builder, guard, *args)


def _is_of_python(code: CodeType) -> bool:
    """Whether the function is of Python's library. These run no ops, and nobody asks whether they are compiled."""
    return code.co_filename.startswith(_LIBRARY) and "site-packages" not in code.co_filename


def _reasons(error: Exception) -> str:
    """Why Dynamo gave up, the last reason first: 'graph break in loop, after Call to ...'. Between two torch says that
    another one occurred."""
    texts = str(error).split("\n*** ")
    return ", after ".join(text.split("***", 1)[-1].strip().splitlines()[0] for text in reversed(texts))


def text_of(error: Exception) -> str:
    """The error in one line. Messages of torch's may be a name or a dump, which the kind of error explains."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MODELS = os.path.join(_PACKAGE, "models") + os.sep  # which are programs
