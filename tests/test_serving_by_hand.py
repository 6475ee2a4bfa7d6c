"""A server's figures, by hand, from steps whose times, joules and bytes are written down."""

from __future__ import annotations

import operator
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from costs_support import meta, metered
from torch import nn

from flopmeter import FlopMeter, HardwareError, ServingError, load_hardware
from flopmeter.ask.serve.asked import ServingPlan, check_draft
from flopmeter.ask.serve.engine import pack
from flopmeter.ask.serve.formats import in_formats
from flopmeter.ask.serve.language_config import _class_that_takes, causal_config
from flopmeter.ask.serve.published import Quantised, quantised
from flopmeter.ask.serve.queue import RequestWork, load
from flopmeter.ask.serve.rows import ServingRow
from flopmeter.ask.serve.server import Server
from flopmeter.ask.serve.steps import StepCost
from flopmeter.device.cluster import load_cluster
from flopmeter.timing.peak_memory import CONTEXT_BYTES

TOKEN_BYTES = 10**6  # of the cache, in bf16
WEIGHTS = 10**10
DEVICE = load_hardware("h100-sxm5-80gb").replace(power_limit_w=500.0)
CHUNK = StepCost(0.100, 40.0, 10**9, 0.0, 0.100)


class Steps:
    """Steps of decoding by how many requests share them, and one of a chunk of a prompt."""

    def __init__(
        self, decode: dict[int, StepCost], chunk: StepCost = CHUNK, weights: int = WEIGHTS, cache="paged",
        kv: str = "bf16",
    ):  # fmt: skip
        self.kv, self.weights = kv, "bf16"
        self._decode, self._chunk, self._weights = decode, chunk, weights
        self.decoder = SimpleNamespace(cache=cache, kv_bytes=lambda tokens, width: tokens * TOKEN_BYTES * width / 2)
        self.asked = set[tuple[int, ...]]()

    def weight_bytes(self, device: Any) -> int:
        return self._weights

    def cost(self, device: Any, batch: int, new: int, cached: int, logits: int = 1) -> StepCost:
        self.asked.add((batch, new, cached, logits))
        return self._chunk if new >= 100 else self._decode[batch]


def step(milliseconds: float, joules: float | None = 5.0, working: int = 0, idle: float = 0.0) -> StepCost:
    return StepCost(milliseconds / 1e3, joules, working, 0.0, (milliseconds - idle) / 1e3)


def like(milliseconds: float, **facts: Any) -> dict[int, StepCost]:
    """However many share the step."""
    return {1 << power: step(milliseconds, **facts) for power in range(10)}


def server(
    steps: Any, *, draft: Any = None, holds: float = 512, price: float | None = None, device: Any = DEVICE, **asked: Any
) -> Server:
    """On a device with memory for the weights, a chunk and so many tokens more."""
    facts = {
        "prompt": 4000, "output": 101, "slo": {}, "gpus": 1, "spreads_experts": False, "mode": "cudagraph",
        "weights": None, "kv": "bf16", "chunk": 1000, "prefix": 0.0, "draft_tokens": 4, "acceptance": 0.5,
        "is_disaggregated": False,
    }  # fmt: skip
    plan = ServingPlan(**facts | asked)
    memory = (CONTEXT_BYTES + WEIGHTS + CHUNK.working_bytes + holds * TOKEN_BYTES) / 1e9
    return Server(plan, steps, draft, device.replace(memory_gb=memory), price)


def row(*given: Any, **asked: Any) -> ServingRow:
    return server(*given, **asked).row()


MANY = 8 * 4101  # tokens of eight requests


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "fit"), [(4101, 1), (2 * 4101 - 1, 1), (2 * 4101, 2), (MANY, 8), (MANY - 1, 7)])
def test_a_request_holds_a_prompt_and_its_output(tokens, fit):
    found = row(Steps(like(10)), holds=tokens)
    assert (found.most_requests, found.weight_bytes) == (fit, WEIGHTS)
    assert found.kv_bytes_per_request == 4101 * TOKEN_BYTES


@pytest.mark.parametrize("holds", [4100, 0, -9000])
def test_a_server_without_room_for_one_request_says_what_it_would_hold(holds):
    with pytest.raises(HardwareError, match=r"not even one request of 4000 \+ 101 tokens fits beside 10\.0 GB"):
        row(Steps(like(10)), holds=holds)


def test_a_prefix_is_held_once_beside_what_each_request_has_of_its_own():
    """Half of the prompt: 2,000 tokens once, and 2,101 for each of three; transformers' own cache holds all of each."""
    assert row(Steps(like(10)), holds=2000 + 3 * 2101, prefix=0.5).most_requests == 3
    assert row(Steps(like(10)), holds=2000 + 3 * 2101 - 1, prefix=0.5).most_requests == 2
    own = row(Steps(like(10), cache="transformers"), holds=2000 + 3 * 2101, prefix=0.5)
    assert (own.most_requests, own.kv_bytes_per_request) == (2, 4101 * TOKEN_BYTES)


def test_a_step_of_decoding_takes_room_in_proportion_to_its_requests():
    """Seven fit without, and the metered four hold 4,101 tokens: seven hold 7,177, so that two of them have to go."""
    steps = Steps(like(10, working=4101 * TOKEN_BYTES))
    assert row(steps, holds=7 * 4101).most_requests == 5
    assert (4, 1, 4050, 1) in steps.asked


def test_a_narrow_cache_of_a_model_and_its_draft_holds_as_many_tokens_as_a_wide_one_of_the_model():
    steps, draft = (Steps(like(10), weights=size, kv="fp8") for size in (WEIGHTS - 10**9, 10**9))
    found = row(steps, draft=draft, holds=MANY, draft_tokens=4)
    assert (found.most_requests, found.weight_bytes) == (8, WEIGHTS)
    assert found.kv_bytes_per_request == 4101 * TOKEN_BYTES


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_chunk_in_the_middle_of_what_is_not_cached_stands_for_all():
    """1,000 of 4,000 tokens are cached. Three chunks of 1,000: the one in the middle follows on 1,000 + 1,000."""
    steps = Steps(like(10))
    found = row(steps, holds=MANY, prefix=0.25)
    assert (1, 1000, 2000, 1) in steps.asked
    assert found.prefill_seconds == pytest.approx(3 * 0.1)
    assert row(Steps(like(10)), holds=MANY, chunk=1600).prefill_seconds == pytest.approx(2.5 * 0.1)
    whole = Steps(like(10))
    assert row(whole, holds=MANY, chunk=None, prefix=0.25).prefill_seconds == pytest.approx(0.1)
    assert (1, 3000, 1000, 1) in whole.asked


def test_a_step_with_a_draft_has_its_proposals_before_one_step_of_all_of_them_and_a_token_more():
    """Three proposals of 2 ms before 10 ms, each accepted with a half: 1 + 1/2 + 1/4 + 1/8 tokens."""
    steps, draft = Steps(like(10)), Steps(like(2, joules=None), step(30, None, 4 * 10**9), weights=0)
    # The chunks come one after another, so that the larger of them needs the room: 3,000 tokens more than the model's.
    one = row(steps, draft=draft, holds=3 * 2 * 4101 + 3000, draft_tokens=3)
    assert one.step_seconds == pytest.approx(0.016)
    assert one.points[0].tpot_seconds == pytest.approx(0.016 / 1.875)
    assert {(1, 4, 4050, 4), (1, 1, 4050, 1)} <= steps.asked  # the second one is a token without a draft
    assert (1, 1, 4050, 1) in draft.asked
    assert one.prefill_seconds == pytest.approx(4 * 0.130)
    assert one.most_requests == 3
    assert row(steps, draft=draft, holds=3 * 2 * 4101 + 2999).most_requests == 2


def test_between_two_metered_batches_the_time_lies_on_the_line_and_a_padded_batch_may_be_faster():
    """Of 4 requests it would be 16 ms, and padded to 8 it is 14: a step of 3 takes (11 + 14) / 2."""
    own = server(Steps(dict(zip((1, 2, 4, 8), map(step, (10, 11, 16, 14)), strict=True))), holds=MANY)
    found = [own._decode(batch).seconds for batch in (1, 2, 2.5, 3, 4, 6, 8)]
    assert found == pytest.approx([0.010, 0.011, 0.01175, 0.0125, 0.014, 0.014, 0.014])


@pytest.mark.parametrize(
    ("chunk", "steps", "longer"),
    [
        ((100, 0), ((10, 0), (30, 0)), 20),  # all that the step does beside reading the weights
        (
            (120, 20),
            ((60, 50), (80, 50)),
            20,
        ),  # one of them waits: 100 + 30 - 10 of work, 20 of waiting
        ((55, 50), ((104, 100), (108, 100)), 53),  # the host needs 108 ms, whatever the device does
        ((100, 0), ((10, 0), (10, 0)), 0),
    ],
)
def test_a_chunk_within_a_step_of_decoding_reads_the_weights_once_and_waits_for_the_host_once(chunk, steps, longer):
    """Milliseconds, and of these the ones in which the device waits: of a chunk, of one request and of two."""
    costs = [step(total, idle=idle) for total, idle in (chunk, *steps)]
    own = server(Steps({1: costs[1], 2: costs[2]}, costs[0]), holds=2 * 4101)
    assert own._longer(2) == pytest.approx(longer / 1e3)


# --- energy and money ------------------------------------------------------------------------------------------------


def decoding() -> dict[int, StepCost]:
    return {1: step(10, 4.0), 2: step(10, 6.0), 4: step(10, 8.0), 8: step(10, 12.0)}


def test_a_request_costs_the_joules_of_its_prompt_and_its_share_of_100_steps():
    """Alone four chunks of 40 J and 100 steps of 4 J. Of two, a chunk runs in a step: it saves the weights (4 J) and
    is in one of which the request has half (6 J / 2)."""
    one, two, *_ = row(Steps(decoding()), holds=MANY, price=3.0, dollars_per_kwh=0.36).points
    joules = 4 * 40 + 100 * 4.0, 4 * (40 + 3.0 - 4.0) + 100 * 3.0
    assert [each.joules_per_token * 101 for each in (one, two)] == pytest.approx(joules)
    seconds = 0.4 + 100 * 0.01
    assert one.requests_per_s == pytest.approx(1 / seconds)
    assert one.watts_per_gpu == pytest.approx(joules[0] / seconds)
    assert one.tokens_per_s == one.tokens_per_s_per_gpu == pytest.approx(101 / seconds)
    assert one.dollars_per_million_tokens == pytest.approx(1e6 * 3 / 3600 / (101 / seconds))
    assert one.energy_dollars_per_million_tokens == pytest.approx(joules[0] / 101 * 0.1)  # a joule: 1e-7 dollars
    whole = row(Steps(decoding()), holds=MANY, chunk=None).points[1]
    assert whole.joules_per_token * 101 == pytest.approx(40 + 100 * 3.0)
    assert row(Steps(like(10, joules=None)), holds=MANY).points[0].joules_per_token is None


def test_no_request_is_faster_than_the_power_limit_lets_its_joules_flow():
    """100 steps of 20 J and a prompt of 160 J, at 500 W: 4.32 s, though the steps take 1.4 s. Two GPUs draw both."""
    point = row(Steps(like(10, joules=20.0)), holds=MANY).points[0]
    assert point.requests_per_s == pytest.approx(500 / 2160)
    assert point.watts_per_gpu == pytest.approx(500)
    pair = row(Steps(like(10, joules=20.0)), holds=MANY, gpus=2).points[0]
    assert (pair.joules_per_token * 101, pair.watts_per_gpu) == (pytest.approx(2 * 2160), pytest.approx(500))


def test_gpus_with_requests_of_their_own_are_counted_together():
    one, four = (row(Steps(decoding()), holds=MANY, gpus=gpus, spreads_experts=gpus > 1, price=2.0) for gpus in (1, 4))
    assert (four.gpus, four.most_requests, four.dollars_per_hour) == (4, 32, 8.0)
    assert [each.batch for each in four.points] == [4, 8, 16, 32]
    for single, spread in zip(one.points, four.points, strict=True):
        assert spread.tokens_per_s == pytest.approx(4 * single.tokens_per_s)
        assert (spread.tokens_per_s_per_gpu, spread.watts_per_gpu, spread.joules_per_token) == pytest.approx(
            (single.tokens_per_s_per_gpu, single.watts_per_gpu, single.joules_per_token)
        )


# --- GPUs of their own for prefill -----------------------------------------------------------------------------------


def test_a_request_waits_for_gpus_of_prefill_as_in_a_queue_at_70_percent_of_the_time():
    """M/D/1 by Pollaczek and Khinchine: 0.2 s x 0.7 / (2 x 0.3). Ten requests of 100 steps of 10 ms want 10 prompts a
    second, which keep two GPUs at work all the time."""
    work = RequestWork(101, lambda batch: 0.01, 1.0, 0.2, 0, lambda batch: 0.0, is_apart=True, transfer=0.05)
    found = load(work, 10)
    assert found.ttft_seconds == pytest.approx(0.2 + 0.2 * 0.7 / 0.6 + 0.05)
    assert found.tpot_seconds == pytest.approx(0.01)
    assert (found.requests_per_s, found.prefill_servers) == (pytest.approx(10), pytest.approx(2 / 0.7))


@pytest.mark.parametrize("has_network", [True, False])
def test_prefill_apart_sends_the_cache_and_is_paid_for(has_network):
    """1,000 of 4,000 tokens of a prompt are shared, so 3,000 MB of it go over the network, or else over the links of
    the node. A prompt takes 0.1 s; one request at a time takes 1 s of decoding, so of 0.1 / 0.7 GPUs of prefill."""
    links = load_cluster("dgx-h100")
    assert links.inter is not None
    rate = links.inter.sustained_bytes_per_s if has_network else links.intra.sustained_among({0, 1})
    found = row(
        Steps(decoding()), holds=1000 + 8 * 3101, chunk=None, prefix=0.25, is_disaggregated=True, price=2.0,
        cluster=links if has_network else replace(links, inter=None),
    )  # fmt: skip
    one = found.points[0]
    assert found.alone_ttft_seconds == pytest.approx(0.1 + 3000 * TOKEN_BYTES / rate)
    assert one.ttft_seconds == pytest.approx(0.1 + 0.1 * 0.7 / 0.6 + 3000 * TOKEN_BYTES / rate)
    assert one.tpot_seconds == pytest.approx(0.01)
    assert one.tokens_per_s_per_gpu == pytest.approx(101 / (1 + 0.1 / 0.7))
    assert one.dollars_per_million_tokens == pytest.approx(1e6 * 2 * (1 + 0.1 / 0.7) / 3600 / 101)
    waiting = DEVICE.idle_watts * 0.1 * (1 / 0.7 - 1)
    assert one.joules_per_token * 101 == pytest.approx(40 + waiting + 100 * 4.0)
    assert found.dollars_per_hour == pytest.approx(2.0 * (1 + 8 * 0.1 / 0.7))  # of the best point: eight at a time


def test_steps_that_grow_faster_than_their_requests_keep_the_batch_small():
    """Two make 2 / (.2 + 1) requests a second; three, in steps of 25 ms between those of two and of four, fewer."""
    steps = Steps({1: step(10, None), 2: step(10, None), 4: step(40, None), 8: step(160, None)})
    found = row(steps, holds=MANY, chunk=None)
    assert found.best is not None
    assert found.best.requests_per_s == pytest.approx(2 / 1.2)
    assert found.limited_by == "more than 2 requests at a time make no more tokens"


# --- what keeps the batch from being larger --------------------------------------------------------------------------

UNLIMITED = {"joules": None}


@pytest.mark.parametrize(
    ("fit", "asked", "best", "said"),
    [
        (5, {}, 5, "5 requests fill the memory (TTFT "),
        (5, {"gpus": 4, "spreads_experts": True}, 20, "20 requests fill the memory (TTFT "),
        (1, {"output": 1}, 1, "1 request fills the memory (TTFT 100 ms)"),
        (512, {}, 512, "512 requests fill the memory (TTFT "),
        (600, {}, 512, "512 are the most metered (TTFT "),
        (600, {"gpus": 4, "spreads_experts": True}, 2048, "512 on each GPU are the most metered (TTFT "),
        # While a request makes its 100 tokens, each other one stops it once for .1 s: a token takes 10 + b - 1 ms.
        (8, {"slo": {"tpot": 0.0125}}, 3, "TPOT with more than 3 requests at a time"),
        (8, {"slo": {"tpot": 0.0125}, "gpus": 4, "spreads_experts": True}, 12, "TPOT with more than 12 requests"),
        (8, {"slo": {"ttft": 0.101}}, 1, "TTFT with more than 1 request at a time"),
        (8, {"slo": {"ttft": 0.101, "tpot": 0.0105}}, 1, "TTFT and TPOT with more than 1 request at a time"),
        (8, {"slo": {"tpot": 0.009}}, None, "one request alone has its first token after 100 ms and the others every"),
        (8, {"slo": {"ttft": 0.15}, "is_disaggregated": True}, None, "one request at a time, with GPUs of prefill at"),
        (8, {"slo": {"ttft": 0.09}, "output": 1}, None, "one request alone has its first token after 100 ms: no batch"),
        # Four steps with a chunk each and ten of decoding: with a chunk in each step there is room for 14 / 4 = 3.5.
        (8, {"chunk": 1000, "output": 11}, 4, "with 4 requests at a time each step has a full chunk of prompts"),
    ],
)  # fmt: skip
def test_the_most_requests_at_a_time_are_told_with_what_keeps_them_from_being_more(fit, asked, best, said):
    asked = {"chunk": None} | asked
    holds = fit * (4000 + asked.get("output", 101))
    found = row(Steps(like(10, **UNLIMITED)), holds=holds, **asked)
    assert found.limited_by.startswith(said)
    assert (found.best and found.best.batch) == best


def test_a_server_is_shown_at_each_doubling_of_its_requests_and_when_it_is_full():
    shown = {fit: row(Steps(like(10)), holds=fit * 4101).points for fit in (1, 5, 8, 600)}
    batches = {fit: [point.batch for point in points] for fit, points in shown.items()}
    assert batches == {1: [1], 5: [1, 2, 4, 5], 8: [1, 2, 4, 8], 600: [1 << power for power in range(10)]}


def test_a_step_after_others_and_one_between_two_have_all_their_figures():
    """Seconds, joules, working bytes, seconds of links and busy ones, those bound by compute and by memory."""
    one, two = StepCost(1.0, 10.0, 100, 0.5, 0.8, 0.1, 0.2), StepCost(3.0, 50.0, 700, 0.1, 2.0, 0.9, 0.4)
    assert one.after(two, 3) == pytest.approx((10.0, 160.0, 100, 0.8, 6.8, 2.8, 1.4))
    assert one.after(two).seconds == 4.0
    assert one.towards(two, 0.25) == pytest.approx((1.5, 20.0, 700, 0.4, 1.1, 0.3, 0.25))
    assert (one.idle_seconds, two.idle_seconds) == pytest.approx((0.2, 1.0))
    unknown = one._replace(joules=None)
    found = (unknown.after(two), one.after(two._replace(joules=None)), unknown.towards(two, 0.5))
    assert [each.joules for each in (*found, one.towards(unknown, 0.5))] == [None] * 4


@pytest.mark.parametrize(
    ("links", "compute", "memory", "bound"),
    [
        (1.0, 4.0, 3.0, "compute"),
        (1.0, 2.0, 4.0, "memory"),
        (4.0, 3.0, 2.0, "communication"),
        (1.0, 2.0, 3.0, "overhead"),  # the other four of ten seconds
    ],
)
def test_a_step_is_bound_by_what_takes_the_largest_part_of_it(links, compute, memory, bound):
    assert StepCost(10.0, None, 0, links, 9.0, compute, memory).bound_by == bound


def test_a_row_tells_what_bounds_its_steps_and_how_many_gpus_run_prefill():
    """Eight requests share a step of decoding of 10 ms; 8 of .1 s of prefill a second fill .8 / .7 GPUs."""
    chunk = CHUNK._replace(compute_seconds=0.08)
    decode = {batch: cost._replace(memory_seconds=0.006) for batch, cost in like(10).items()}
    found = row(Steps(decode, chunk), holds=8 * 4101)
    assert (found.prefill_bound_by, found.decoding_bound_by, found.prefill_servers) == ("compute", "memory", 0)
    assert found.bounds == "prefill is bound by compute, decoding by memory"
    apart = row(Steps(decode, chunk), holds=8 * 4101, chunk=None, is_disaggregated=True)
    assert apart.bounds.endswith(f"decoding by memory; {8 * 0.1 / 0.7:.2f} GPUs of prefill for each that decodes")


# --- what a config says, and what engines make of a model ------------------------------------------------------------


def said(**facts: Any) -> Quantised:
    return quantised(SimpleNamespace(quantization_config=facts))


def group(bits: int, kind: str, inputs: Any = None, targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    """The groups of a config of compressed-tensors of which there is one."""
    facts = {"num_bits": bits, "type": kind, **weights}
    return {"group_0": {"targets": list(targets), "weights": facts, "input_activations": inputs}}


@pytest.mark.parametrize(
    ("facts", "weights", "bits"),
    [
        ({"quant_method": "gptq", "group_size": 32, "sym": False}, "int4", 4 + 20 / 32),
        ({"quant_method": "awq", "group_size": 64, "zero_point": True}, "int4", 4 + 20 / 64),
        ({"quant_method": "awq", "group_size": 64, "zero_point": False}, "int4", 4 + 16 / 64),
        ({"quant_method": "gptq", "bits": 4}, "int4", 4 + 16 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, None, None),
        ({"quant_method": "fp8", "bits": 8, "group_size": 32}, "fp8", 8),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}, "int4", 4 + 16 / 64),
        ({"quant_method": "modelopt", "config_groups": group(4, "float", group_size=16)}, "nvfp4", 4 + 8 / 16),
        ({"config_groups": group(4, "float", group_size=32)}, "mxfp4", 4 + 8 / 32),
        ({"config_groups": group(4, "int", group_size=32)}, "int4", 4 + 16 / 32),
        ({"config_groups": group(4, "int", group_size=32, symmetric=False)}, "int4", 4 + 20 / 32),
        ({"config_groups": group(4, "int", strategy="channel")}, "int4", 4 + 16 / 128),
        ({"config_groups": group(8, "float", strategy="tensor")}, "fp8", 8),
        ({"config_groups": group(8, "int")}, "int8", 8),
        ({"config_groups": group(2, "int")}, None, None),
        ({"config_groups": group(8, "int") | {"group_1": group(8, "float")["group_0"]}}, None, None),
        ({"quant_method": "unheard of"}, None, None),
        ({}, None, None),
    ],
)
def test_a_config_says_in_how_many_bits_its_weights_were_published(facts, weights, bits):
    found = said(**facts)
    assert found.weights == weights
    assert weights is None or found.format_of(weights).bits == bits
    assert found.format_of("nvfp4").bits == 4 + 8 / 16  # as is asked for, whatever was published


def test_modules_keep_their_weights_by_their_path_or_by_that_of_what_they_are_in():
    names = ["language_model.model.layers.*.self_attn", "model.layers.7", "lm_head"]
    kept = {
        "model.layers.0.self_attn": True, "model.layers.0.self_attn.q_proj": True, "model.layers.7.mlp.up_proj": True,
        "lm_head": True, "model.layers.0.mlp.up_proj": False, "model.layers.70.mlp": False, "model": False,
    }  # fmt: skip
    for option in ("modules_to_not_convert", "ignored_layers", "ignore"):
        found = said(**{option: names})
        assert {path: found.is_kept(f"Model.{path}") for path in kept} == kept


def test_modules_keep_their_weights_by_the_end_of_their_path_or_a_regular_expression():
    """As MiniMax-M2 and Kimi K2 Thinking name them. transformers matches ends too (`should_convert_module`)."""
    by_end = said(quant_method="fp8", modules_to_not_convert=["gate", "self_attn.o_proj"])
    kept = {"mlp.gate": True, "self_attn.o_proj": True, "mlp.experts": False, "mlp.a_gate": False}
    assert {path: by_end.is_kept(f"Model.model.layers.1.{path}") for path in kept} == kept
    ignored = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    by_expression = said(config_groups=group(4, "int", group_size=32), ignore=ignored)
    kept = {"self_attn.q_proj": True, "mlp.gate_proj": True, "mlp.experts": False, "mlp.gate": False}
    assert {path: by_expression.is_kept(f"Model.model.layers.1.{path}") for path in kept} == kept


def test_a_group_of_modules_leaves_all_others_as_they_were():
    experts = said(config_groups=group(4, "int", targets=[r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]))
    everywhere = said(config_groups=group(4, "int"))
    for path, only_experts in {"mlp.experts": False, "self_attn.q_proj": True}.items():
        assert experts.is_kept(f"Model.model.layers.1.{path}") is only_experts
        assert not everywhere.is_kept(f"Model.model.layers.1.{path}")


def test_weights_alone_are_unpacked_and_with_their_inputs_they_multiply_in_their_type():
    for bits, kind, product in ((8, "float", "fp8"), (8, "int", "int8")):
        alone, both = (said(config_groups=group(bits, kind, inputs)) for inputs in (None, {"num_bits": bits}))
        assert (alone.format_of(alone.weights).product, both.format_of(both.weights).product) == (None, product)


def test_a_way_of_quantising_that_is_not_known_is_named():
    assert said(quant_method="bitsandbytes", load_in_4bit=True).unknown == "bitsandbytes"
    assert said(quant_method="gptq", bits=8).unknown == "gptq of 8 bits"
    assert "2 groups" in said(config_groups=group(8, "int") | {"b": group(8, "float")["group_0"]}).unknown
    assert [said().unknown, said(quant_method="fp8").unknown] == [None, None]


@pytest.mark.parametrize(("form", "of_tokens", "of_weights"), [("fp8", 0.5, 0.5), ("int4", 1, 4.125 / 16)])
def test_a_bias_stays_as_wide_as_it_is_and_tokens_are_narrow_where_the_product_is(form, of_tokens, of_weights):
    """64 tokens of 256 by a layer of 128."""
    layer = nn.Linear(256, 128, device="meta", dtype=torch.bfloat16)
    with FlopMeter(DEVICE) as meter:
        layer(meta(64, 256, dtype=torch.bfloat16))
    (kernel,) = in_formats(meter.report().kernels, meter.trace, DEVICE, form, "bf16")
    assert kernel.cost.bytes_read == 2 * (128 + of_tokens * 64 * 256 + of_weights * 256 * 128)
    assert kernel.cost.bytes_written == 2 * 64 * 128


def test_one_product_makes_the_outputs_of_layers_of_one_input_each_once():
    """Three layers of 16 to 8, 4 and 4; two that read another tensor, or the same one again, are a product each."""
    module = projections(8, 4, 4)
    pack(module)
    x, y = meta(2, 16), meta(2, 16)
    q, k, v = module.q_proj, module.k_proj, module.v_proj
    whole = 2 * 16 * 16
    assert [out.shape[-1] for out in (q(x), k(x), v(x))] == [8, 4, 4]
    for calls, times in ([(q, x), (k, x), (v, x)], 1), ([(q, x), (k, y), (v, y)], 2), ([(q, x), (q, x), (k, x)], 2):
        assert sum(cost.macs for cost in metered(lambda: [layer(of) for layer, of in calls])) == times * whole  # noqa: B023


@pytest.mark.parametrize("change", ["a bias", "another layer", "none of it"])
def test_layers_that_differ_in_kind_are_products_of_their_own(change):
    module = projections(8, 4, 4)
    if change == "a bias":
        module.k_proj = nn.Linear(16, 4, device="meta")
    elif change == "another layer":
        module.v_proj = nn.Identity()
    else:
        del module.k_proj
    before = list(module.parameters())
    pack(module)
    assert all(map(operator.is_, before, module.parameters()))


def projections(*widths: int) -> Any:
    names = ("q_proj", "k_proj", "v_proj")
    layers = (nn.Linear(16, width, bias=False, device="meta") for width in widths)
    return nn.ModuleDict(dict(zip(names, layers, strict=True)))


@pytest.mark.parametrize(("prefix", "cached"), [(0.0, 0), (0.25, 25), (0.994, 99), (1.0, 99)])
def test_of_a_prompt_that_is_cached_one_token_is_computed_for_its_logits(prefix, cached):
    assert server(Steps(like(10)), prompt=100, prefix=prefix)._plan.cached == cached


def test_vocabularies_of_a_model_and_its_draft_are_told_whole_however_many_ranks_share_them():
    own, draft = (SimpleNamespace(config=SimpleNamespace(vocab_size=size), ranks=2) for size in (16_000, 15_842))
    check_draft(own, draft)
    draft.config.vocab_size = 15_841
    with pytest.raises(ServingError, match="a vocabulary of 31682, the model one of 32000"):
        check_draft(own, draft)


def test_a_row_as_a_dictionary_is_flat_and_its_point_is_the_best_one():
    found = row(Steps(like(10)), holds=MANY)
    facts = found.as_dict()
    assert all(isinstance(value, str | int | float | None) for value in facts.values())
    assert found.best is not None
    assert (facts["batch"], facts["ttft_seconds"]) == (found.best.batch, found.best.ttft_seconds)
    none = row(Steps(like(10)), holds=MANY, slo={"ttft": 1e-6}).as_dict()
    assert none.keys() == facts.keys()
    assert none["batch"] is None


def test_of_a_type_in_no_list_of_transformers_the_class_with_a_head_is_served_before_the_base_model(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = type("MineConfig", (), {"__module__": "mine.configuration_mine"})
    classes = {name: type(name, (), {"config_class": config}) for name in ("MineForCausalLM", "MineTextModel")}
    for name, each in classes.items():
        monkeypatch.setattr(transformers, name, each, raising=False)
    for order in (("MineForCausalLM", "MineTextModel"), ("MineTextModel", "MineForCausalLM")):
        module = SimpleNamespace(**{name: classes[name] for name in order})
        monkeypatch.setitem(sys.modules, "mine.modeling_mine", module)
        assert _class_that_takes(config()) == "MineForCausalLM"
    monkeypatch.setitem(sys.modules, "mine.modeling_mine", SimpleNamespace(MineTextModel=classes["MineTextModel"]))
    assert _class_that_takes(config()) == "MineTextModel"


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_config_without_a_size_that_a_server_needs_is_refused_by_the_name_of_the_size(missing):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
    del sizes[missing]
    with pytest.raises(ServingError, match=f"this one lacks {missing}$"):
        causal_config(transformers.PretrainedConfig(**sizes))
