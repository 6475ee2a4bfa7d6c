"""What the modules below torch.cuda answer: TunableOp's switches, memory pools, and for all that needs a device a
refusal by name.

Works around: a torch without a GPU, whose functions there fail with a name of torch._C.
Until: torch answers for a device that a profile describes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from flopmeter.run.graph_pools import graph_pool_handle
from flopmeter.run.patches import Patch
from flopmeter.torch_names.private import TEXT_KERNEL

# What these define of their own needs a device, unless it has an answer. Some torch lacks one or another.
_MODULES = (
    "torch.cuda.memory", "torch.cuda.nccl", "torch.cuda.gds", "torch.cuda.green_contexts", "torch.cuda.tunable",
    "torch.accelerator", "torch.accelerator.graphs", "torch.accelerator.memory",
)  # fmt: skip
_NCCL = ("is_available", "version")  # the same without a device


def absent(name: str, original: Any = None) -> Any:
    """What stands in place of a name of the module. A class stays a class, and a function keeps its `__wrapped__`:
    Dynamo compares values with them."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not available under flopmeter: no GPU runs, and no model answers for it")

    if isinstance(original, type):
        return type(name, (), {"__new__": refused})
    return functools.wraps(original)(refused) if callable(original) else refused


def patches(answers: Mapping[str, Any], accelerator: Mapping[str, Any], note: Callable[[str], None]) -> Iterator[Patch]:
    """`answers` of torch.cuda and of torch.accelerator, by name; `note` tells what was left out."""
    own = {
        "torch.cuda.memory": answers,
        "torch.cuda.nccl": {name: vars(torch.cuda.nccl)[name] for name in _NCCL},
        "torch.cuda.tunable": TunableOp(note).answers(),
        "torch.accelerator": accelerator,
        "torch.accelerator.memory": accelerator,
    }
    for name in _MODULES:
        if (module := _imported(name)) is not None:
            yield from _of(module, own.get(name, {}))
    yield from _of_kernels_in_text()
    for name in ("_record_memory_history", "_snapshot", "_dump_snapshot"):
        left = left_out(f"torch.cuda.memory.{name}", note)
        yield Patch(torch.cuda.memory, name, left, "there is no allocator")


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _of(module: ModuleType, answers: Mapping[str, Any]) -> Iterator[Patch]:
    for name, value in list(vars(module).items()):
        if name in answers:
            yield Patch(module, name, answers[name], "answers for the device of the profile")
        elif _needs_a_device(module, name, value):
            yield Patch(module, name, absent(f"{module.__name__}.{name}", value), "says that it is not there")


def _needs_a_device(module: ModuleType, name: str, value: Any) -> bool:
    """Whether it is a function or a class of the module's own, for programs."""
    is_own = str(getattr(value, "__module__", "")).startswith(module.__name__)
    return is_own and callable(value) and not name.startswith("_")


def _of_kernels_in_text() -> Iterator[Patch]:
    """Kernels that a program gives to torch as text, to be compiled: they may be defined, and are refused when they are
    called."""
    if TEXT_KERNEL.present():
        kernel = TEXT_KERNEL.value
        yield Patch(kernel, "__call__", absent("a kernel of torch.cuda.jiterator", kernel.__call__), "nothing compiles")


def left_out(name: str, note: Callable[[str], None], result: Any = None) -> Callable[..., Any]:
    def leave_out(*args: Any, **kwargs: Any) -> Any:
        note(f"{name} was left out: no GPU runs")
        return result

    return leave_out


class MemPool:
    """torch.cuda.MemPool: it only tells pools apart. The allocator's model has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = graph_pool_handle()
        self.allocator = None

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        return []


def use_mem_pool(note: Callable[[str], None]) -> Callable[..., Any]:
    @contextmanager
    def using(pool: MemPool, device: Any = None) -> Iterator[None]:
        note("torch.cuda.use_mem_pool changes nothing: the allocator's model has one pool")
        yield

    return using


class TunableOp:
    """torch.cuda.tunable: its switches keep what the program sets; no kernel is tried, and none is tuned."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._kept: dict[str, Any] = {}

    def answers(self) -> dict[str, Any]:
        switches = {
            "enable": ("is_enabled", False),
            "tuning_enable": ("tuning_is_enabled", True),
            "record_untuned_enable": ("record_untuned_is_enabled", False),
            "set_max_tuning_duration": ("get_max_tuning_duration", 30),
            "set_max_tuning_iterations": ("get_max_tuning_iterations", 100),
            "set_filename": ("get_filename", "tunableop_results.csv"),
            "set_rotating_buffer_size": ("get_rotating_buffer_size", 0),
        }  # with torch's defaults
        found: dict[str, Any] = {"get_results": tuple, "get_validators": tuple}
        for setter, (getter, value) in switches.items():
            found[setter] = functools.partial(self._keep, getter)
            found[getter] = functools.partial(self._kept.get, getter, value)
        works = ("read_file", "write_file", "tune_gemm_in_file", "mgpu_tune_gemm_in_file")
        found |= {name: left_out(f"torch.cuda.tunable.{name}", self._note, False) for name in works}
        return found | {"set_numerical_check_tolerances": lambda *args, **kwargs: None}

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> None:
        value = next(iter((*args, *kwargs.values())), True)
        self._kept[name] = value
        if name == "is_enabled" and value:
            self._note("torch.cuda.tunable tries no kernels: products are priced as the libraries choose them")
