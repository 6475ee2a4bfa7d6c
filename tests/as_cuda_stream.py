"""Meta tensors to run programs on, and the op streams of programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Program = Callable[[], Any]


def f32(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(grad)


f16 = partial(f32, dtype=torch.float16)
bf16 = partial(f32, dtype=torch.bfloat16)


def module(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Stream(TorchDispatchMode):
    """Writes down each aten op and the dtype of its first result, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            head = result[0] if isinstance(result, (tuple, list)) and result else result
            dtype = f":{head.dtype}".replace("torch.", "") if isinstance(head, Tensor) else ""
            self.ops.append(str(func).removeprefix("aten.") + dtype)
        return result

    @property
    def names(self) -> list[str]:
        """The ops without overload and dtype."""
        return [op.partition(".")[0] for op in self.ops]


def ops_of(program: Program) -> list[str]:
    """The aten ops that `program` dispatches, by name."""
    with Stream() as stream:
        program()
    return stream.names


def record(case: Callable[[], Program]) -> dict[str, str]:
    """The ops of a case's forward and, where its result needs a gradient, of its backward."""
    program = case()
    with Stream() as forward:
        result = program()
    streams = {"fwd": " ".join(forward.ops)}
    if isinstance(result, Tensor) and result.requires_grad:
        seed = torch.empty_like(result)
        with Stream() as backward:
            result.backward(seed)
        streams["bwd"] = " ".join(backward.ops)
    return streams
