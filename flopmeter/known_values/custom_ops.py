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
from flopmeter.records.memory_format import torch_strides

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
    with no_modes():
        kwargs = {name: _or_zeros(known, value) for name, value in call.kwargs.items()}
        return _on_meta(call.func(*_or_zeros(known, call.args), **kwargs))


def _or_zeros(known: Knowledge, argument: Any) -> Any:
    """The argument as the CPU sees it, with zeros where it is not known."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(_or_zeros(known, item) for item in argument)
    if isinstance(argument, Tensor) and not known.values.knows(argument):
        return torch.zeros(argument.shape, dtype=argument.dtype, device="cpu")
    return known.real(argument)


def _on_meta(result: Any) -> Any:
    if isinstance(result, Tensor):
        return torch.empty_strided(result.size(), torch_strides(result), dtype=result.dtype, device="meta")
    return type(result)(map(_on_meta, result)) if isinstance(result, (list, tuple)) else result
