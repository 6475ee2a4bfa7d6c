"""Experts that are spread over GPUs, against closed forms: bytes of weights, bytes on the links, draws of picks."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flopmeter import ServingError, load_hardware, serving  # noqa: E402
from flopmeter.ask.serve.decoder import decoder  # noqa: E402
from flopmeter.ask.serve.steps import StepModel  # noqa: E402
from flopmeter.cli import main  # noqa: E402
from flopmeter.device.cluster import load_cluster  # noqa: E402

H100 = "h100-sxm5-80gb"
LAYERS, WIDTH, HIDDEN, EXPERTS, PICKS, VOCABULARY = 2, 2048, 1024, 64, 4, 8192
OF_EXPERT = 3 * WIDTH * HIDDEN


def mixture(**changes):
    sizes = {
        "hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
        "num_experts_per_tok": PICKS, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2**20,
    }  # fmt: skip
    return transformers.Qwen3MoeConfig(**sizes | changes)


def steps(ranks, **changes):
    share = decoder(mixture(**changes), expert_ranks=ranks)
    return StepModel(share, "cudagraph", "bf16", "bf16", {"clocks": "burst"})


def served(**options):
    options = {"prompt": 512, "output": 128, "gpus": 8, "expert_parallel": True} | options
    return serving(options.pop("model", None) or mixture(), [H100], **options)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_gpu_holds_its_part_of_the_experts_and_all_else(ranks):
    device = load_hardware(H100)
    left = LAYERS * OF_EXPERT * (EXPERTS - EXPERTS // ranks)
    assert steps(ranks).weight_bytes(device) == steps(1).weight_bytes(device) - 2 * left


@pytest.mark.parametrize("ranks", [4, 8])
def test_tokens_cross_the_links_once_for_each_pick_that_lies_on_another_gpu_and_come_back(ranks):
    device, tokens = load_hardware(H100), 2**17
    copied = 2 * LAYERS * tokens * PICKS * WIDTH * 2  # bytes in bf16, there and back
    rate = load_cluster("dgx-h100").intra.sustained_among(set(range(ranks)))
    seconds = steps(ranks).cost(device, 1, tokens, 0).link_seconds
    assert copied * (ranks - 1) / ranks / rate < seconds < copied / rate  # what stays is copied faster than it is sent


def test_a_gpu_runs_the_products_of_as_many_picks_as_its_tokens_make():
    """Of many tokens each GPU gets as many as it sends."""
    device, tokens = load_hardware(H100), 2**14
    report = steps(8).report(device, 1, tokens, 0)
    macs = sum(kernel.cost.macs for kernel in report.kernels if kernel.cost.name == "_grouped_mm")
    assert macs == pytest.approx(LAYERS * tokens * PICKS * OF_EXPERT, rel=0.02)


@pytest.mark.parametrize("tokens", [1, 8, 256])
def test_the_fullest_gpu_gets_and_reads_what_it_does_in_draws_of_picks(tokens):
    ranks, draws, of_rank = 8, 500, EXPERTS // 8
    generator = torch.Generator().manual_seed(0)
    picks = torch.rand(draws, ranks * tokens, EXPERTS, generator=generator).topk(PICKS).indices.flatten(1)
    most = (picks // of_rank).unsqueeze(-1).eq(torch.arange(ranks)).sum(1).amax(1).float().mean().item()
    own = steps(ranks)
    report = own.report(load_hardware(H100), tokens, 1, 64)
    (grouped, *_) = (kernel for kernel in report.kernels if kernel.cost.name == "_grouped_mm")
    assert grouped.cost.macs / (2 * WIDTH * HIDDEN) == pytest.approx(most, rel=0.06)
    busy = round(of_rank * (1 - (1 - 1 / of_rank) ** round(most)))
    assert grouped.cost.bytes_read / (2 * 2 * WIDTH * HIDDEN) == pytest.approx(busy, rel=0.1)


def test_a_step_of_one_token_on_each_gpu_takes_what_its_weights_take_and_the_exchange():
    large = {"hidden_size": 8192, "moe_intermediate_size": 65536, "num_experts": 8, "num_experts_per_tok": 8}
    device, own = load_hardware(H100), steps(8, **large)
    step = own.cost(device, 1, 1, 64)
    weights = own.weight_bytes(device) - 2 * VOCABULARY * 8192  # of the table of embeddings one row is read
    assert step.seconds - step.link_seconds == pytest.approx(weights / device.sustained_bandwidth_bytes_per_s, rel=0.25)


def test_requests_of_all_gpus_are_counted_and_each_gpu_has_its_share():
    spread, alone = served().rows[0], served(gpus=1, expert_parallel=False).rows[0]
    assert spread.best.batch % 8 == 0
    assert spread.points[0].batch == 8
    assert spread.best.tokens_per_s == pytest.approx(8 * spread.best.tokens_per_s_per_gpu)
    assert spread.best.requests_per_s * 128 == pytest.approx(spread.best.tokens_per_s)
    assert spread.best.watts_per_gpu == pytest.approx(spread.best.joules_per_token * spread.best.tokens_per_s_per_gpu)
    assert spread.kv_bytes_per_request == alone.kv_bytes_per_request
    assert spread.most_requests > 8 * alone.most_requests  # which has all experts beside its cache


def test_the_answer_says_what_lies_where_and_what_the_links_take(tmp_path, capsys):
    mixture(architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    main(f"serve hf:{tmp_path}/config.json --gpus 8 --expert-parallel --prompt 512 --output 64".split())
    shown = capsys.readouterr().out
    assert "8 expert parallel GPUs" in shown
    assert "each GPU has 8 experts of a layer, all else of the model, and requests of its own" in shown
    assert "of decoding for one request on each GPU" in shown


def test_gpus_of_several_nodes_are_told_what_the_network_between_them_sustains():
    network = load_cluster("dgx-h100").inter.sustained_bytes_per_s / 1e9
    (said,) = (note for note in served(gpus=16).notes if note.startswith("links:"))
    assert f"GB/s among 8 GPUs, {network:.0f} GB/s a GPU between nodes; " in said


def test_a_draft_is_whole_on_each_gpu():
    small = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCABULARY
    )
    spread = served(draft=small, acceptance=1.0).rows[0]
    assert spread.best.tpot_seconds < served().rows[0].points[-1].tpot_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 1}, "expert_parallel spreads experts over GPUs: say how many"),
        ({"gpus": 7}, "64 experts cannot be spread over 7 GPUs: take a divisor"),
        ({"model": transformers.LlamaConfig(num_hidden_layers=1)}, "has no experts that could be spread over GPUs"),
        ({"expert_parallel": 8}, "expert_parallel must be True or False"),
    ],
)
def test_what_cannot_be_spread_is_one_clear_error(options, message):
    with pytest.raises((ServingError, TypeError), match=message):
        served(**options)
