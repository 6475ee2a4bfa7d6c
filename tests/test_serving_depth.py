"""Steps of deep models from those of short ones: as metering each layer gives them."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")
import transformers

from flopmeter import load_hardware
from flopmeter.ask.serve.decoder import decoder
from flopmeter.ask.serve.shorter import Depths, depths_of, is_one_turn_more
from flopmeter.ask.serve.steps import StepModel

DEVICE = "h200-sxm-141gb"
SIZES = {"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 8192}
EXPERTS = {"moe_intermediate_size": 512, "num_experts_per_tok": 2, "norm_topk_prob": True}
STEPS = ((1, 1, 300), (48, 1, 1024), (1, 512, 256))  # batch, new and cached tokens


def mixture(layers, **changes):
    own = {"num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "num_hidden_layers": layers}
    return transformers.Qwen3MoeConfig(**SIZES | EXPERTS | own | changes)


def latent(layers):
    """The first three layers are dense, the others have a shared expert; attention caches latents."""
    latents = {
        "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    }  # fmt: skip
    routed = {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3}
    own = {"num_key_value_heads": 16, "intermediate_size": 2048, "num_hidden_layers": layers}
    return transformers.DeepseekV3Config(**SIZES | EXPERTS | latents | routed | own)


def windowed(layers):
    """Windows in every second layer, with sinks."""
    own = {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "num_local_experts": 16}
    return transformers.GptOssConfig(**SIZES | own, num_experts_per_tok=2, sliding_window=128, num_hidden_layers=layers)


def dense(layers, **changes):
    own = {"num_key_value_heads": 4, "intermediate_size": 2048, "num_hidden_layers": layers}
    return transformers.LlamaConfig(**SIZES | own | changes)


def steps(own, mode="cudagraph", weights=None):
    return StepModel(own, mode, weights, None, {"clocks": "burst"})


def in_both_ways(config, mode="cudagraph", weights=None, **split):
    """Steps by short models, and with each layer metered."""
    own = decoder(config, **split)
    return steps(own, mode, weights), steps(replace(own, shorter=None), mode, weights)


@pytest.mark.parametrize("mode", ["cudagraph", "eager"])
@pytest.mark.parametrize("config", [mixture(17), latent(25), windowed(16), dense(14)], ids=lambda each: each.model_type)
def test_a_deep_model_takes_as_long_by_short_ones_as_with_each_layer_metered(config, mode):
    short, whole = in_both_ways(config, mode)
    device = load_hardware(DEVICE)
    for sizes in STEPS:
        assert short.cost(device, *sizes) == pytest.approx(tuple(whole.cost(device, *sizes)), rel=1e-9)
    assert short.weight_bytes(device) == whole.weight_bytes(device)
    assert not short._meters  # of the deep model, which was not metered


@pytest.mark.parametrize("split", [{"ranks": 4}, {"expert_ranks": 4}], ids=["tensor parallel", "experts spread"])
def test_that_holds_for_the_share_of_a_rank_and_its_collectives(split):
    short, whole = in_both_ways(mixture(16), **split)
    device = load_hardware(DEVICE)
    for sizes in STEPS:
        cost = short.cost(device, *sizes)
        assert cost == pytest.approx(tuple(whole.cost(device, *sizes)), rel=1e-9)
        assert cost.link_seconds > 0
    assert not short._meters


@pytest.mark.parametrize("place", [0, 9, 15])
def test_a_layer_that_was_published_in_another_format_is_like_no_other(place):
    """fp8 but for the attention of one layer: four projections of 1024 x (1024, 256, 256, 1024), a byte more each."""
    kept = {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{place}.self_attn"]}
    device, plain = load_hardware(DEVICE), {"quant_method": "fp8"}
    short, whole = in_both_ways(dense(16, quantization_config=kept))
    everywhere = steps(decoder(dense(16, quantization_config=plain)))
    assert short.weight_bytes(device) - everywhere.weight_bytes(device) == 1024 * (1024 + 256 + 256 + 1024)
    for sizes in STEPS:
        assert short.cost(device, *sizes) == pytest.approx(tuple(whole.cost(device, *sizes)), rel=1e-9)


def test_compiled_layers_that_are_alike_are_two_a_turn():
    """inductor keeps the sum that runs through all layers in memory after every second one: it has more than four
    terms then. Eager kernels are the same in each layer."""
    device = load_hardware(DEVICE)

    def report(layers, mode):
        return steps(decoder(dense(layers)), mode).report(device, 1, 512, 256)

    assert not is_one_turn_more(report(4, "cudagraph"), report(5, "cudagraph"))
    assert is_one_turn_more(report(4, "cudagraph"), report(6, "cudagraph"))
    assert is_one_turn_more(report(4, "eager"), report(5, "eager"))
    assert not is_one_turn_more(report(5, "eager"), report(4, "eager"))


def test_short_models_lack_turns_of_the_last_layers():
    # Twelve layers alike: each turn may be one layer or more, of which one, two or three stay. At least two layers do.
    assert depths_of("a" * 12)[:2] == [Depths(2, 3, 10), Depths(2, 4, 5)]
    # Three of another kind before them, which stay.
    assert depths_of("bbb" + "a" * 12)[0] == Depths(4, 5, 11)
    # Turns of two kinds, and half a turn at the end.
    assert depths_of("ab" * 8 + "a")[0] == Depths(3, 5, 7)
    # One layer in the middle that is like no other: what follows it repeats.
    assert depths_of("aaa" + "b" + "a" * 8)[0] == Depths(5, 6, 7)
    assert depths_of("abacabadabac") == []
    assert depths_of("") == []


def test_layers_of_a_small_model_are_metered_one_by_one():
    short, whole = in_both_ways(dense(3))
    device = load_hardware(DEVICE)
    assert short.cost(device, 1, 1, 64) == whole.cost(device, 1, 1, 64)
    assert short._meters
