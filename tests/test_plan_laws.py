"""Laws that any plan has to keep, whatever its figures: what is compared differs in one thing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flopmeter import SplitRow, plan
from flopmeter.device.cluster import Cluster, load_cluster
from flopmeter.models.llama import LlamaConfig

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = LlamaConfig(layers=8, width=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=32000)
DGX = load_cluster("dgx-h100")
ALONE = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "microbatch": 1, "recompute": "full"}


def planned(build: Any = LLAMA, batch: int = 16, cluster: Cluster = DGX, options: Any = None, **only: Any) -> SplitRow:
    """The one split that is left, of 16 GPUs with room for all."""
    found = plan(
        build, 16, "h100-sxm5-80gb", 1e13, batch=batch, length=2048, cluster=cluster, only=ALONE | only, rows=1,
        **(options or {}),
    )  # fmt: skip
    return found.rows[0]


def test_more_microbatches_make_the_bubble_of_a_pipeline_smaller():
    shares = [planned(batch=batch, pp=4, schedule="1f1b").share("bubble") for batch in (16, 32, 64, 128)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] / 3


def test_tensor_parallelism_within_a_node_is_faster_than_between_nodes():
    apart = dataclasses.replace(DGX, gpus_per_node=2)
    compiled = {"mode": "compiled"}  # no DTensors, whose Python would take longer than the links
    near, far = (planned(tp=8, cluster=cluster, options=compiled).seconds for cluster in (DGX, apart))
    assert near < 0.9 * far


def test_the_more_is_computed_again_the_longer_it_takes_and_the_less_it_keeps():
    rows = [planned(recompute=recompute) for recompute in ("none", "selective", "full")]
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    sizes = [row.peak_memory_bytes for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_a_step_is_worth_as_many_flops_however_it_is_split_and_whatever_is_computed_again():
    """By hand: 6 for each parameter of a product and token, and attention in full, forward and twice as much back."""
    length, products = 2048, 8 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 32000
    attention = 8 * 3 * 4 * length * 4096
    for split in ({}, {"cp": 2}, {"tp": 2, "pp": 2}, {"recompute": "none"}):
        row = planned(**split)
        per_token = row.mfu * 989.4e12 / row.tokens_per_s_per_gpu
        assert per_token == pytest.approx(6 * products + attention, rel=0.01), split


def test_attention_may_count_where_it_is_visible():
    """(length + 1) / 2 of the keys that a token has in full; which passes are computed again changes nothing."""
    length = 2048
    for split in ({}, {"cp": 2, "recompute": "full"}):
        full, visible = (planned(**split, options={"causal": causal}) for causal in ("full", "exact"))
        assert visible.seconds == full.seconds
        hidden = (full.mfu - visible.mfu) * 989.4e12 / full.tokens_per_s_per_gpu
        assert hidden == pytest.approx(8 * 3 * 4 * 4096 * (length - 1) / 2, rel=1e-3), split


def test_hidden_collectives_and_products_in_fp8_make_a_step_shorter():
    """Compiled: in eager code the Python of DTensors and checkpoints keeps the GPUs waiting, with or without them."""
    compiled = {"mode": "compiled"}
    assert planned(tp=8, options=compiled | {"async_tp": True}).seconds < planned(tp=8, options=compiled).seconds
    assert planned(options=compiled | {"fp8": True}).seconds < planned(options=compiled).seconds


def mixture(**sizes):
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3MoeConfig(vocab_size=2000, max_position_embeddings=2048, **sizes)


def test_experts_that_are_loaded_unevenly_hold_up_the_step():
    experts = mixture(
        hidden_size=2048, moe_intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        num_experts=16, num_experts_per_tok=4, head_dim=256,
    )  # fmt: skip
    laws = ("balanced", {"imbalance": 1.3}, {"imbalance": 2})
    seconds = [planned(experts, batch=64, microbatch=4, ep=8, options={"routing": law}).seconds for law in laws]
    assert seconds[0] < seconds[1] < seconds[2]


def test_an_assumption_of_a_plan_names_lines_of_the_model_and_none_that_asked_for_the_plan():
    experts = mixture(
        hidden_size=256, moe_intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=8, num_experts_per_tok=2, head_dim=64,
    )  # fmt: skip
    notes = plan(experts, 8, "h100-sxm5-80gb", batch=8, length=128, only=ALONE | {"ep": 1}, rows=1).notes
    assumed = [note for note in notes if "_grouped_mm" in note]
    assert assumed
    for note in assumed:
        assert "the backward pass" in note
        assert "transformers/" in note
        assert __file__.rpartition("/")[2] not in note
