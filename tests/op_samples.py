"""Inputs that torch's own tests give its operators (op_db)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_utils


def inputs_of(entry: Any, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> Iterator[Any]:
    """The sample inputs of an entry, on the CPU. For each of them torch would look through the whole stack for its own
    kind of test, with the source of every frame: nine tenths of the time of a sweep."""
    with mock.patch.object(common_utils, "extract_test_fn", return_value=None):
        yield from entry.sample_inputs("cpu", dtype, requires_grad=requires_grad)
