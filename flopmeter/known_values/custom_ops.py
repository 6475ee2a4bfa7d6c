"""Operators that are not torch's: those of packages of kernels (fbgemm, torchrec), and a program's own.

Their kernels for the CPU answer what a program asks for: offsets from lengths, and how long a result is whose size
depends on data. An operator's fake kernel cannot tell that size; it asks torch.library.get_ctx() for a symbol.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import is_discrete, no_modes

SIZE_BY_INTEGERS = "the size of a result depends on integers, not on unknown floats"
_ASKS_FOR_A_SIZE = "data-dependent shape"  # in what torch._library.fake_impl raises on meta tensors (2.11 to 2.15)
MOST_ZEROS = 1 << 28  # elements in place of unknown floats, 1 GB in fp32: the CPU's kernel reads each of them


def custom(known: Knowledge, call: Invocation) -> Any:
    """Integers that are known make known results. A size that depends on data is that of the CPU's kernel."""
    counts = bool(call.tensors) and not call.writes and all(map(is_discrete, call.tensors))
    try:
        return known.replay(call) if counts else known.run_unknown(call)
    except RuntimeError as error:
        if _ASKS_FOR_A_SIZE not in str(error) or not any(tensor.is_meta for tensor in call.tensors):
            raise
    return _of_the_cpu(known, call)


def _of_the_cpu(known: Knowledge, call: Invocation) -> Any:
    """What the op returns for zeros in place of unknown floats. The integers must be known."""
    unknown = [tensor for tensor in call.tensors if not known.values.knows(tensor)]
    if any(map(is_discrete, unknown)) or sum(tensor.numel() for tensor in unknown) > MOST_ZEROS:
        raise DataDependentError(str(call.func))
    if not unknown:
        return known.lift(known.answer(call))
    known.assume.note(SIZE_BY_INTEGERS, call.func)

    def value(tensor: Tensor) -> Tensor:
        if known.values.knows(tensor):
            return known.values.read(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    with no_modes():
        result = call.func(*known.real(call.args, value), **known.real(call.kwargs, value))
    return known.lift(result, is_known=False)
