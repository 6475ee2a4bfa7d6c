"""What printing a tensor on a GPU reads of it."""

from __future__ import annotations

import torch
from torch import Tensor

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
