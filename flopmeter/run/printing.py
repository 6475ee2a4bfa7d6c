"""How a tensor on the device named cuda prints, and what printing reads of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flopmeter.run.named_types import Names
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PRINT_OPTIONS, at_ends, no_dispatch_modes


def read_as_printed(tensor: Tensor) -> Tensor:
    """The tensor on the CPU. Of a large one torch takes the numbers that it shows on the GPU, and reads only these."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.numel() <= PRINT_OPTIONS.threshold:
        return tensor.cpu()
    shown, at_end = at_ends(tensor).cpu(), PRINT_OPTIONS.edgeitems
    with no_dispatch_modes():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # of which nothing else is touched
        places = [
            torch.cat((torch.arange(at_end), torch.arange(size - at_end, size))) if size > 2 * at_end else range(size)
            for size in tensor.shape
        ]
        whole[torch.meshgrid(*map(torch.as_tensor, places), indexing="ij")] = shown
    return whole


@around
def printed_as_cuda(cuda: Names, original: Callable[..., str], tensor: Tensor, *, tensor_contents: Any = None) -> str:
    """How a tensor on a GPU prints. Printing reads it, so unknown values print as stand-ins."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not cuda.holds(tensor) or tensor_contents is not None:
        return original(tensor, tensor_contents=tensor_contents)
    text = original(read_as_printed(tensor.detach()))
    device = f", device='{cuda.name}'"
    if tensor.grad_fn is not None:
        device += f", grad_fn=<{tensor.grad_fn.name()}>"
    elif tensor.requires_grad:
        device += ", requires_grad=True"
    return f"{text[:-1]}{device})"
