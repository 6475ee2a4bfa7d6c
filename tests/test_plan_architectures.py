"""plan: what a tour of all causal language models of transformers has found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

transformers = pytest.importorskip("transformers")

from flopmeter import FlopMeter, load_hardware, plan  # noqa: E402
from flopmeter.ask.plan import PlanError  # noqa: E402
from flopmeter.ask.plan.layers import few_layers, meter_layers  # noqa: E402
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts  # noqa: E402
from flopmeter.ask.plan.program import Where  # noqa: E402
from flopmeter.ask.plan.splits import Shape  # noqa: E402
from flopmeter.ask.plan.subject import subject_of  # noqa: E402
from flopmeter.device.cluster import cluster_of  # noqa: E402
from flopmeter.models.hubs import TargetError, model_of  # noqa: E402

H100 = "h100-sxm5-80gb"
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "kinds of layers that follow from a period": lambda: transformers.JambaConfig(
        **SMALL, num_experts=2, mamba_dt_rank=16, attn_layer_offset=1, attn_layer_period=3, use_mamba_kernels=False
    ),
    "inputs that all layers get at once": lambda: transformers.Gemma4TextConfig(
        **SMALL, head_dim=32, layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=64,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=4000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_put_together_of_a_few_layers_does_what_the_whole_model_does(kind):
    length, assumed = 128, {"routing": "balanced", "checks": "hold"}
    config = CONFIGS[kind]()
    config.architectures = [type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    model, tokens = model_of(config, torch.float32), torch.arange(length)[None]
    with FlopMeter(H100, **assumed) as meter:
        model(input_ids=tokens.to("meta"), labels=tokens.to("meta"), use_cache=False).loss.backward()
    only = {"fsdp": 2, "cp": 1, "tp": 1, "ep": 1, "microbatch": 1, "recompute": "none"}
    best = plan(CONFIGS[kind](), 2, H100, batch=2, length=length, only=only, **assumed).best
    peak = load_hardware(H100).contraction_peak("bf16").flop_per_s
    assert best.mfu * best.seconds * peak == pytest.approx(meter.report().model_flops, rel=0.01)


def test_a_rank_holds_its_part_of_a_tied_embedding_once():
    """Gemma's head is its embedding, [4000, 256], of which each of two ranks has 2,000 rows. Norms are whole."""
    config = transformers.GemmaConfig(**SMALL, head_dim=32, tie_word_embeddings=True)
    subject, device = subject_of(config), load_hardware(H100)
    costs = meter_layers(
        subject, OptimizerCosts(Where(64, device, cluster_of(device, None), "eager", {})), Shape(2, 1, 1, 1, "none")
    )
    layer = 256 * 32 * (8 + 4 + 4 + 8) + 3 * 256 * 512
    assert costs.before.parameters == 2000 * 256
    assert costs.layers[0].parameters == layer / 2 + 2 * 256
    assert costs.after.parameters == 256


def test_a_type_whose_language_model_takes_a_part_of_the_config_is_planned_by_that_part():
    if not hasattr(transformers, "Qwen3_5Config"):
        pytest.skip("this transformers has no Qwen3.5")
    sizes = {**SMALL, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 3}
    whole = transformers.Qwen3_5Config(text_config=sizes)
    with torch.device("meta"):
        language = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))
    assert subject_of(whole).parameters == language.num_parameters()


class FixedBlock(nn.Module):
    """Its forward pass names the whole width, so that no rank can have a part of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).view(*x.shape[:2], 4, 64).flatten(2))


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.layers = nn.ModuleList(FixedBlock() for _ in range(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


STYLES = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


class WithEyes(Fixed):
    """Next to the layers that read text lie as many, and as large ones, that read images."""

    def __init__(self):
        super().__init__()
        self.eyes = nn.Module()
        self.eyes.layers = nn.ModuleList(FixedBlock() for _ in range(4))


def test_as_many_layers_of_another_part_of_the_model_are_no_parts_of_its_layers():
    assert subject_of(WithEyes).layers == "layers"


class InParts(WithEyes):
    """A second list has parts of the same layers."""

    def __init__(self):
        super().__init__()
        self.eyes = None
        self.gates = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


def test_two_lists_of_parts_of_the_layers_are_refused():
    with pytest.raises(PlanError, match=r"layers of InParts are parts in several lists \(layers, gates\)"):
        subject_of(InParts)


def test_a_split_in_which_the_model_does_not_run_is_left_out_and_said():
    only = {"microbatch": 1, "recompute": "none", "cp": 1}
    found = plan(Fixed, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only)
    assert {row.split.tp for row in found.rows} == {1}
    (said,) = [note for note in found.notes if note.startswith("left out: ")]
    assert said.startswith("left out: tp 2, since Fixed does not run so (RuntimeError: shape '[1, 64, 4, 64]'")


def test_splits_that_fail_for_one_reason_share_a_line():
    only = {"microbatch": 1, "recompute": ["none", "full"], "cp": 1}
    found = plan(Fixed, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only)
    (said,) = [note for note in found.notes if note.startswith("left out: ")]
    assert sorted(said.removeprefix("left out: ").split(", since ")[0].split("; ")) == [
        "tp 2",
        "tp 2 with full recomputation",
    ]


def test_where_none_of_the_wanted_splits_runs_the_error_says_why():
    only = {"tp": 2, "microbatch": 1, "recompute": "none"}
    with pytest.raises(PlanError, match="none of these splits runs: tp 2, since Fixed does not run so") as found:
        plan(Fixed, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only)
    assert "\n" not in str(found.value)


def test_a_config_of_which_transformers_makes_no_model_is_refused_in_one_line():
    with pytest.raises(TargetError, match="Dots1ForCausalLM of transformers cannot be built") as found:
        plan(transformers.Dots1Config(num_hidden_layers=2), 2, H100)
    assert "\n" not in str(found.value)


def planned(config, gpus=1, length=64, **only):
    return plan(
        config, gpus, H100, batch=4, length=length, rows=1, routing="balanced", checks="hold",
        only={"cp": 1, "microbatch": 1, "recompute": "none", **only},
    )  # fmt: skip


def config_of(name, **sizes):
    """The config of that type; skips where this transformers has none."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, f"{name}Config")(**SMALL | sizes)


OF_ALL_LAYERS = {
    "half as many layers as its config counts": lambda: config_of(
        "LongcatFlash", ffn_hidden_size=512, expert_ffn_hidden_size=128, n_routed_experts=8, zero_expert_num=4,
        moe_topk=2, head_dim=16, q_lora_rank=96, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, num_key_value_heads=8,
    ),
    "a kind of its own for each layer": lambda: config_of(
        "Gemma3nText", num_hidden_layers=6, head_dim=32, layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2, vocab_size_per_layer_input=4000, hidden_size_per_layer_input=32, laurel_rank=32,
    ),
    "layers that are found by their number": lambda: config_of(
        "Zamba2", layers_block_type=["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"], mamba_d_state=16,
        mamba_headdim=32, n_mamba_heads=16, num_mem_blocks=1, use_mem_rope=False, num_key_value_heads=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_ALL_LAYERS)
def test_a_model_that_does_not_run_with_few_of_its_layers_is_metered_with_all(kind):
    """One GPU's FLOPs, as `FlopMeter` counts them around the model of transformers."""
    config, tokens = OF_ALL_LAYERS[kind](), torch.arange(64)[None] + 5
    model = subject_of(config).model().to(torch.bfloat16)
    with FlopMeter(H100, routing="balanced", checks="hold") as meter:
        model(input_ids=tokens.to("meta"), labels=tokens.to("meta"), use_cache=False).loss.backward()
    best = planned(OF_ALL_LAYERS[kind]()).best
    peak = load_hardware(H100).contraction_peak("bf16").flop_per_s
    assert best.mfu * best.seconds * peak == pytest.approx(4 * meter.report().model_flops, rel=0.01)


def test_layers_run_in_the_order_of_the_model():
    """So that one can read what an earlier one has made."""
    assert few_layers([0, 1, 2, 2]) == [0, 1, 2, 2]
    assert few_layers([0, 0, 0, 3, 0, 0, 0, 3]) == [0, 0, 3]
    assert few_layers([0, 1]) == [0, 1]


def test_layers_that_read_images_are_not_those_that_are_planned():
    """The tower is the larger list here. Its parameters and the projector's are told of, by torch's count."""
    vision = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = transformers.Gemma3Config(text_config={**SMALL, "head_dim": 32}, vision_config=vision)
    subject = subject_of(config)
    model = subject.model()
    beside = [name for name, _ in model.named_parameters() if "vision_tower" in name or "projector" in name]
    numel = sum(model.get_parameter(name).numel() for name in beside)
    assert subject.layers == "model.language_model.layers"
    (said,) = [note for note in planned(config).notes if note.startswith("token ids do not reach")]
    assert f"model.vision_tower, model.multi_modal_projector ({numel / 1e9:.3g} B parameters)" in said


def test_the_embeddings_of_a_pipelines_first_stage_are_those_that_run_before_its_layers():
    """GPT-2 adds an embedding of positions, [1024, 256], to that of tokens, [4000, 256]."""
    config = transformers.GPT2Config(n_embd=256, n_head=8, n_layer=4, vocab_size=4000, n_positions=1024)
    device = load_hardware(H100)
    where = Where(64, device, cluster_of(device, None), "eager", {})
    costs = meter_layers(subject_of(config), OptimizerCosts(where), Shape(1, 1, 1, 1, "none"))
    assert costs.before.parameters == (4000 + 1024) * 256
    assert costs.after.parameters == 2 * 256  # its head is tied; the last norm is not


@pytest.mark.parametrize("name", ["MegatronBert", "RemBert", "RoFormer"])
def test_a_model_that_asks_whether_a_token_is_padding_is_planned(name):
    sizes = {key: size for key, size in SMALL.items() if key != "num_key_value_heads"}
    config = getattr(transformers, f"{name}Config")(**sizes, is_decoder=True)
    assert planned(config).best.seconds > 0


REFUSED = {
    "layers of images": (
        lambda: transformers.MllamaConfig(text_config={**SMALL, "cross_attention_layers": [3], "vocab_size": 4000}),
        r"model\.(language_model\.)?layers\.3 of .* does not run on token ids alone",
    ),
    "parts of layers in several lists": (
        lambda: transformers.XLMConfig(emb_dim=256, n_layers=4, n_heads=8, n_words=4000),
        r"parts in several lists \(transformer\.ffns, transformer\.attentions\)",
    ),
    "buffers in fp32": (
        lambda: transformers.OpenAIGPTConfig(n_embd=256, n_head=8, n_layer=4, vocab_size=4000),
        "does not run with parameters in bf16 and the rest in fp32, as mixed precision of torch's FSDP2 runs it",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_is_not_planned_is_refused_in_one_true_line(why):
    config, said = REFUSED[why]
    with pytest.raises(PlanError, match=said) as found:
        planned(config())
    assert "\n" not in str(found.value)


class Whole(Fixed):
    """Of two equal products in each layer its styles split the first pair."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TwoPairs() for _ in range(4))


class TwoPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.other_up, self.other_down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x)) + self.other_down(self.other_up(x))


def test_layers_that_tensor_parallelism_leaves_whole_are_told_of():
    """Each of two ranks has half of the one pair and all of the other: three quarters."""
    only = {"tp": 2, "microbatch": 1, "recompute": "none", "cp": 1}
    notes = plan(Whole, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only).notes
    (said,) = [note for note in notes if note.startswith("tp 2: ")]
    assert said.startswith("tp 2: each rank runs 0.75 of the FLOPs of layers such as layers.0 (4 of 4), not 0.5")


@pytest.mark.parametrize("stages", [1, 2])
def test_the_last_stage_has_a_copy_of_an_embedding_that_is_tied_to_its_head(stages):
    """Gemma's, [4000, 256]: one stage holds it once; of two, each does. The last norm is a row of 256 more."""
    config = transformers.GemmaConfig(**SMALL, head_dim=32, tie_word_embeddings=True)
    device = load_hardware(H100)
    where = Where(64, device, cluster_of(device, None), "eager", {})
    costs = meter_layers(subject_of(config), OptimizerCosts(where), Shape(1, 1, 1, 1, "none"))
    costs = costs.in_stages if stages > 1 else costs
    assert costs.before.parameters == 4000 * 256
    assert costs.after.parameters == 256 + (stages - 1) * 4000 * 256


def test_a_pipeline_of_a_model_with_a_tied_head_takes_the_memory_of_both_copies():
    """The same model with a head of its own has stages that hold as many parameters. The last stage, which has the
    logits, is the fullest."""
    sizes, only = {**SMALL, "vocab_size": 40_000, "head_dim": 32}, {"pp": 2, "schedule": "1f1b"}
    tied, apart = (
        planned(transformers.GemmaConfig(**sizes, tie_word_embeddings=flag), 2, 512, **only).best
        for flag in (True, False)
    )
    assert tied.peak_memory_bytes == pytest.approx(apart.peak_memory_bytes, rel=0.05)
