"""Serving: models whose layers keep different things, and what their configs say of them."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flopmeter import FlopMeter, ServingError, load_hardware, serving  # noqa: E402
from flopmeter.ask.serve import linear_attention  # noqa: E402
from flopmeter.ask.serve.decoder import decoder  # noqa: E402
from flopmeter.ask.serve.steps import StepModel  # noqa: E402
from flopmeter.models.hubs import TargetError, model_of  # noqa: E402

H100, FLASH = "h100-sxm5-80gb", torch.ops.aten._flash_attention_forward
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 65}


def own_cache_bytes(config, tokens):
    """What transformers' own cache holds after a prompt of so many tokens."""
    config.architectures = [type(config).__name__.replace("TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")]
    cache = transformers.DynamicCache(config=config)
    with FlopMeter(H100, routing="balanced", checks="hold"), torch.no_grad():
        ids = torch.empty(1, tokens, dtype=torch.long, device="meta")
        model = model_of(config)
        known = inspect.signature(model.forward).parameters
        name = next(name for name in ("cache_params", "cache", "past_key_values") if name in known)
        model(input_ids=ids, use_cache=True, **{name: cache})
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    for layer in cache.layers:
        held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return sum(each.nbytes for each in held if each is not None)


CONFIGS = {
    "layers of different heads": lambda: transformers.Gemma4TextConfig(
        **SMALL, **WINDOWS, head_dim=32, global_head_dim=64, num_global_key_value_heads=2, attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "layers that read another's cache": lambda: transformers.Gemma3nTextConfig(
        **SMALL, **WINDOWS, head_dim=32, num_kv_shared_layers=3, vocab_size_per_layer_input=4000
    ),
    "values narrower than keys": lambda: transformers.MiMoV2FlashConfig(
        **SMALL, **WINDOWS, head_dim=48, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "chunks": lambda: transformers.Llama4TextConfig(
        **SMALL, head_dim=32, attention_chunk_size=65, num_local_experts=2, intermediate_size_mlp=512
    ),
    "latents": lambda: transformers.DeepseekV3Config(**SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 8}),
    "a gated delta rule": lambda: transformers.Qwen3NextConfig(
        **SMALL, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "state spaces": lambda: transformers.Mamba2Config(
        num_heads=8, head_dim=64, hidden_size=256, state_size=128, num_hidden_layers=3, n_groups=2, vocab_size=4000
    ),
    "state spaces beside attention": lambda: transformers.FalconH1Config(
        **SMALL, mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=128
    ),
    "scans": lambda: transformers.JambaConfig(**SMALL, num_experts=2, mamba_dt_rank=16, attn_layer_offset=2),
}  # fmt: skip
if hasattr(transformers, "DoryConfig"):  # since 5.24
    CONFIGS["layers in a loop"] = lambda: transformers.DoryConfig(
        **SMALL, **WINDOWS, head_dim=32, n_input_layers=1, n_output_layers=1
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_request_holds_what_transformers_own_cache_holds(kind):
    """In a layer with a window transformers keeps the last 64 of 65 tokens; a server also the one that it works on."""
    tokens, own = 512, decoder(CONFIGS[kind]())
    own_bytes = own_cache_bytes(CONFIGS[kind](), tokens)
    windows = sum(layer.elements for layer in own._kept if layer.most_tokens < tokens) * 2
    assert own.kv_bytes(tokens, 2) == own_bytes + windows


@pytest.mark.skipif("layers in a loop" not in CONFIGS, reason="newer than this transformers")
def test_layers_in_a_loop_attend_in_each_turn_to_what_that_turn_kept():
    """Of 6 layers the 4 in the middle run twice: 10 times a new token attends to 512 and itself, or to a window."""
    step = decoder(CONFIGS["layers in a loop"]()).step(1, 1, 512)
    with FlopMeter(H100) as meter:
        step()
    attended = [op.call.inputs[1].shape[1] for op in meter.trace.ops if op.packet is FLASH]
    assert attended == [513] * 10


def test_a_config_that_transformers_saved_is_served_as_before_with_its_infinite_numbers(tmp_path):
    config = CONFIGS["state spaces"]()
    config.time_step_limit = (0.0, float("inf"))
    config.save_pretrained(tmp_path)
    from_file, given = (serving(each, [H100], prompt=64, output=16) for each in (f"hf:{tmp_path}", config))
    assert from_file.rows == given.rows


def test_a_config_that_transformers_refuses_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "time_step_limit": "none"}))
    with pytest.raises(TargetError, match=r"transformers refuses this config .*time_step_limit") as found:
        serving(f"hf:{tmp_path}", [H100], prompt=64, output=16)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "config",
    [transformers.FalconConfig(num_hidden_layers=2), transformers.MptConfig(n_layers=2)],
    ids=["sdpa", "written out"],
)
def test_a_model_whose_attention_takes_no_other_kernels_is_served_with_the_cache_that_its_refusal_names(config):
    with pytest.raises(ServingError, match=r"take cache='transformers' \(--cache transformers\)"):
        serving(config, [H100], prompt=64, output=16)
    assert serving(config, [H100], prompt=64, output=16, cache="transformers").rows


def test_two_ranks_share_the_heads_of_each_layer():
    one, two = (decoder(CONFIGS["layers of different heads"](), ranks) for ranks in (1, 2))
    assert two.kv_bytes(512, 2) == one.kv_bytes(512, 2) / 2


def test_chunks_of_attention_limit_what_a_step_reads():
    def read(cached):
        own = StepModel(decoder(CONFIGS["chunks"]()), "eager", "bf16", "bf16", {})
        report = own.report(load_hardware(H100), 4, 1, cached)
        return next(row for row in report.rows() if row.name == "attention (fused)").bytes_read

    in_full, of_token = decoder(CONFIGS["chunks"]())._kept, 4 * 2
    without = sum(layer.elements for layer in in_full if layer.most_tokens > 4096) * of_token
    assert read(4096) - read(2048) == pytest.approx(2048 * without, rel=0.01)


@pytest.mark.parametrize(("name", "most"), [(H100, 1.8), ("b200-sxm-180gb", 1.4), ("mi300x", 1.25)])
def test_decoding_under_a_window_takes_little_longer_than_over_so_many_tokens(name, most):
    """Heads share the keys under a window too: measured on H100 and H200 at a third of what torch's kernel takes. But
    128 keys that begin anywhere lie in two tiles; on Hopper the tile is three times as high (measured: 1.5 to 2)."""

    def attention_seconds(cached, **window):
        config = transformers.MistralConfig(**SMALL | {"num_key_value_heads": 1}, head_dim=64, **window)
        own = StepModel(decoder(config), "eager", "bf16", "bf16", {})
        kernels = own.report(load_hardware(name), 256, 1, cached)
        return next(row for row in kernels.rows() if row.name == "attention (fused)").seconds

    aligned = attention_seconds(127, sliding_window=None)
    assert aligned <= attention_seconds(4096, sliding_window=128) <= most * aligned


OF_LINEAR_ATTENTION = ["a gated delta rule", "state spaces", "state spaces beside attention", "scans"]


@pytest.mark.parametrize("kind", OF_LINEAR_ATTENTION)
def test_a_step_reads_and_writes_the_states_of_each_sequence(kind):
    """In fp32, as transformers holds them; what comes before and after them is small for a token, and no kernel copies
    them."""
    own = StepModel(decoder(CONFIGS[kind]()), "eager", "bf16", "bf16", {})

    def bytes_of(batch, name):
        kernels = own.report(load_hardware(H100), batch, 1, 512).kernels
        costs = [kernel.cost for kernel in kernels if kernel.cost.name.endswith(name)]
        return sum(cost.bytes_read for cost in costs), sum(cost.bytes_written for cost in costs)

    states = sum(state.nbytes for layer in own.decoder._kept for state in layer.states if state.dtype is torch.float32)
    for more, less in zip(bytes_of(96, "state_step"), bytes_of(32, "state_step"), strict=True):
        assert (more - less) / 64 == pytest.approx(states, rel=0.1)
    for more, less in zip(bytes_of(96, "copy_"), bytes_of(32, "copy_"), strict=True):
        assert (more - less) / 64 < 0.2 * states


def test_blocks_of_a_delta_rule_do_the_products_of_its_paper():
    """Gated delta networks (arXiv 2412.06464) in blocks of 64 tokens, per token and head: scores of keys and of queries
    over the block, the turned keys and values, two products with the state, one into it, results of the scores."""
    config, tokens = CONFIGS["a gated delta rule"](), 1024
    own = StepModel(decoder(config), "eager", "bf16", "bf16", {})
    kernels = own.report(load_hardware(H100), 1, tokens, 0).kernels
    found = sum(kernel.cost.macs for kernel in kernels if "delta_rule_blocks" in kernel.cost.name)
    block, key, value, heads, layers = 64, 32, 64, 8, config.layer_types.count("linear_attention")
    each = 2 * block * key + block * (key + value) + 3 * key * value + block * value
    assert found == layers * heads * tokens * each


def test_blocks_of_state_spaces_do_the_products_of_their_paper():
    """Mamba-2 (arXiv 2405.21060) in blocks of 256 tokens, per token: scores for each group of heads; for each head the
    results of the scores, a product into the state and one with it."""
    own = StepModel(decoder(CONFIGS["state spaces"]()), "eager", "bf16", "bf16", {})
    kernels = own.report(load_hardware(H100), 1, 1024, 0).kernels
    found = sum(kernel.cost.macs for kernel in kernels if "mamba2_blocks" in kernel.cost.name)
    layers, block, state, width, heads, groups = 3, 256, 128, 64, 8, 2
    assert found == layers * 1024 * (groups * block * state + heads * (block * width + 2 * state * width))


LIGHTNING = {
    "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention"] * 5 + ["full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_attention_keeps_a_square_of_the_width_of_each_head_in_the_type_of_the_model(ranks):
    """MiniMax-01 (arXiv 2501.08313): five of six layers keep 32 x 32 numbers for each of 8 heads, the sixth the keys
    and values of its 4 heads. transformers has them in a cache of its own."""
    own = decoder(transformers.MiniMaxConfig(**SMALL, **LIGHTNING), ranks)
    assert own.state_bytes == 5 * 8 // ranks * 32 * 32 * 2
    assert own.kv_bytes(512, 2) == own.state_bytes + 512 * 2 * 4 // ranks * 32 * 2
    assert len(own.all_reduces) == (12 if ranks == 2 else 0)


def test_blocks_of_lightning_attention_do_the_products_of_its_paper():
    """Lightning Attention-2 (arXiv 2401.04658) in blocks of 256 tokens, per token and head: scores over the block and
    their results, a product into the state and one with it. A token alone reads and writes each state once."""
    own = StepModel(decoder(transformers.MiniMaxConfig(**SMALL, **LIGHTNING)), "eager", "bf16", "bf16", {})
    kernels = own.report(load_hardware(H100), 1, 1024, 2048).kernels
    found = sum(kernel.cost.macs for kernel in kernels if "lightning_blocks" in kernel.cost.name)
    assert found == 5 * 1024 * 8 * (2 * 256 * 32 + 2 * 32 * 32)
    steps = [kernel.cost for kernel in own.report(load_hardware(H100), 3, 1, 2048).kernels]
    written = [cost.bytes_written for cost in steps if "state_step" in cost.name]
    assert written == [3 * 8 * (32 * 32 + 32) * 2] * 5


def test_the_report_says_in_which_types_states_are():
    mixed, narrow = CONFIGS["a gated delta rule"](), transformers.MiniMaxConfig(**SMALL, **LIGHTNING)
    found = [str(serving(each, [H100], prompt=64, output=16)) for each in (mixed, narrow)]
    assert "linear attention, in bf16 and fp32;" in found[0]
    assert "linear attention, in bf16;" in found[1]


@pytest.mark.parametrize(
    ("kind", "sums"), [*zip(OF_LINEAR_ATTENTION, (12, 3, 18, 12 + 5), strict=True)], ids=OF_LINEAR_ATTENTION
)
def test_ranks_share_the_states_and_add_up_once_for_each_block_of_a_layer(kind, sums):
    """Six layers of a mixer and an MLP, three of a mixer, six of two mixers and an MLP. Each of five scans adds up what
    it reads of its input, too."""
    one, two = (decoder(CONFIGS[kind](), ranks) for ranks in (1, 2))
    assert two.state_bytes == pytest.approx(one.state_bytes / 2, rel=0.02)  # ranks may share the keys of a group
    assert len(two.all_reduces) == sums


def test_a_long_prompt_costs_no_more_in_decoding_where_all_layers_keep_states():
    own = StepModel(decoder(CONFIGS["state spaces"]()), "cudagraph", "bf16", "bf16", {})
    short, long = (own.cost(load_hardware(H100), 16, 1, cached).seconds for cached in (100, 100_000))
    assert short == long


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.DeepseekV32Config(), "deepseek_v32 has layers that keep more than keys and values"),
        (
            lambda: transformers.DbrxConfig(n_layers=2, attn_config={"rope_theta": 1e4, "clip_qkv": 8}),
            "stops the host .* it cannot be served",
        ),
        (
            lambda: transformers.FalconConfig(num_hidden_layers=2),
            "takes no other kernels for the attention of Falcon.*: take cache='transformers'",
        ),
        (
            lambda: transformers.BambaConfig(num_hidden_layers=2),
            "does not run as a server runs it .*only contain LinearAttention",
        ),
        (lambda: transformers.XLNetConfig(n_layer=2), "XLNetLMHeadModel of transformers takes no cache"),
        (lambda: transformers.Dots1Config(num_hidden_layers=2), "cannot be built .* its config may leave out a value"),
        (lambda: transformers.BloomConfig(), "takes no other kernels for the attention of BloomForCausalLM"),
        (lambda: transformers.RecurrentGemmaConfig(num_hidden_layers=3), "keeps states beside its cache"),
    ],
)
def test_models_that_no_server_runs_as_transformers_does_are_refused_in_one_line(config, message):
    with pytest.raises(ServingError, match=message) as found:
        serving(config(), [H100], prompt=64, output=16)
    assert "\n" not in str(found.value)


def test_a_scan_that_transformers_runs_token_by_token_is_refused_where_no_kernel_is_known(monkeypatch):
    monkeypatch.setattr(linear_attention, "FUNCTIONS", {})
    with pytest.raises(ServingError, match="writes the linear attention of JambaForCausalLM out token by token"):
        serving(CONFIGS["scans"](), [H100], prompt=64, output=16)


def test_of_a_model_that_takes_images_the_language_model_is_served_as_if_it_were_alone(tmp_path):
    language = CONFIGS["layers of different heads"]()
    whole = transformers.Gemma4Config(text_config=language, architectures=["Gemma4ForConditionalGeneration"])
    (tmp_path / "config.json").write_text(json.dumps(whole.to_dict()))
    both = [serving(each, [H100], prompt=64, output=16) for each in (f"hf:{tmp_path}/config.json", language)]
    assert both[0].rows == both[1].rows
    assert "the language model of gemma4 alone: what it has for images or sound is left out" in str(both[0])
    assert "alone: what" not in str(both[1])


def llama4(**changes):
    return transformers.Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048} | changes, head_dim=64,
        interleave_moe_layer_step=1, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip


@pytest.mark.parametrize("picks", [1, 2])
def test_a_token_of_llama_4_reads_and_runs_the_experts_that_it_picked_and_the_shared_one(picks):
    """transformers runs all of them on all tokens."""
    config, expert = llama4(num_local_experts=16, num_experts_per_tok=picks), 3 * 1024 * 2048
    model = StepModel(decoder(config), "cudagraph", None, "bf16", {})
    whole, device = model.decoder.parameter_bytes, load_hardware(H100)
    one = sum(kernel.cost.bytes_read for kernel in model.report(device, 1, 1, 64).kernels)
    embedding = 4000 * 1024 * 2
    assert one == pytest.approx(whole - embedding - 2 * (16 - picks) * expert * 2, rel=0.03)
    chunk = model.report(device, 1, 256, 0)
    products = sum(kernel.cost.macs for kernel in chunk.kernels if "feed_forward" in kernel.op.module)
    assert products == 256 * 2 * ((1 + picks) * expert + 16 * 1024)


def test_two_ranks_share_each_expert_of_llama_4():
    config = llama4(num_local_experts=16)
    one, two = (decoder(config, ranks=ranks) for ranks in (1, 2))
    assert len(two.all_reduces) == 2 * 2
    assert two.parameter_bytes == pytest.approx(one.parameter_bytes / 2, rel=0.01)


def layer_matrices(own, part):
    return sum(weight.numel() for name, weight in own.model.named_parameters() if part in name and weight.ndim > 1)


WIDTHS_OF_THEIR_OWN = {
    "dense layers between those of experts": lambda: transformers.Llama4TextConfig(
        **SMALL, head_dim=32, num_local_experts=8, intermediate_size_mlp=1024, interleave_moe_layer_step=2
    ),
    "a shared expert": lambda: transformers.GraniteMoeSharedConfig(
        **SMALL, num_local_experts=8, shared_intermediate_size=1024
    ),
    "a shared expert beside state spaces": lambda: transformers.NemotronHConfig(
        **SMALL | {"num_hidden_layers": 3}, layers_block_type=["mamba", "moe", "attention"], head_dim=32,
        mamba_num_heads=8, mamba_head_dim=64, n_groups=2, n_routed_experts=8, moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=1024, num_experts_per_tok=2,
    ),
    "dense layers before those of experts": lambda: transformers.Cohere2MoeConfig(
        **SMALL, num_experts=8, prefix_dense_intermediate_size=1024, first_k_dense_replace=2
    ),
    "dense layers of MiniMax": lambda: transformers.MiniMaxM3VLTextConfig(
        **SMALL, num_local_experts=8, dense_intermediate_size=1024, mlp_layer_types=["dense"] * 6
    ),
}  # fmt: skip
PARTS = (".feed_forward.", ".shared_mlp.", ".shared_experts.", ".0.mlp.", ".0.mlp.")


@pytest.mark.parametrize(("kind", "part"), [*zip(WIDTHS_OF_THEIR_OWN, PARTS, strict=True)])
def test_ranks_share_mlps_whose_width_has_a_name_of_its_own(kind, part):
    one, two = (decoder(WIDTHS_OF_THEIR_OWN[kind](), ranks) for ranks in (1, 2))
    assert layer_matrices(two, part) == pytest.approx(layer_matrices(one, part) / 2, rel=0.01)


def test_each_dense_layer_of_llama_4_adds_up_twice_as_one_of_experts_does():
    two = decoder(WIDTHS_OF_THEIR_OWN["dense layers between those of experts"](), ranks=2)
    assert len(two.all_reduces) == 2 * 6


TWO_HEADS = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": None}  # each 128 wide
HEADS_OF_THEIR_OWN_WIDTH = {
    "Qwen2-VL": lambda: transformers.Qwen2VLConfig(text_config=TWO_HEADS),
    "Qwen2.5-VL": lambda: transformers.Qwen2_5_VLConfig(text_config=TWO_HEADS),
    "StableLM": lambda: transformers.StableLmConfig(**SMALL),
}


@pytest.mark.parametrize("kind", HEADS_OF_THEIR_OWN_WIDTH)
def test_ranks_share_heads_whose_width_a_model_takes_from_its_own(kind):
    """Half of the heads, each as wide as before: half of the weights and of the cache; a sum after attention too."""
    config = HEADS_OF_THEIR_OWN_WIDTH[kind]()
    one, two = (decoder(config, ranks) for ranks in (1, 2))
    assert layer_matrices(two, ".self_attn.") == layer_matrices(one, ".self_attn.") / 2
    assert two.kv_bytes(100, 2) == one.kv_bytes(100, 2) / 2
    assert len(two.all_reduces) == 2 * 6


def test_a_model_whose_attention_does_not_split_is_refused_by_the_name_of_what_each_rank_would_keep():
    """GPT-NeoX takes the width of a head from the hidden size: half of the heads would be twice as wide."""
    with pytest.raises(ServingError, match=r"each would keep all of gpt_neox\.layers\.0\.attention"):
        decoder(transformers.GPTNeoXConfig(**SMALL), ranks=2)


def test_ranks_share_the_vocabulary_that_each_layer_has_of_its_own():
    """Gemma 3n has a second table of embeddings, a third of its weights: [4000, layers x 64] here, 2000 rows a rank."""
    config = transformers.Gemma3nTextConfig(
        **SMALL, **WINDOWS, head_dim=32, num_kv_shared_layers=3, vocab_size_per_layer_input=4000,
        hidden_size_per_layer_input=64, laurel_rank=4,
    )  # fmt: skip
    two = decoder(config, ranks=2)
    assert layer_matrices(two, "embed_tokens_per_layer") == 2000 * 6 * 64


@pytest.mark.parametrize("name", ["Whisper", "Bart", "T5"])
def test_an_encoder_with_a_decoder_is_refused_for_what_it_is(name):
    with pytest.raises(ServingError, match="is an encoder and a decoder"):
        decoder(getattr(transformers, f"{name}Config")())


@pytest.mark.parametrize(("picks", "said"), [(1, "picks 1 expert of"), (2, "picks 2 experts of")])
def test_the_experts_that_a_token_picks_are_counted_in_words_that_agree(picks, said):
    assert said in str(serving(llama4(num_local_experts=4, num_experts_per_tok=picks), [H100], prompt=64, output=2))


def test_a_language_model_that_transformers_has_without_a_head_is_served_with_one():
    """Qwen2.5-VL's is Qwen2 with other rotations: as many weights, and a step of decoding takes as long."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 2816, "vocab_size": 32000, "tie_word_embeddings": False}
    whole = transformers.Qwen2_5_VLConfig(text_config={**sizes, "rope_parameters": None})
    language = transformers.Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
    (of_part,), (alone,) = (serving(each, [H100], prompt=64, output=16).rows for each in (whole, language))
    assert of_part.weight_bytes == alone.weight_bytes
    assert of_part.kv_bytes_per_request == alone.kv_bytes_per_request
    assert of_part.step_seconds == pytest.approx(alone.step_seconds, rel=0.1)


def test_a_model_whose_config_fits_one_rank_only_is_refused_in_one_line():
    config = transformers.HunYuanVLConfig() if hasattr(transformers, "HunYuanVLConfig") else pytest.skip("too old")
    with pytest.raises(ServingError, match="cannot be built for one of 4 GPUs"):
        decoder(config, ranks=4)


@pytest.mark.parametrize("name", ["CohereCompassTextConfig", "DeepseekV4Config"])
def test_a_config_for_which_transformers_itself_ends_in_a_key_error_is_refused_in_one_line(name):
    config = getattr(transformers, name)() if hasattr(transformers, name) else pytest.skip("too old")
    with pytest.raises(ServingError, match=r"cannot be built \(KeyError|no cache for its layers of type"):
        decoder(config)


@pytest.mark.parametrize("name", ["GptOss", "Mixtral"])
def test_each_layer_of_experts_scores_them(name):
    """Whether the scores go to topk as they are, as those of gpt-oss, or through a softmax."""
    config = getattr(transformers, f"{name}Config")(**SMALL, num_local_experts=32, num_experts_per_tok=4, head_dim=32)
    report = StepModel(decoder(config), "cudagraph", None, "bf16", {}).report(load_hardware(H100), 16, 1, 64)
    scores = [kernel for kernel in report.kernels if kernel.cost.macs == 16 * SMALL["hidden_size"] * 32]
    assert len(scores) == SMALL["num_hidden_layers"]


def routed_in_groups():
    """The kernels of a step of 8 tokens, of which each picks 4 of 64 experts in 4 of 8 groups."""
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 8}, first_k_dense_replace=0, n_routed_experts=64, moe_intermediate_size=64,
        num_experts_per_tok=4,
    )  # fmt: skip
    return StepModel(decoder(config), "eager", "bf16", "bf16", {}).report(load_hardware(H100), 8, 1, 64).kernels


def test_experts_that_are_picked_in_groups_are_picked_by_one_kernel_that_reads_all_scores_once():
    """vLLM's `grouped_topk` writes a weight in fp32 and a number of 64 bits for each pick, and none of the groups."""
    choices = [each.cost for each in routed_in_groups() if each.cost.name == "topk"]
    assert len(choices) == 6
    assert {(cost.bytes_read, cost.bytes_written) for cost in choices} == {(8 * 64 * 4, 8 * 4 * (4 + 8))}


def test_a_router_multiplies_by_its_weights_in_their_own_type():
    """transformers casts them to fp32 in each step; 64 x 256 weights and 8 tokens of 256 are read in bf16."""
    kernels = [each for each in routed_in_groups() if each.op.module.endswith("mlp.gate")]
    assert not [each.cost.name for each in kernels if each.cost.name == "_to_copy"]
    products = [each.cost for each in kernels if each.cost.macs]
    assert {(cost.dtype, cost.bytes_read) for cost in products} == {("bf16", 2 * (64 * 256 + 8 * 256))}
    assert len(products) == 6


def test_logits_of_all_requests_at_a_time_have_room_beside_the_cache():
    """Of each request a step has logits of 262,144 tokens, in bf16 and in fp32; with a draft of 7 those of 8 tokens."""
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 262_144})
    plain = serving(config, [H100], prompt=65536, output=16).rows[0]
    drafted = serving(config, [H100], prompt=65536, output=16, draft=config, draft_tokens=7).rows[0]
    room = load_hardware(H100).memory_bytes - 0.6e9 - drafted.weight_bytes
    a_request = drafted.kv_bytes_per_request + 8 * 262_144 * (2 + 4)
    assert drafted.most_requests == pytest.approx(room / a_request, rel=0.03)
    assert plain.most_requests > 2 * drafted.most_requests  # whose caches are twice as large


def test_a_model_may_call_its_cache_by_another_name(monkeypatch):
    """transformers 5.24 renamed `past_key_values` to `cache`, and warns at each call with the old name."""
    plain = transformers.LlamaForCausalLM.forward
    old = "past_key_values" if "past_key_values" in inspect.signature(plain).parameters else "cache"

    def forward(self, input_ids=None, cache=None, **kwargs):
        assert "past_key_values" not in kwargs
        return plain(self, input_ids=input_ids, **{old: cache}, **kwargs)

    expected = decoder(transformers.LlamaConfig(**SMALL))._kept
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    assert decoder(transformers.LlamaConfig(**SMALL))._kept == expected
