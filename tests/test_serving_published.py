"""Serving: configs as the cards of models publish them. Their parameters are those that the cards and papers state."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")

from flopmeter import ServingError, serving  # noqa: E402
from flopmeter.ask.serve.decoder import decoder  # noqa: E402
from flopmeter.models.hubs import TargetError  # noqa: E402

H100 = "h100-sxm5-80gb"


def published(folder, **facts):
    """The target of a config.json of these facts."""
    (folder / "config.json").write_text(json.dumps(facts))
    return f"hf:{folder / 'config.json'}"


def parameters(own):
    return own.parameter_bytes / own.model.dtype.itemsize


@pytest.mark.parametrize("kind", ["Qwen3Next", "GraniteMoeHybrid"])
def test_layers_of_states_and_many_experts_are_served_however_many_experts_a_prompt_picks(kind):
    """More tokens pick more of 512 experts, each a kernel of its own where a device has no grouped one."""
    sizes = {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1000, "num_experts_per_tok": 8, "pad_token_id": 0,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    if kind == "Qwen3Next":
        own = {"num_experts": 512, "moe_intermediate_size": 32, "head_dim": 32, "linear_num_value_heads": 16}
    else:
        own = {"num_local_experts": 512, "intermediate_size": 32, "shared_intermediate_size": 64, "mamba_n_heads": 8,
               "mamba_d_head": 32, "layer_types": ["mamba", "attention"]}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | own)
    assert decoder(config).state_bytes > 0


def test_blocks_that_a_model_shares_among_layers_are_held_once(tmp_path):
    """Zamba2-7B: 13 of 81 layers run one of two blocks of attention and MLP. The card says 7.4 billion."""
    shared = [6, 11, *range(17, 78, 6)]
    own = decoder(
        published(
            tmp_path, model_type="zamba2", architectures=["Zamba2ForCausalLM"], torch_dtype="bfloat16",
            hidden_size=3584, num_hidden_layers=81, vocab_size=32000, num_mem_blocks=2, hybrid_layer_ids=shared,
            layers_block_type=["hybrid" if place in shared else "mamba" for place in range(81)],
            attention_head_dim=224, attention_hidden_size=7168, num_attention_heads=32, num_key_value_heads=32,
            intermediate_size=14336, ffn_hidden_size=14336, adapter_rank=128, use_shared_mlp_adapter=True,
            use_shared_attention_adapter=False, mamba_d_state=64, mamba_ngroups=2, mamba_headdim=64, n_mamba_heads=112,
            mamba_expand=2, use_mem_rope=True, tie_word_embeddings=True,
        )
    )  # fmt: skip
    width, inner = 3584, 2 * 3584
    mamba = width * (2 * inner + 2 * 2 * 64 + 112) + inner * width
    block = 3 * inner * inner + inner * width + width * 2 * 14336 + 14336 * width
    of_layer = width * width + 128 * (width + 2 * 14336)  # what joins the block, and its adapter
    by_hand = 81 * mamba + 2 * block + 13 * of_layer + 32000 * width
    assert parameters(own) == pytest.approx(by_hand, rel=1e-3)
    assert by_hand == pytest.approx(7.36e9, rel=1e-3)


DEEPSEEK = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "vocab_size": 1000, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_a_type_that_transformers_lacks_is_served_by_the_architecture_that_its_config_names(tmp_path):
    """As Kimi K2 is published: its own type, and the architecture of DeepSeek-V3."""
    unknown, known = (
        serving(published(tmp_path, model_type=kind, **DEEPSEEK), [H100], prompt=64, output=16)
        for kind in ("kimi_k2", "deepseek_v3")
    )
    assert unknown.title == known.title
    assert unknown.rows == known.rows


def test_a_type_and_an_architecture_that_transformers_lacks_are_refused_by_the_type(tmp_path):
    facts = DEEPSEEK | {"model_type": "kimi_k2", "architectures": ["KimiK9ForCausalLM"]}
    with pytest.raises(TargetError, match="knows no model type 'kimi_k2'"):
        decoder(published(tmp_path, **facts))


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 40, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip


def test_modules_that_a_config_names_for_each_layer_are_told_once_for_all(tmp_path):
    """Qwen3-235B-A22B-FP8 lists 283 of them."""
    kept = [f"model.layers.{layer}.{name}" for layer in range(40) for name in ("mlp.gate", "input_layernorm")]
    facts = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *kept]}
    result = serving(published(tmp_path, **SMALL, quantization_config=facts), [H100], prompt=64, output=16)
    (said,) = (note for note in result.notes if note.startswith("weights in fp8"))
    assert said.endswith("by the config model.layers.*.mlp.gate, model.layers.*.input_layernorm")
    facts["modules_to_not_convert"] = [f"model.layers.0.mlp.part_{'abcdefgh'[place]}" for place in range(8)]
    result = serving(published(tmp_path, **SMALL, quantization_config=facts), [H100], prompt=64, output=16)
    assert any(note.endswith("part_f and 2 others") for note in result.notes)


@pytest.mark.parametrize(("gpus", "is_told"), [(1, False), (2, False), (4, False), (8, True)])
def test_a_width_that_gpus_cut_within_a_block_of_scales_is_told(tmp_path, gpus, is_told):
    """As 1,536 of Qwen3-235B-A22B-FP8 in blocks of 128 over 8 GPUs, 192 on each, which vLLM does not load."""
    facts = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sizes = SMALL | {"intermediate_size": 1536, "num_key_value_heads": 8}
    said = str(serving(published(tmp_path, **sizes, quantization_config=facts), [H100], prompt=64, output=8, gpus=gpus))
    assert ("intermediate_size 1536 over 8 GPUs is 192 on each, no multiple of the 128 weights" in said) == is_told
    other = serving(
        published(tmp_path, **sizes, quantization_config=facts), [H100], prompt=64, output=8, gpus=gpus, weights="bf16"
    )
    assert "share a scale" not in str(other)


def test_a_format_that_is_not_known_is_told_with_what_is_taken_in_its_place(tmp_path):
    facts = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    result = serving(published(tmp_path, **SMALL, quantization_config=facts), [H100], prompt=64, output=16)
    assert "published as bitsandbytes, a format that is not known here: weights are taken as bf16" in str(result)


def test_weights_of_compressed_tensors_are_served_in_their_bits(tmp_path):
    """MLPs of 40 layers, three of 256 x 512, in 4 bits and a scale of 16 for 32; attention and head in 16 bits."""
    scheme = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
    facts = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip
    narrow, wide = (
        serving(published(tmp_path, **SMALL, **each), [H100], prompt=64, output=16).rows[0].weight_bytes
        for each in ({"quantization_config": facts}, {})
    )
    assert wide - narrow == 40 * 3 * 256 * 512 * (16 - 4.5) / 8


SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}  # of the cache, as Llama-3.1-8B-Instruct-FP8-KV has it


@pytest.mark.parametrize(
    ("facts", "element_bytes"),
    [({}, 2), ({"kv_cache_scheme": None}, 2), ({"kv_cache_scheme": SCHEME}, 1), ({"kv_cache_quant_algo": "FP8"}, 1)],
)
def test_the_cache_is_kept_as_the_config_says_unless_it_is_asked_for_otherwise(tmp_path, facts, element_bytes):
    """Keys and values of 80 tokens, in 40 layers of 4 heads of 32."""
    target = published(tmp_path, **SMALL, quantization_config={"quant_method": "fp8", **facts})
    by_config, wide = (serving(target, [H100], prompt=64, output=16, kv=kv) for kv in (None, "bf16"))
    for result, each in ((by_config, element_bytes), (wide, 2)):
        assert result.rows[0].kv_bytes_per_request == 80 * 40 * 2 * 4 * 32 * each
        assert f"KV {'fp8' if each == 1 else 'bf16'}" in result.title
        assert ("by its config the cache is kept in fp8" in str(result)) is (element_bytes == 1)
    assert ("kv='fp8' serves it so" in str(wide)) is (element_bytes == 1)


@pytest.mark.parametrize("scheme", [{"num_bits": 8, "type": "int"}, {"num_bits": 4, "type": "float"}])
def test_a_format_of_the_cache_that_is_not_known_is_told(tmp_path, scheme):
    facts = {"quant_method": "fp8", "kv_cache_scheme": scheme}
    said = str(serving(published(tmp_path, **SMALL, quantization_config=facts), [H100], prompt=64, output=16))
    kept = f"{scheme['type']} of {scheme['num_bits']} bits"
    assert f"the cache is kept in {kept}, a format that is not known here: it is taken as bf16" in said


def test_ranks_share_heads_of_keys_evenly_or_are_refused():
    """Phi-4 has ten: each of two GPUs has five, and on four there would be ten of twelve or eight."""
    sizes = {"hidden_size": 640, "num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 640}
    config = transformers.Phi3Config(**sizes, num_hidden_layers=2, vocab_size=1000, pad_token_id=0)
    whole = decoder(config).kv_bytes(100, 2)
    assert decoder(config, 2).kv_bytes(100, 2) == whole / 2
    assert decoder(config, 20).kv_bytes(100, 2) == whole / 10  # two GPUs have the same head
    for ranks in (4, 8):
        with pytest.raises(ServingError, match=f"num_key_value_heads 10 cannot be split over {ranks} GPUs"):
            decoder(config, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_a_scan_whose_width_is_a_factor_of_the_models(ranks):
    """Jamba's is twice as wide as the model: half of it, of a quarter or an eighth of its states, on many GPUs."""
    config = transformers.JambaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1000, num_experts=1, attn_layer_offset=1, attn_layer_period=2, mamba_dt_rank=16,
    )  # fmt: skip
    assert decoder(config, ranks).state_bytes == decoder(config).state_bytes / ranks


def test_ranks_sum_what_a_scan_reads_of_its_input_before_what_it_gives():
    """A Mamba layer, attention, and two MLPs: four sums of 256 numbers of a token, and one of the 16 of a step's width
    and of two states of 16 that `x_proj` makes, which each rank needs whole."""
    config = transformers.JambaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1000, num_experts=1, attn_layer_offset=1, attn_layer_period=2, mamba_dt_rank=16, mamba_d_state=16,
    )  # fmt: skip
    assert sorted(decoder(config, 2).all_reduces) == [16 + 2 * 16, 256, 256, 256, 256]


def test_ranks_of_a_layer_of_experts_sum_once_for_all_of_them():
    config = transformers.Qwen2MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=64, shared_expert_intermediate_size=128,
        num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, vocab_size=1000, num_experts=8,
    )  # fmt: skip
    assert decoder(config, 2).all_reduces == (256, 256)


def test_a_model_that_runs_whole_but_not_split_is_told_so():
    config = transformers.Zamba2Config(
        hidden_size=128, num_hidden_layers=2, layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1],
        num_attention_heads=4, num_key_value_heads=4, n_mamba_heads=4, mamba_headdim=64, intermediate_size=256,
        vocab_size=1000, num_mem_blocks=1,
    )  # fmt: skip
    assert decoder(config).kv_bytes(1, 2) > 0
    with pytest.raises(ServingError, match="does not run as a server runs it when it is split over 2 GPUs"):
        decoder(config, 2).kv_bytes(1, 2)
