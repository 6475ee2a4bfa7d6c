"""torch.compile'd functions run eagerly, each call as a region of its own.

Works around: Dynamo gives up on every frame while a dispatch mode is on, and nothing says which call runs.
Until: the compiler itself is always asked which kernels it launches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names import dispatcher, private

RAN_EAGERLY = (
    "torch.compile was called inside: its functions ran eagerly, so eager figures are those of unfused kernels"
)


@dataclass(frozen=True)
class _CompiledCall:
    """Handed to a compiled call on entering and back by it on leaving."""

    number: int
    before: _CompiledCall | None
    setting: Any  # what torch's own function returned


class _Running(threading.local):
    region: _CompiledCall | None = None


_running = _Running()


def compiled_region() -> int | None:
    """The number, from 1, of the call of a torch.compile'd function that is running in this thread, or None."""
    return None if _running.region is None else _running.region.number


def install(scope: Emulation) -> None:
    """Run compiled functions eagerly and know when one runs.

    Under a dispatch mode torch.compile gives up on each frame, and raises with fullgraph=True; the public stance
    'force_eager' does neither. Torch is imported without its compiler: where the program has not asked for that
    yet, wait for torch.compile.
    """
    if private.AROUND_COMPILED_CALL.loaded:
        _mark_regions(scope)
        return
    compile_, mark_once = torch.compile, functools.cache(functools.partial(_mark_regions, scope))

    @functools.wraps(compile_)
    def compile_and_mark(*args: Any, **kwargs: Any) -> Any:
        mark_once()
        return compile_(*args, **kwargs)

    scope.patch(torch, "compile", compile_and_mark)


def _mark_regions(scope: Emulation) -> None:
    stance = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    scope.on_close(stance.__exit__, None, None, None)
    scope.on_close(register_optimizer_step_pre_hook(_make_capturable).remove)
    around_call, count = private.AROUND_COMPILED_CALL.value, 0

    def mark(setting: Any) -> Any:
        """Called with a setting before each compiled call, and after it with what it then returned."""
        nonlocal count
        if isinstance(setting, _CompiledCall):
            _running.region = setting.before
            return around_call(setting.setting)
        scope.note(RAN_EAGERLY)
        before = _running.region
        if before is None:  # a compiled call inside of one is inlined: the same region
            count += 1
        number = count if before is None else before.number
        _running.region = _CompiledCall(number, before, around_call(setting))
        return _running.region

    scope.patch_private(private.AROUND_COMPILED_CALL, mark)
    _forget_tables_made_meanwhile(scope)
    for name in ("is_compiling", "is_dynamo_compiling"):
        scope.patch(torch.compiler, name, _told_in_regions(getattr(torch.compiler, name)))


def _forget_tables_made_meanwhile(scope: Emulation) -> None:
    """Dynamo keeps tables by function. One that it makes while functions of ours stand in for torch's knows ours alone,
    and would refuse to trace torch's afterwards."""
    for name in (names.RULES, names.HANDLERS):
        if name.present():
            table = name.value
            scope.on_close(_forget_unless, table, table() if table.cache_info().currsize else None)


def _forget_unless(table: Any, made: object) -> None:
    """Empty the table unless it is the one that was made before."""
    if table.cache_info().currsize and table() is not made:
        table.cache_clear()


def _told_in_regions(is_compiling: Callable[[], bool]) -> Callable[[], bool]:
    """Tells a program that it is being compiled, so that it goes the way that the compiler would see."""
    return functools.wraps(is_compiling)(lambda: compiled_region() is not None or is_compiling())


def _make_capturable(optimizer: Optimizer, *_: Any) -> None:
    """What torch.compile does to an optimizer whose parameters are on a GPU (torch/_dynamo/variables/optimizer.py):
    the step counters live there too, so that a step is one graph."""
    if compiled_region() is None:
        return
    for group in optimizer.param_groups:
        if "capturable" in group and all(map(dispatcher.is_emulated, group["params"])):
            group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor) and state["step"].is_cpu:
                    state["step"] = torch.empty_like(state["step"], device=parameter.device)
