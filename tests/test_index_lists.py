"""What a list in a subscript holds is read off the program's source, where Python says where in the line it is."""

from __future__ import annotations

from types import CodeType, FunctionType

import pytest
import torch

from flopmeter import DataDependentError, FlopMeter

X = torch.arange(5)
NO_COLUMNS, MOST = 13, 8  # a kind of entry in a code object's table of places, and the instructions that one covers


def fourth(x: torch.Tensor) -> int:
    return (
        x[[2, 3]][[1, 0]]
    )[0].item()  # fmt: skip


def without_columns(code: CodeType) -> CodeType:
    """As compiled under `python -X no_debug_ranges`: lines without columns. Here all are of the line of two lists."""
    units, table = len(code.co_code) // 2, b""
    while units:
        count = min(units, MOST)
        table += bytes([0x80 | NO_COLUMNS << 3 | count - 1, 0])
        units -= count
    return code.replace(co_linetable=table, co_firstlineno=code.co_firstlineno + 2)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_list_of_more_than_numbers_is_left_to_torch():
    """Torch takes it for a tuple: of row 0 the elements 1 and 2."""
    square = torch.arange(9).reshape(3, 3)
    assert square[[0, [1, 2]]].tolist() == [1, 2]
    with FlopMeter():
        square = square.to("meta")
        picked = square[[0, [1, 2]]]
        assert picked.shape == (2,)
        with pytest.raises(DataDependentError):
            picked.tolist()


def test_without_columns_in_the_program_the_numbers_stay_unknown_and_it_runs_as_far_as_without_them():
    compiled = without_columns(fourth.__code__)
    line = fourth.__code__.co_firstlineno + 2
    assert set(compiled.co_positions()) == {(line, line, None, None)}
    with FlopMeter():
        assert fourth(X.to("meta")) == 3
    with FlopMeter(), pytest.raises(DataDependentError):
        FunctionType(compiled, globals())(X.to("meta"))


def test_a_tensor_that_a_function_lets_go_is_freed_though_the_function_subscripts_by_a_variable():
    """Two picks of 100 rows of 4 KB, one after the other: one of them is alive at a time, with its double."""
    table, rows = torch.empty(10, 1000, device="meta"), torch.empty(100, dtype=torch.int64, device="meta")

    def program() -> None:
        picked = table[rows]
        doubled = picked * 2
        del picked
        again = table[rows]
        del doubled
        again * 2

    with FlopMeter() as meter:
        program()
    pick = 100 * 1000 * 4
    assert meter.report().memory.peak_bytes == table.nbytes + rows.nbytes + 2 * pick


def test_what_locals_gave_a_function_stays_as_it_was_though_the_function_subscripts_by_a_variable():
    table, rows = torch.empty(10, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")

    def program(source: torch.Tensor, places: torch.Tensor) -> list[str]:
        given = locals()
        source[places]
        return sorted(set(given) - {"given"})

    with FlopMeter():
        assert program(table, rows) == ["places", "source"]
