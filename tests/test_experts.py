"""Layers of experts on many ranks, whose tokens are spread by a stated law: against real processes, and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expert_programs import CHOSEN, EXPERTS, TOKENS, WIDTH, Experts
from gloo import printed_by_ranks

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.distributed import world
from flopmeter.known_values.routing import routing_law

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("expert_programs.py")


def metered(rank: int, imbalance: float, size: int = 8) -> tuple[Experts, FlopMeter]:
    with world(size, rank=rank):
        layer = Experts("meta")
        with FlopMeter("h100-sxm5-80gb", routing={"imbalance": imbalance}) as meter, torch.no_grad():
            layer(torch.empty(TOKENS, WIDTH, device="meta"))
    return layer, meter


def over_gloo(size: int, imbalance: float, folder: Path) -> list[dict[str, object]]:
    return printed_by_ranks(SCRIPT, size, folder, str(imbalance))


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_bytes_and_flops_of_experts_are_those_of_real_processes(size: int, tmp_path: Path):
    for rank, found in enumerate(over_gloo(size, 1.3, tmp_path)):
        layer, meter = metered(rank, 1.3, size)
        products = sum(2 * kernel.cost.macs for kernel in kernels_of(meter.trace))
        expected = {"rows": found["rows"], "bytes": [tuple(each) for each in found["bytes"]], "flops": found["flops"]}
        assert {"rows": layer.rows, "bytes": layer.bytes, "flops": products} == expected, rank


def test_the_first_rank_gets_the_most_and_all_ranks_together_get_what_is_sent():
    rows = [sum(metered(rank, 1.5)[0].rows) for rank in range(8)]
    assert rows == sorted(rows, reverse=True)
    assert sum(rows) == 8 * TOKENS * CHOSEN
    # Two experts a rank, on a line from 1.5 to 0.5 in 16 steps: the first two have 1.5 and 1.4333 of the mean.
    assert rows[0] == pytest.approx(TOKENS * CHOSEN * (1.5 + 1.4333) / 2, abs=8)


def test_every_rank_takes_as_long_for_an_exchange_as_the_slowest_of_its_group():
    def exchanges(rank: int) -> list[int]:
        kernels = kernels_of(metered(rank, 1.5)[1].trace)
        return [k.cost.collective.nbytes for k in kernels if k.cost.collective and k.cost.collective.nbytes > 1024]

    assert exchanges(0) == exchanges(7)
    assert exchanges(0)[0] == sum(metered(0, 1.5)[0].rows) * WIDTH * 4  # that which receives the most


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(96, 2, 16), (5, 3, 7), (4096, 8, 256), (3, 4, 4)])
@pytest.mark.parametrize("imbalance", [1.0, 1.3, 2.0])
def test_no_token_picks_an_expert_twice_and_the_loads_lie_on_the_line(
    tokens: int, chosen: int, experts: int, imbalance: float
):
    law = routing_law({"imbalance": imbalance})
    picks = law.picks(tokens, chosen, experts)
    assert picks.shape == (tokens, chosen)
    assert all(len(set(row)) == chosen for row in picks.tolist())
    mean, most = tokens * chosen / experts, min(imbalance, experts / chosen)
    for expert, load in enumerate(torch.bincount(picks.flatten(), minlength=experts).tolist()):
        assert abs(load - mean * (most - 2 * (most - 1) * expert / (experts - 1))) <= 1


def test_an_imbalance_of_one_loads_all_experts_alike_as_balanced_does():
    uneven, even = (routing_law(law) for law in ({"imbalance": 1}, "balanced"))
    assert [torch.bincount(law.picks(TOKENS, CHOSEN, EXPERTS).flatten()).tolist() for law in (uneven, even)] == [
        [TOKENS * CHOSEN // EXPERTS] * EXPERTS
    ] * 2


@pytest.mark.parametrize(
    ("routing", "tokens", "of_each_rank"),
    # By chance some 256 (1 - (1 - 8/256)^32) = 163 experts are busy: 10 on each of 16 ranks, and 3 ranks have 11.
    [("balanced", 2, {1}), ("balanced", 32, {16}), ("independent", 32, {10, 11})],
)
def test_each_rank_has_as_many_busy_experts_where_few_tokens_leave_some_idle(routing, tokens, of_each_rank):
    law = routing_law(routing)
    assert law is not None
    picks = law.picks(tokens, 8, 256)
    assert all(len(row.unique()) == 8 for row in picks)
    assert set(torch.bincount(picks.unique() // 16, minlength=16).tolist()) == of_each_rank


def test_the_report_says_which_law_was_assumed():
    assert any(text.startswith('routing={"imbalance": 1.3}') for text in metered(0, 1.3)[1].report().assumptions)


@pytest.mark.parametrize(
    "routing", ["even", {"imbalance": 0.5}, {"imbalance": 3}, {"imbalance": True}, {"spread": 1}, 1]
)
def test_a_law_that_is_none_is_refused(routing: object):
    with pytest.raises(
        ValueError,
        match=r"routing must be None, 'balanced', 'independent' or \{'imbalance': a number from 1 to 2\}, not",
    ):
        FlopMeter(routing=routing)
