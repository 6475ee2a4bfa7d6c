"""Kernels in the language of Triton, by hand: integers as in C, calls, branches and turns."""

from __future__ import annotations

import operator

import pytest

from flopmeter.trace.ttir import body_of, parse


def counted(lines: str, *arguments: int, grid: tuple[int, ...] = (1,), more: str = ""):
    """The additions of floats, by element, of a kernel of these lines and four integers."""
    given = ", ".join(f"%a{number}: i32" for number in range(4))
    text = f"""
module {{
  tt.func public @kernel({given}) attributes {{noinline = false}} {{
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %x = arith.constant 1.000000e+00 : f32
{lines}
    tt.return
  }}
{more}
}}"""
    padded = [*arguments, *(0 for _ in range(4 - len(arguments)))]
    return body_of("kernel", parse(text), grid, padded)


def additions(body) -> int:
    return sum(op.number for op in body.ops if op.name == "arith.addf")


def turns(value: str) -> str:
    """As many additions as this value says."""
    return f"""    scf.for %i = %c0 to {value} step %c1  : i32 {{
      %y = arith.addf %x, %x : f32
    }}"""


@pytest.mark.parametrize(
    ("operation", "a", "b", "value"),
    [
        ("arith.addi %a0, %a1 : i32", 5, 7, 12), ("arith.subi %a0, %a1 : i32", 9, 4, 5),
        ("arith.muli %a0, %a1 : i32", 3, 5, 15), ("arith.divsi %a0, %a1 : i32", 17, 5, 3),
        ("arith.divsi %a0, %a1 : i32", -17, -5, 3), ("arith.divui %a0, %a1 : i32", 17, 5, 3),
        ("arith.ceildivsi %a0, %a1 : i32", 17, 5, 4), ("arith.ceildivsi %a0, %a1 : i32", 15, 5, 3),
        ("arith.floordivsi %a0, %a1 : i32", 19, 5, 3), ("arith.remsi %a0, %a1 : i32", 17, 5, 2),
        ("arith.remsi %a0, %a1 : i32", 17, -5, 2),  # the sign of what is divided
        ("arith.remui %a0, %a1 : i32", 18, 5, 3), ("arith.andi %a0, %a1 : i32", 13, 7, 5),
        ("arith.ori %a0, %a1 : i32", 9, 3, 11), ("arith.xori %a0, %a1 : i32", 9, 3, 10),
        ("arith.shli %a0, %a1 : i32", 3, 2, 12), ("arith.shrsi %a0, %a1 : i32", 13, 2, 3),
        ("arith.shrui %a0, %a1 : i32", 13, 1, 6), ("arith.minsi %a0, %a1 : i32", 8, 3, 3),
        ("arith.minui %a0, %a1 : i32", 3, 8, 3), ("arith.maxsi %a0, %a1 : i32", 8, 3, 8),
        ("arith.maxui %a0, %a1 : i32", 3, 8, 8), ("arith.extsi %a0 : i32 to i64", 6, 0, 6),
        ("arith.trunci %a0 : i64 to i32", 6, 0, 6), ("arith.index_cast %a0 : i32 to index", 6, 0, 6),
    ],
)  # fmt: skip
def test_integers_are_those_of_c(operation, a, b, value):
    assert additions(counted(f"    %n = {operation}\n{turns('%n')}", a, b)) == value


IN_PYTHON = {
    "addi": lambda a, b: a + b, "muli": lambda a, b: a * b, "divsi": lambda a, b: a // b, "divui": lambda a, b: a // b,
    "ceildivsi": lambda a, b: (a + b - 1) // b, "remsi": lambda a, b: a % b, "remui": lambda a, b: a % b,
    "andi": lambda a, b: a & b, "ori": lambda a, b: a | b, "xori": lambda a, b: a ^ b, "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b, "minsi": min, "minui": min, "maxsi": max, "maxui": max,
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PYTHON)
def test_programs_compute_each_with_its_own_number(name):
    """Eleven programs."""
    lines = f"    %p = tt.get_program_id x : i32\n    %n = arith.{name} %p, %a0 : i32\n{turns('%n')}"
    expected = sum(IN_PYTHON[name](program, 3) for program in range(11))
    assert additions(counted(lines, 3, grid=(11,))) == expected


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("a", [2, 3, 4])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_comparisons_choose_one_of_two(name, a, sign):
    """7 turns where it holds of a and 3, else 2."""
    holds = getattr(operator, name)(a, 3)
    compare = name if name in ("eq", "ne") else sign + name
    lines = f"""    %h = arith.cmpi {compare}, %a0, %a1 : i32
    %n = arith.select %h, %a2, %a3 : i32
{turns("%n")}"""
    assert additions(counted(lines, a, 3, 7, 2)) == (7 if holds else 2)
    by_program = "    %p = tt.get_program_id x : i32\n" + lines.replace("%a0", "%p")
    of_each = [getattr(operator, name)(program, 3) for program in range(5)]
    assert additions(counted(by_program, a, 3, 7, 2, grid=(5,))) == 7 * sum(of_each) + 2 * (5 - sum(of_each))


@pytest.mark.parametrize(("start", "stop", "step", "count"), [(0, 10, 3, 4), (2, 10, 4, 2), (5, 5, 1, 0), (6, 2, 1, 0)])
def test_a_loop_has_as_many_turns_as_steps_from_its_start_to_its_stop(start, stop, step, count):
    lines = """    scf.for %i = %a0 to %a1 step %a2  : i32 {
      %y = arith.addf %x, %x : f32
    }"""
    assert additions(counted(lines, start, stop, step)) == count


@pytest.mark.parametrize("grid", [(6,), (2, 3), (3, 2, 5)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_program_has_its_own_place_in_the_grid(grid, axis):
    """0 + 1 + ... turns along the axis, for all programs of the others."""
    size = [*grid, 1, 1][axis]
    programs = 1
    for each in grid:
        programs *= each
    lines = f"    %n = tt.get_program_id {'xyz'[axis]} : i32\n{turns('%n')}"
    assert additions(counted(lines, grid=grid)) == programs // size * (size * (size - 1) // 2)
    whole = f"    %n = tt.get_num_programs {'xyz'[axis]} : i32\n{turns('%n')}"
    assert additions(counted(whole, grid=grid)) == programs * size


def test_a_function_gives_each_of_its_results_in_order_and_runs_as_often_as_it_is_called():
    """Of (5, 3): twice the first, and the second: 10 turns and 3; two additions in each of two calls."""
    more = """  tt.func private @two(%p: i32, %q: i32) -> (i32, i32) attributes {noinline = false} {
    %z = arith.constant 1.000000e+00 : f32
    %s = arith.addf %z, %z : f32
    %t = arith.addf %s, %z : f32
    %d = arith.addi %p, %p : i32
    tt.return %d, %q : i32, i32
  }"""
    call = "    %r:2 = tt.call @two(%a0, %a1) : (i32, i32) -> (i32, i32)\n"
    assert additions(counted(call, 5, 3, more=more)) == 2
    assert additions(counted(call + turns("%r#0"), 5, 3, more=more)) == 10 + 2
    assert additions(counted(call + turns("%r#1"), 5, 3, more=more)) == 3 + 2
    assert additions(counted(call + call.replace("%r", "%s") + turns("%s#1"), 5, 3, more=more)) == 3 + 4


@pytest.mark.parametrize(("condition", "count"), [(1, 5), (0, 2)])
def test_of_two_branches_one_runs_and_gives_its_value(condition, count):
    """An addition and four turns, or two turns and none."""
    lines = f"""    %h = arith.cmpi eq, %a0, %c1 : i32
    %n = scf.if %h -> (i32) {{
      %y = arith.addf %x, %x : f32
      scf.yield %a1 : i32
    }} else {{
      scf.yield %a2 : i32
    }}
{turns("%n")}"""
    body = counted(lines, condition, 4, 2)
    assert (additions(body), body.unknown) == (count, ())


@pytest.mark.parametrize("kind", ["scan", "reduce"])
def test_sums_along_rows_add_all_numbers_but_the_first_of_each_and_do_nothing_else(kind):
    """Of 8 rows of 128."""
    result = "tensor<8x128xf32>" if kind == "scan" else "tensor<8xf32>"
    lines = f"""    %s = "tt.{kind}"(%x) <{{axis = 1 : i32}}> ({{
    ^bb0(%p: f32, %q: f32):
      %r = arith.addf %p, %q : f32
      tt.{kind}.return %r : f32
    }}) : (tensor<8x128xf32>) -> {result}"""
    body = counted(lines)
    assert [(op.name, op.number) for op in body.ops] == [("arith.addf", 8 * 127)]


def test_a_lock_that_a_program_waits_for_is_taken_to_be_free_and_other_loops_without_bounds_are_named():
    """They ask atomically, and do nothing else; a loop that computes is none of them."""
    lines = """    scf.while : () -> () {
      %old = tt.atomic_cas acq_rel, gpu, %lock, %c0, %c1 : (!tt.ptr<i32>, i32, i32) -> i32
      %held = arith.cmpi eq, %old, %c1 : i32
      scf.condition(%held)
    } do {
BODY      scf.yield
    }"""
    assert counted(lines.replace("BODY", "")).unknown == ()
    assert counted(lines.replace("BODY", "      %y = math.exp %x : f32\n")).unknown == ("scf.while",)
