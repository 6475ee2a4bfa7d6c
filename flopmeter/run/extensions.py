"""CUDA kernels that a package compiles when it runs (torch.utils.cpp_extension): those that torch has too stand in, and
a program that only asks for the version of CUDA's compiler gets it.

Works around: the compiler of CUDA and the GPU that they need.
Until: never; where flopmeter runs there is neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flopmeter.run.driver_tool import cuda_home
from flopmeter.run.patches import Patch, applied
from flopmeter.torch_names.imported import entered_once_imported
from flopmeter.torch_names.operators import aten

_MODULE = "torch.utils.cpp_extension"
_DECOUPLED = 1  # the mode of AdamW; 0 is that of Adam with an L2 penalty


def _adam(
    chunk: int,
    skipped: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """DeepSpeed's csrc/adam/multi_tensor_adam.cu: gradients, parameters and both moments in one pass, as torch's."""
    gradients, parameters, first, second = map(list, lists)
    steps = [torch.empty((), device=parameters[0].device)] * len(parameters)  # a number of the host's in DeepSpeed
    update = aten._fused_adamw_ if mode == _DECOUPLED else aten._fused_adam_
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "eps": eps}
    with torch.no_grad():
        update(parameters, gradients, first, second, [], steps, **options, amsgrad=False, maximize=False)


KERNELS: Mapping[str, Mapping[str, Callable[..., Any]]] = {"fused_adam": {"multi_tensor_adam": _adam}}
"""By the name of an extension: its functions, which run operators of torch that do the same work."""


def standing_in(note: Callable[[str], None]) -> AbstractContextManager[None]:
    """In this context programs get these kernels where they would compile them."""
    return entered_once_imported(_MODULE, lambda: _patched(note))


@contextmanager
def _patched(note: Callable[[str], None]) -> Iterator[None]:
    module: Any = sys.modules[_MODULE]
    with ExitStack() as undo:
        home = module.CUDA_HOME or str(undo.enter_context(cuda_home(str(torch.version.cuda))))
        undo.enter_context(applied(_patches(module, home, note)))
        yield


def _patches(module: Any, home: str, note: Callable[[str], None]) -> Iterator[Patch]:
    compiled = module.load

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in KERNELS:
            return compiled(name, *args, **kwargs)
        note(f"the CUDA extension {name} is not compiled: torch's operators of the same work stand in for its kernels")
        return SimpleNamespace(**KERNELS[name])

    yield Patch(module, "load", load, "its kernels need the compiler of CUDA")
    yield Patch(module, "CUDA_HOME", home, "programs ask its compiler for the version; a CPU build looks for none")
