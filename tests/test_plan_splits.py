"""Which splits a plan tries: all that its rules allow, each written down as a condition here."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import get_args

import pytest

from flopmeter import Split, plan
from flopmeter.ask.plan.splits import WISHES, Bounds, GatherTime, Recompute, ScheduleName, splits
from flopmeter.models.llama import Llama, LlamaConfig

DENSE = Bounds(8, 16, 4 * 2048, layers=6, heads=6, gpus_per_node=4, experts=None, can_defer=True)
CASES = [
    DENSE,
    DENSE._replace(can_defer=False, heads=None, batch=24),
    DENSE._replace(experts=4, length=3 * 4096, layers=14),
    DENSE._replace(world=6, batch=18, experts=6, gpus_per_node=6),
]


def is_allowed(split: Split, bounds: Bounds) -> bool:
    microbatches, rest = divmod(bounds.batch, split.replicas * split.microbatch)
    few_in_turn = microbatches % split.pp
    in_turn = bounds.layers % split.stages == 0 or (bounds.layers + 2) % split.stages == 0  # ends count as layers
    of_pipeline = {
        "none": split.pp == 1 and split.chunks == 1,
        "1f1b": split.pp > 1 and split.chunks == 1,
        "interleaved": split.pp > 1 and split.chunks > 1 and not few_in_turn and in_turn,
        "zero-bubble": split.pp > 1 and not few_in_turn and bounds.can_defer and split.recompute == "none",
    }
    of_gathers = {
        "microbatch": split.pp == 1 and split.shards > 1,
        "step": split.pp > 1 or split.shards == 1 or microbatches > 1,
    }
    return (
        not rest
        and split.microbatch <= 8
        and split.replicas * split.cp * split.tp * split.pp == bounds.world
        and (split.tp == 1 or (bounds.heads is not None and bounds.heads % split.tp == 0))
        and split.tp <= bounds.gpus_per_node
        and bounds.length % (split.tp * split.cp) == 0
        and (split.cp == 1 or (bounds.length % (2 * split.cp) == 0 and bounds.length // split.cp >= 2048))
        and split.stages <= bounds.layers
        and of_pipeline[split.schedule]
        and (split.chunks == 1 or in_turn)
        and of_gathers[split.gather]
        and (bounds.experts or 1) % split.ep == 0
        and split.shards % split.ep == 0
        and (split.ep == 1 or split.ep * split.tp <= bounds.gpus_per_node)
        and (split.cp % split.ep == 0 or split.ep % split.cp == 0)
    )


@pytest.mark.parametrize("bounds", CASES)
def test_a_split_is_tried_if_and_only_if_it_divides_the_work_and_makes_sense(bounds: Bounds) -> None:
    sizes = [size for size in range(1, bounds.world + 1) if bounds.world % size == 0]
    found = list(splits(bounds, {}))
    assert len(found) == len(set(found))
    pipelines = [(pp, chunks) for pp, chunks in product(sizes, range(1, 9)) if pp * chunks <= bounds.layers]
    every = (
        Split(dp, fsdp, tp, cp, pp, ep, microbatch, recompute, schedule, chunks, gather)
        for dp, fsdp, tp, cp, (pp, chunks) in product(sizes, sizes, sizes, sizes, pipelines)
        if dp * fsdp * tp * cp * pp == bounds.world
        for ep, microbatch in product(range(1, (bounds.experts or 1) + 1), range(1, 9))
        for recompute, schedule, gather in product(get_args(Recompute), get_args(ScheduleName), get_args(GatherTime))
    )
    assert set(found) == {each for each in every if is_allowed(each, bounds)}


def test_a_wish_allows_what_is_seldom_worth_it() -> None:
    """More than 8 sequences at a time, tensor parallelism and experts over nodes, and parts of 1,024 tokens."""
    bounds = Bounds(8, 64, 2048, layers=2, heads=8, gpus_per_node=2, experts=8, can_defer=True)
    for wish in ({"microbatch": (16,)}, {"tp": (8,)}, {"ep": (8,)}, {"cp": (2,)}):
        ((name, (value,)),) = wish.items()
        assert max(getattr(split, name) for split in splits(bounds, {})) < value
        assert {getattr(split, name) for split in splits(bounds, wish)} == {value}
    assert {split.tp for split in splits(bounds._replace(batch=1), {"tp": (8,)})} == {8}
    assert {*WISHES} == {each.name for each in fields(Split)}


def test_a_rank_shares_experts_with_its_neighbours_and_their_shards_with_those_that_have_the_same() -> None:
    """Tensor parallel ranks lie between them: 0, 2, 4 and 6 shard parameters, and pairs of them share experts."""
    split = Split(1, 2, 2, 2, 1, ep=2, microbatch=1, recompute="none", schedule="none")
    assert split.expert_ranks == (0, 2)
    assert split.expert_shards == (0, 4)


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_not_trained_need_no_room_for_gradients_and_averages() -> None:
    """100 M in frozen layers are 0.2 GB on each GPU; were they trained, 1.8 GB, or 0.6 GB if two GPUs shared them."""
    config = LlamaConfig(layers=8, width=1024, heads=8, kv_heads=8, hidden=2816, vocabulary=100)

    def frozen() -> Llama:
        model = Llama(config)
        model.blocks.requires_grad_(False)
        return model

    only = {"tp": 1, "cp": 1, "pp": 1, "recompute": "none"}
    found = plan(frozen, 2, "h100-sxm5-80gb", memory=0.7e9, batch=2, length=128, only=only)
    assert found.rows[0].split.dp == 2
