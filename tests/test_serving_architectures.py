"""Serving: what a tour of all causal language models of transformers has found."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flopmeter import FlopMeter, ServingError, serving  # noqa: E402
from flopmeter.ask.serve import tensor_parallel  # noqa: E402
from flopmeter.ask.serve.decoder import decoder  # noqa: E402

H100, FLASH = "h100-sxm5-80gb", torch.ops.aten._flash_attention_forward
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000, "pad_token_id": 0, "head_dim": 32,
}  # fmt: skip


def config_of(name, **sizes):
    """The config of that type; skips where this transformers has none."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, f"{name}Config")(**SMALL | sizes)


def notes_on(config):
    return "\n".join(serving(config, [H100], prompt=64, output=4).notes)


def test_two_ranks_of_gpt_oss_add_up_once_after_attention_and_once_after_the_experts():
    """The biases of its experts are [experts, outputs], of which a rank has a part; no result of theirs is added up."""
    two = decoder(config_of("GptOss", num_local_experts=8, num_experts_per_tok=2), ranks=2)
    assert two.all_reduces == (256,) * 2 * 4


@pytest.mark.parametrize(
    ("name", "sizes", "turns"),
    [
        ("HrmText", {"H_cycles": 2, "L_cycles": 3}, 4 * 2 * (3 + 1)),
        ("Dory", {"n_input_layers": 1, "n_output_layers": 1}, 1 + 2 * 2 + 1),
    ],
)
def test_ranks_add_up_in_each_turn_of_a_loop_over_layers(name, sizes, turns):
    """Each turn of a layer has a sum after its attention and one after its MLP. HRM runs a stack three times, and then
    another one, in each of two cycles; Dory the two layers in the middle twice."""
    assert decoder(config_of(name, **sizes), ranks=2).all_reduces == (256,) * 2 * turns


def heads_by_layer():
    return config_of(
        "Laguna", num_attention_heads_per_layer=[8, 16, 8, 16], num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=128,
    )  # fmt: skip


def attention_numbers(own):
    return sum(weight.numel() for name, weight in own.model.named_parameters() if ".self_attn." in name)


def test_ranks_share_heads_whose_number_is_one_of_its_own_in_each_layer():
    one, two = (decoder(heads_by_layer(), ranks) for ranks in (1, 2))
    norms = 4 * 2 * 32  # of a head's width, which each rank has
    assert attention_numbers(two) - norms == (attention_numbers(one) - norms) / 2
    assert two.all_reduces == (256,) * 2 * 4


def test_a_block_whose_parts_nobody_adds_up_is_refused(monkeypatch):
    """Keys and values would be split, and the queries and what goes back to the model's width whole on each rank."""
    others = tuple(name for name in tensor_parallel._SPLIT if name != "num_attention_heads_per_layer")
    monkeypatch.setattr(tensor_parallel, "_SPLIT", others)
    with pytest.raises(ServingError, match=r"each would keep all of model\.layers\.0\.self_attn"):
        decoder(heads_by_layer(), ranks=2)


def test_an_encoder_is_refused_also_where_its_config_names_the_class_with_a_head():
    """transformers masks no later token in it, and keeps no cache, unless the config says that it is a decoder."""
    sizes = {name: size for name, size in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
    sizes["architectures"] = ["RobertaForCausalLM"]
    with pytest.raises(ServingError, match=r"roberta is an encoder, .* or a config with is_decoder=True"):
        serving(transformers.RobertaConfig(**sizes), [H100], prompt=64, output=4)
    assert serving(transformers.RobertaConfig(**sizes, is_decoder=True), [H100], prompt=64, output=4).rows


def test_a_language_model_whose_class_goes_by_the_type_of_the_whole_model_is_served():
    """Emu3ForCausalLM takes the text config of Emu3, whose own type no class is known by."""
    language = config_of("Emu3Text", architectures=["Emu3ForCausalLM"])
    whole = transformers.Emu3Config(text_config={**SMALL, "model_type": "emu3_text_model"})
    of_part, alone = (serving(each, [H100], prompt=64, output=4) for each in (whole, language))
    assert of_part.rows == alone.rows


def test_a_language_model_that_no_list_of_transformers_has_is_served_with_the_head_of_its_whole_model():
    """Qwen3-Omni's thinker: the weights of its language model and of its head, by torch."""
    text = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    if not hasattr(transformers, "Qwen3OmniMoeThinkerConfig"):
        pytest.skip("this transformers has no Qwen3-Omni")
    config = transformers.Qwen3OmniMoeThinkerConfig(text_config={**text, "rope_parameters": None})
    with torch.device("meta"):
        whole = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    parts = (whole.get_decoder(), whole.get_output_embeddings())
    numbers = sum(weight.numel() for part in parts for weight in part.parameters())
    (row,) = serving(config, [H100], prompt=64, output=4).rows
    assert row.weight_bytes == 2 * numbers
    assert row.kv_bytes_per_request == 68 * 4 * 2 * 4 * 32 * 2  # tokens, layers, keys and values of 4 heads, bf16


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("AriaText", {"moe_num_experts": 8, "moe_topk": 3}, "each token picks 3 experts of a layer"),
        (
            "Ernie4_5_Moe",
            {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 128},
            "each token picks 3 experts",
        ),
        ("Doge", {"num_experts_per_tok": 2, "is_moe": False}, None),
    ],
)
def test_experts_are_told_of_by_what_runs_and_not_by_the_name_that_a_config_has_for_their_number(name, sizes, said):
    notes = notes_on(config_of(name, **sizes))
    assert said in notes if said else "expert" not in notes


def test_a_config_for_which_transformers_makes_no_cache_is_refused_in_one_line():
    """The last layers read another's keys and values, of a kind that none of the first ones keeps."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"] * 2
    config = config_of("Gemma3nText", layer_types=kinds, num_kv_shared_layers=2, vocab_size_per_layer_input=4000)
    with pytest.raises(ServingError, match="gemma3n_text: transformers makes no cache for this config") as found:
        decoder(config)
    assert "\n" not in str(found.value)


def test_a_window_of_which_only_a_models_mask_is_told_limits_what_a_step_of_decoding_attends_to():
    """Moshi's attention calls its kernel without it. A token attends to 128 keys in each of 4 layers of 8 heads."""
    step = decoder(config_of("Moshi", sliding_window=128, ffn_dim=1024)).step(1, 1, 2000)
    with FlopMeter(H100) as meter:
        step()
    kernels = [kernel.cost for kernel in meter.report().kernels if kernel.op.packet is FLASH]
    assert [2 * cost.macs - cost.masked_flops for cost in kernels] == [2 * 2 * 8 * 128 * 32] * 4


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("GPTNeoX", {}), ("Ernie", {"is_decoder": True}), ("Roberta", {"is_decoder": True})],
)
def test_the_head_stays_as_it_is_in_fp8_whatever_its_name(name, sizes):
    """Each matrix of a linear layer but the head's takes a byte, all else two."""
    sizes |= {key: size for key, size in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
    config = getattr(transformers, f"{name}Config")(**sizes, tie_word_embeddings=False)
    own = decoder(config)
    head = own.model.get_output_embeddings()
    linear = [each for each in own.model.modules() if isinstance(each, torch.nn.Linear) and each is not head]
    (row,) = serving(config, [H100], prompt=64, output=4, weights="fp8").rows
    numbers = sum(weight.numel() for weight in own.model.parameters())
    assert row.weight_bytes == 2 * numbers - sum(each.weight.numel() for each in linear)


@pytest.mark.parametrize(("name", "module"), [("BitNet", "attn_sub_norm"), ("Olmoe", "q_norm")])
def test_a_norm_over_all_heads_is_named_where_they_cannot_be_split_and_what_to_do(name, module):
    """Its weight is as wide as the model, and no size of the config says so."""
    sizes = {key: size for key, size in SMALL.items() if key != "head_dim"}
    with pytest.raises(ServingError, match=rf"layers\.0\.self_attn\.{module} is not split .* take gpus=1 \(--gpus 1\)"):
        decoder(getattr(transformers, f"{name}Config")(**sizes), ranks=2).all_reduces  # noqa: B018


def test_weights_for_images_and_sound_that_a_causal_language_model_has_are_told_of():
    """Phi-4-multimodal's class has them. Their bytes are torch's."""
    config = config_of("Phi4Multimodal", eos_token_id=2, bos_token_id=1)
    with torch.device("meta"):
        extension = transformers.Phi4MultimodalForCausalLM(config).model.embed_tokens_extend
    gigabytes = 2 * sum(weight.numel() for weight in extension.parameters()) / 1e9
    assert f"model.embed_tokens_extend is among the weights ({gigabytes:.3g} GB)" in notes_on(config)
    assert "among the weights" not in notes_on(config_of("Llama"))
