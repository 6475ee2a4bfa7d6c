"""What a list in a subscript holds is read off the program's source, where Python says where in the line it is."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType

import pytest
import torch

from flopmeter import DataDependentError, FlopMeter

X = torch.arange(5)
NO_COLUMNS, MOST = 13, 8  # a kind of entry in a code object's table of places, and the instructions that one covers


def third(x: torch.Tensor) -> int:
    return x[[2, 3]][0].item()


def without_columns(code: CodeType) -> CodeType:
    """As compiled under `python -X no_debug_ranges`: a line for each instruction, and no columns."""
    units, table = len(code.co_code) // 2, b""
    while units:
        count = min(units, MOST)
        table += bytes([0x80 | NO_COLUMNS << 3 | count - 1, 0])
        units -= count
    return code.replace(co_linetable=table)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 says no columns at all")
def test_without_columns_in_the_program_the_numbers_stay_unknown_and_it_runs_as_far_as_without_them():
    compiled = without_columns(third.__code__)
    assert all(columns == (None, None) for *_, columns in ((*p[:2], p[2:]) for p in compiled.co_positions()))
    with FlopMeter():
        assert third(X.to("meta")) == 2
    with FlopMeter(), pytest.raises(DataDependentError):
        FunctionType(compiled, globals())(X.to("meta"))
