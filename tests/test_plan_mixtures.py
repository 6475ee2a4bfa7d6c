"""Plans of mixtures of experts with tensor parallelism: against models metered whole and arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flopmeter import PlanError, Split, plan
from flopmeter.ask.plan.compose import SplitWork, compose
from flopmeter.ask.plan.layers import LayerCosts, meter_layers
from flopmeter.ask.plan.memory import memory_of
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.splits import Shape
from flopmeter.ask.plan.subject import subject_of
from flopmeter.ask.plan.whole import meter_whole
from flopmeter.device.cluster import load_cluster
from flopmeter.device.hardware import load_hardware

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")
H100, DGX = load_hardware("h100-sxm5-80gb"), load_cluster("dgx-h100")
LENGTH, SEQUENCES = 2048, 8


def qwen(**more: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=512, moe_intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        num_experts=16, num_experts_per_tok=4, vocab_size=2000, max_position_embeddings=LENGTH, head_dim=64, **more,
    )  # fmt: skip


def deepseek() -> Any:
    return transformers.DeepseekV3Config(
        hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=8, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, q_lora_rank=256,
        kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, first_k_dense_replace=1,
        vocab_size=2000, max_position_embeddings=LENGTH,
    )  # fmt: skip


def layers_of(config: Any, tp: int, ep: int) -> LayerCosts:
    shape = Shape(tp, 1, ep, SEQUENCES, "none")
    return meter_layers(subject_of(config), OptimizerCosts(Where(LENGTH, H100, DGX, "eager", {})), shape)


@pytest.mark.parametrize("ep", [1, 4])
def test_tensor_parallel_ranks_share_the_work_of_attention_and_the_tokens_of_experts(ep: int):
    one, two = (layers_of(qwen(), tp, ep).layers[0] for tp in (1, 2))
    assert two.forward.model_flops == pytest.approx(one.forward.model_flops / 2, rel=0.01)
    assert two.backward.model_flops == pytest.approx(one.backward.model_flops / 2, rel=0.01)
    assert two.expert_parameters == one.expert_parameters == 16 * 3 * 512 * 256 // ep
    assert two.forward.communication_seconds > 0


def test_latent_attention_is_split_by_heads_and_latents_are_not():
    """A token's products, by hand: both latents are made on each rank, all else is halved."""
    one, two = (layers_of(deepseek(), tp, 1) for tp in (1, 2))
    latents = 2 * 512 * (256 + 128 + 32) * SEQUENCES * LENGTH
    for kind in one.layers:  # a dense layer and one of experts
        alone, shared = (costs.layers[kind].forward.model_flops for costs in (one, two))
        assert shared == pytest.approx((alone + latents) / 2, rel=0.02)


def test_a_composed_step_of_both_is_near_the_one_that_is_metered_whole():
    subject = subject_of(qwen())
    split = Split(dp=1, fsdp=4, tp=2, cp=1, pp=1, ep=4, microbatch=SEQUENCES, recompute="none", schedule="none")
    whole = meter_whole(subject, Where(LENGTH, H100, DGX, "eager", {}), (split, 1))
    step = SplitWork(split, subject.kinds, layers_of(qwen(), 2, 4), 4 * SEQUENCES, H100, DGX)
    assert compose(step).seconds == pytest.approx(whole.seconds, rel=0.1)
    assert memory_of(step).peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.05)


def test_experts_wait_for_their_gathers_as_long_as_in_torch_where_these_are_large():
    """Two nodes of which each has all experts: half of their numbers come over the network for each layer."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 128, "num_hidden_layers": 4}
    config = transformers.Qwen3MoeConfig(**qwen().to_dict() | sizes)
    subject, where = subject_of(config), Where(LENGTH, H100, DGX, "eager", {})
    split = Split(dp=1, fsdp=16, tp=1, cp=1, pp=1, ep=8, microbatch=SEQUENCES, recompute="none", schedule="none")
    whole = meter_whole(subject, where, (split, 1))
    step = compose(SplitWork(split, subject.kinds, layers_of(config, 1, 8), 16 * SEQUENCES, H100, DGX))
    assert step.seconds == pytest.approx(whole.seconds, rel=0.1)
    waits = (found.seconds_by_bound["communication"] for found in (step, whole))
    assert next(waits) == pytest.approx(next(waits), rel=0.15)


def llama4() -> Any:
    return transformers.Llama4TextConfig(
        hidden_size=256, intermediate_size=256, intermediate_size_mlp=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, vocab_size=1000, num_local_experts=4, max_position_embeddings=LENGTH,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "only", "message"),
    [
        (llama4, {"ep": 4}, "ep is 1 here .*: experts are not split over ranks .* tokens, picks and weights as inputs"),
        (lambda: transformers.LlamaConfig(num_hidden_layers=2, vocab_size=99), {"ep": 4}, "the model has no experts"),
        (lambda: transformers.GptOssConfig(num_hidden_layers=2, vocab_size=99), {"tp": 2}, "no tensor parallelism"),
    ],
)
def test_a_split_that_the_model_cannot_have_says_why(make: Any, only: dict[str, int], message: str):
    with pytest.raises(PlanError, match=message):
        plan(make(), 8, H100, batch=8, length=1024, only=only)
