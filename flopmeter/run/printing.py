"""How a tensor on the device named cuda prints, and what printing reads of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flopmeter.run.named_types import Names
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PRINT_OPTIONS, at_ends, dispatch_mode_stack, no_dispatch_modes


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


def _is_metered() -> bool:
    """Whether a mode answers what is read here. Below them all torch prints tensors too, for an error that nobody sees:
    `lerp_` on meta tries its overloads one by one, and one that refuses a tensor for its weight tells which."""
    return any(type(mode).__module__.startswith("flopmeter.") for mode in dispatch_mode_stack())


@around
def printed_as_cuda(cuda: Names, original: Callable[..., str], tensor: Tensor, *, tensor_contents: Any = None) -> str:
    """How a tensor on a GPU prints. Printing reads it, so unknown values print as stand-ins."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor_contents is None
    if not is_plain or not cuda.holds(tensor) or not _is_metered():
        return original(tensor, tensor_contents=tensor_contents)
    text = original(read_as_printed(tensor.detach()))
    device = f", device='{cuda.name}'"
    if tensor.grad_fn is not None:
        device += f", grad_fn=<{tensor.grad_fn.name()}>"
    elif tensor.requires_grad:
        device += ", requires_grad=True"
    return f"{text[:-1]}{device})"
