"""What kernels find in a cache of 1 MB, in kB that are counted by hand: of tensors of rows of 100 kB.

A share of .3 of the cache may pass a tensor before it begins to go, and twice the cache until it is gone, evenly.
"""

from __future__ import annotations

import random

import pytest
import torch

from flopmeter import FlopMeter, on_meta
from flopmeter.costs import kernels_of
from flopmeter.timing import cache
from flopmeter.timing.cache import cached_bytes

ROW = 100_000


def rows(count: int, wide: int = ROW) -> torch.Tensor:
    return torch.empty(count, wide, dtype=torch.int8, device="meta")


def halves(count: int) -> torch.Tensor:
    return torch.empty(count, ROW, dtype=torch.half, device="meta")


def made_by_a_matmul(out: torch.Tensor) -> None:
    """Which shares its kernel with no op after it."""
    torch.mm(halves(len(out))[:, :8], halves(8), out=out)


def found_by(program, mode="eager", size=1_000_000) -> list[float]:
    """What each kernel finds, in kB."""
    with torch.inference_mode(), FlopMeter("l40s") as meter:
        program()
    kernels = kernels_of(meter.trace) if mode == "eager" else meter.report(mode=mode).kernels
    return [round(found / 1000, 6) for found in cached_bytes(kernels, size)]


def test_a_tensor_goes_as_what_is_written_passes_it_and_what_is_written_stays_where_inputs_did():
    first, second, third, last = (rows(1) for _ in range(4))
    large, larger = rows(7), rows(14)

    def program():
        second.copy_(first)  # nothing was there
        third.copy_(second)  # 200 move and 100 were written, those of `second` itself: 200 pass it
        large.copy_(rows(7))
        last.copy_(first)  # 200 and the 800 since pass it: .7 of the cache beyond .3 lose .35
        larger.copy_(rows(14))
        last.copy_(first)  # 200 and 1,400
        last.copy_(second)  # 200 and 2,300 since it was read: gone, and with it what is written

    assert found_by(program) == [0, 100 + 100, 0, 65 + 100, 0, 35 + 100, 0]


def test_each_input_of_a_kernel_is_found_by_itself():
    known, other, out = rows(1), rows(2), rows(2)

    def program():
        known.neg_()
        torch.add(known, other, out=out)  # 500 move: .2 beyond .3 lose a tenth

    assert found_by(program) == [0, 90 + 180]


def test_parts_that_overlap_are_found_once():
    whole, out = rows(3), rows(3)

    def program():
        whole[:2].neg_()
        whole[1:].neg_()  # a row of two: 400 move, .1 beyond lose a twentieth; and as much of the 200 written
        torch.neg(
            whole, out=out
        )  # 2 of 3 rows with 600, 2 of 3 with 800: 2/3 of .85, of .75 and together more than all

    first, second, third = found_by(program)
    assert [first, second] == [0, 95 + 190]
    assert third == pytest.approx(300 + 300 * 0.85)


def test_of_a_part_that_was_touched_again_with_the_whole_only_that_counts():
    whole, out, large = rows(4), rows(4), rows(9)

    def program():
        whole[0].neg_()
        torch.neg(whole, out=out)
        large.copy_(rows(9))
        torch.neg(whole[0], out=out[0])  # 200 and 900 pass it: .8 beyond lose .4

    *_, last = found_by(program)
    assert last == pytest.approx(60 + 100)


def test_columns_beside_those_that_were_written_are_found_as_far_as_the_written_ones_reach():
    """Half of each row was written. Of whole rows, half is there."""
    whole, out = rows(4), rows(4)

    def program():
        whole[:, : ROW // 2].neg_()
        torch.neg(whole, out=out)  # 800 move: half lose a quarter

    assert found_by(program)[1] == pytest.approx(200 * 0.75 + 400 * 0.75, rel=1e-4)


def test_a_fused_kernel_finds_what_each_of_its_inputs_left_and_nothing_of_what_it_makes_itself():
    gate, up = halves(1), halves(6)

    def program():
        made_by_a_matmul(gate)
        product = gate * up[5:]  # the last of six rows, which nobody touched
        product.relu() + product

    assert found_by(program, "compiled", 10**9) == [0, 200 + 200]


def test_a_fused_kernel_of_both_halves_of_each_row_finds_the_whole_row():
    both, apart = halves(4), halves(8)

    def program():
        made_by_a_matmul(both)
        left, right = both.chunk(2, -1)
        left * right.relu()
        made_by_a_matmul(apart)
        apart[1] * apart[5].relu()  # rows 1 to 5 are asked for, of which two are read

    assert found_by(program, "compiled", 10**9) == [0, 800 + 400, 0, 400 + 200]


def test_a_part_without_elements_is_found_and_leaves_nothing():
    whole, other, known = rows(2), rows(2), on_meta(torch.ones(1))

    def program():
        whole.neg_()
        torch.cat([whole[1:1], other])
        known.item()  # what the host is given lies in no tensor

    assert found_by(program, size=10**9) == [0, 0, 0]


def test_a_matmul_finds_all_until_what_was_fetched_since_is_more_than_the_cache():
    """What is found is not fetched. A weight of 500 kB, of a cache of 1 MB, of which a tenth is the edge."""
    x, out = torch.empty(1, 500, dtype=torch.half, device="meta"), torch.empty(1, 500, dtype=torch.half, device="meta")
    weight, other = (torch.empty(500, 500, dtype=torch.half, device="meta") for _ in range(2))

    def program():
        torch.mm(x, weight, out=out)
        torch.mm(x, weight, out=out)  # all, twice
        torch.mm(x, weight, out=out)
        rows(1).neg_()
        torch.mm(x, other, out=out)  # x and out: 1 each
        torch.mm(x, weight, out=out)  # 200 and 500 were fetched since, and 502 move: 202 beyond, the edge is 100
        rows(1).neg_()
        torch.mm(x, weight, out=out)  # 200 and 502 pass it

    assert found_by(program) == [0, 502, 502, 0, 2, 2, 0, 502]


@pytest.mark.parametrize("seed", range(4))
def test_many_parts_are_found_as_by_asking_each(seed, monkeypatch):
    """Rows, pairs of rows and longer ranges, in turn, of a tensor of which most is gone after a while."""
    draw = random.Random(seed)
    whole, out = rows(512, 1000), rows(512, 1000)
    ranges = [(draw.randrange(512), draw.choice([1, 1, 1, 2, 5, 100])) for _ in range(400)]

    def program():
        for first, count in ranges:
            (whole[first : first + count].neg_() if draw.random() < 0.7 else torch.neg(whole[first:], out=out[first:]))

    state = draw.getstate()
    by_lengths = found_by(program, size=100_000)
    monkeypatch.setattr(cache, "FEW", 10**9)
    draw.setstate(state)
    by_all = found_by(program, size=100_000)
    assert by_lengths == pytest.approx(by_all, abs=1e-6)
    assert sum(map(bool, by_all)) > 50


def test_parts_that_are_gone_are_forgotten(monkeypatch):
    """3,000 rows of 1 kB pass a cache of 100 kB: a look at all of them is at what can still be there."""
    whole, out = rows(3000, 1000), rows(3000, 1000)
    compared, share_of = [], cache._ByteRange.share_of
    monkeypatch.setattr(cache._ByteRange, "share_of", lambda one, other: compared.append(other) or share_of(one, other))

    def program():
        for row in whole:
            row.neg_()
        torch.neg(whole, out=out)

    with torch.inference_mode(), FlopMeter("l40s") as meter:
        program()
    cached_bytes(kernels_of(meter.trace)[:-1], 100_000)
    before = len(compared)
    compared.clear()
    cached_bytes(kernels_of(meter.trace), 100_000)
    assert 0 < len(compared) - before < 2 * 2 * 230 + 100  # 2.3 times the cache, for the look and for what goes
