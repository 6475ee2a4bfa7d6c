"""plan: what a tour of all causal language models of transformers has found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

transformers = pytest.importorskip("transformers")

from flopmeter import FlopMeter, load_hardware, plan  # noqa: E402
from flopmeter.ask.plan import PlanError  # noqa: E402
from flopmeter.ask.plan.layers import meter_layers  # noqa: E402
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
    costs = meter_layers(subject, Where(64, device, cluster_of(device, None), "eager", {}), Shape(2, 1, 1, 1, "none"))
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


def test_a_split_in_which_the_model_does_not_run_is_left_out_and_said():
    only = {"microbatch": 1, "recompute": "none", "cp": 1}
    found = plan(Fixed, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only)
    assert {row.split.tp for row in found.rows} == {1}
    (said,) = [note for note in found.notes if note.startswith("left out: ")]
    assert said.startswith("left out: tp 2, since Fixed does not run so (RuntimeError: shape '[1, 64, 4, 64]'")


def test_where_none_of_the_wanted_splits_runs_the_error_says_why():
    only = {"tp": 2, "microbatch": 1, "recompute": "none"}
    with pytest.raises(PlanError, match="none of these splits runs: tp 2, since Fixed does not run so") as found:
        plan(Fixed, 2, H100, batch=4, length=64, tensor_parallel=STYLES, only=only)
    assert "\n" not in str(found.value)


def test_a_config_of_which_transformers_makes_no_model_is_refused_in_one_line():
    with pytest.raises(TargetError, match="Dots1ForCausalLM of transformers cannot be built") as found:
        plan(transformers.Dots1Config(num_hidden_layers=2), 2, H100)
    assert "\n" not in str(found.value)
