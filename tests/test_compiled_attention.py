"""flex_attention in graphs of torch.compile: inductor's templates, on blocks counted against dense masks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.records import Cost
from tests.test_flex_attention import brute_force, causal, window

LENGTH, HEADS, DEPTH = 512, 4, 64
TOKENS = torch.arange(LENGTH, device="cpu") % 193  # the token 0 begins a document


def qkv(grad: bool = True, **sizes: int) -> list[Tensor]:
    queries, keys = sizes.get("queries", LENGTH), sizes.get("keys", LENGTH)
    return [
        torch.empty(2, HEADS, length, DEPTH, device="meta", dtype=torch.bfloat16, requires_grad=grad)
        for length in (queries, keys, keys)
    ]


def metered(program: Callable[[], Any], **options: Any) -> FlopMeter:
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        program()
    assert not meter.trace.compilation.failures
    return meter


def templates(meter: FlopMeter) -> list[Cost]:
    return [kernel.cost for kernel in kernels_of(meter.trace) if kernel.cost.op_class == "attention (fused)"]


def blocks_of(meter: FlopMeter) -> list[tuple[int, int, int]]:
    """Of each template: blocks that are computed, those of them that are full, and pairs in the first."""
    counts = [op.call.body.blocks for op in meter.trace.ops if "flex" in op.call.func.name()]
    return [
        (each.computed, (each.pairs - each.masked_pairs) // (each.block[0] * each.block[1]), each.pairs)
        for each in counts
    ]


def trained(function: Callable[..., Tensor], *args: Any) -> None:
    out = function(*args)
    out.backward(torch.empty_like(out))


def kernels(meter: FlopMeter) -> list[list[str]]:
    return [[kernel.name for kernel in graph.kernels] for graph in meter.trace.compilation.graphs]


# --- the same as by the rules


def _soft(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


@pytest.mark.parametrize(
    ("mask_mod", "score_mod", "key_heads"),
    [(causal, None, HEADS), (window(200), None, HEADS), (causal, _soft, HEADS), (None, None, HEADS // 2)],
)
def test_a_compiled_graph_launches_the_templates_that_the_rules_price(mask_mod, score_mod, key_heads):
    def program() -> None:
        query, key, value = qkv()
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="meta") if mask_mod else None
        groups = key_heads < HEADS
        trained(
            torch.compile(flex_attention),
            query,
            key[:, :key_heads],
            value[:, :key_heads],
            score_mod,
            mask,
            None,
            groups,
        )

    def told(meter: FlopMeter) -> list[tuple[Any, ...]]:
        return [
            (cost.name, cost.flops_by_class, cost.transcendentals, cost.work, cost.bytes_written)
            for cost in templates(meter)
        ]

    by_compiler, by_rules = metered(program), metered(program, compile="rules")
    assert len(by_compiler.trace.compilation.graphs) == 2
    assert told(by_compiler) == told(by_rules)
    read = [[cost.bytes_read for cost in templates(meter)] for meter in (by_compiler, by_rules)]
    assert read[0] == pytest.approx(read[1], rel=1e-4)  # a mask of one block has no lists of full blocks


def test_the_gradient_of_a_score_function_is_part_of_the_backward_template():
    """Of 20 * tanh(s / 20): three operations forward; for the gradient two products and tanh's own, which is three. The
    template goes over the scores twice."""
    meter = metered(lambda: trained(torch.compile(flex_attention), *qkv(), _soft))
    in_graphs = [kernel.origins[0] for graph in meter.trace.compilation.graphs for kernel in graph.kernels[-1:]]
    scores = 2 * HEADS * LENGTH * LENGTH
    for forward, backward in (templates(meter), in_graphs):
        assert dict(forward.flops_by_class)["element-wise"] == 3 * scores
        assert dict(backward.flops_by_class)["element-wise"] == 2 * (3 + 1 + 3 + 1) * scores


def test_a_kernel_of_the_backward_graph_sums_up_the_rows():
    meter = metered(lambda: trained(torch.compile(flex_attention), *qkv()))
    sums, _ = meter.trace.compilation.graphs[1].kernels
    elements, rows = 2 * HEADS * LENGTH * DEPTH, 2 * HEADS * LENGTH
    assert (sums.name, sums.flops) == ("flex_attention_backward: row sums", 2 * elements)
    assert (sums.bytes_read, sums.bytes_written) == (2 * 2 * elements, 4 * rows)


def test_a_learned_bias_gets_its_gradient_from_the_template():
    bias = torch.zeros(LENGTH, device="meta", requires_grad=True)

    def program(**options: Any) -> tuple[int, int]:
        run = torch.compile(lambda *qkv: flex_attention(*qkv, score_mod=lambda s, b, h, q, k: s + bias[q]))
        with_bias = templates(metered(lambda: trained(run, *qkv()), **options))[1]
        return with_bias.flops, with_bias.bytes_written

    flops, written = program()
    gradients = 3 * 2 * HEADS * LENGTH * DEPTH * 2
    assert written == gradients + 4 * LENGTH
    assert flops == program(compile="rules")[0]


# --- what fuses into the template


def test_a_gate_fuses_into_the_end_of_the_template():
    """The template then reads the gate too and writes only what comes out of it."""
    run = torch.compile(lambda query, key, value, gate: flex_attention(query, key, value) * torch.sigmoid(gate))
    with torch.no_grad():
        meter = metered(lambda: run(*qkv(False), torch.empty(2, HEADS, LENGTH, DEPTH, device="meta").bfloat16()))
    (cost,) = templates(meter)
    elements = 2 * HEADS * LENGTH * DEPTH
    assert cost.name == "fused(flex_attention, sigmoid, mul)"
    assert cost.flops == 4 * elements * LENGTH + 4 * elements + elements  # two products, a sigmoid (4), a product
    assert cost.bytes_read == pytest.approx(4 * 2 * elements, rel=1e-4)
    assert cost.bytes_written == 2 * elements


def test_what_projects_and_norms_around_attention_is_fused_as_inductor_fuses_it():
    """No graph break; the attention has one kernel in each graph, in the module and on the line that calls it."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.RMSNorm(HEADS * DEPTH), nn.Linear(HEADS * DEPTH, HEADS * DEPTH, bias=False)

        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            heads = self.norm(x).unflatten(-1, (HEADS, DEPTH)).transpose(1, 2)
            return x + self.out(flex_attention(heads, heads, heads, block_mask=mask).transpose(1, 2).flatten(2))

    with torch.device("meta"):
        model, x = Attention(), torch.empty(2, LENGTH, HEADS * DEPTH)
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="meta")
    meter = metered(lambda: trained(torch.compile(model), x, mask))
    forward, backward = meter.trace.compilation.graphs
    assert [kernel.kind for kernel in forward.kernels].count("template") == 1
    assert [kernel.kind for kernel in backward.kernels].count("template") == 1
    assert not forward.breaks
    places = [(op.module, op.phase) for op in meter.trace.ops if "flex" in op.call.func.name()]
    assert places == [("Attention", "forward"), ("Attention", "backward")]
    lines = [
        kernel.origins[0].source
        for graph in (forward, backward)
        for kernel in graph.kernels
        if kernel.kind == "template"
    ]
    assert all(line is not None and __file__ in line for line in lines)


def test_few_queries_split_the_keys_and_kernels_of_the_graph_combine_the_parts():
    with torch.no_grad():
        meter = metered(lambda: torch.compile(flex_attention)(*qkv(False, queries=1, keys=4096)))
    (graph,) = meter.trace.compilation.graphs
    (cost,) = templates(meter)
    parts = 132 // (2 * HEADS) * 2  # get_split_k in torch/_inductor/kernel/flex/flex_decoding.py, of 132 SMs
    assert cost.work.backend == "flex_decoding"
    assert cost.bytes_written == 2 * HEADS * parts * (DEPTH + 2) * 4  # results, maxima and sums of each part, in fp32
    assert [kernel.name for kernel in graph.kernels].count("flex_attention: row sums") == 2


def test_the_time_to_combine_the_parts_is_that_of_these_kernels_alone():
    """Where no graph has them, the template's time is also that of a second kernel, which no GPU launches and ends in
    less than 2 µs."""

    def template(**options: Any) -> float:
        with torch.no_grad():
            meter = metered(lambda: torch.compile(flex_attention)(*qkv(False, queries=1, keys=8192)), **options)
        return sum(row.seconds for row in meter.report().rows("op") if row.name == "flex_attention")

    assert template() < template(compile="rules") - 2e-6


def test_few_queries_of_few_heads_read_a_long_cache_with_the_whole_device():
    """8 heads alone would keep 124 of an H100's 132 SMs idle."""
    keys = 65536
    with torch.no_grad():
        meter = metered(lambda: torch.compile(flex_attention)(*qkv(False, queries=1, keys=keys)))
    (row,) = [row for row in meter.report().rows("op") if row.name == "flex_attention"]
    assert row.seconds < 2 * (2 * HEADS * keys * DEPTH * 2 * 2) / 3.35e12


# --- masks of the graph's own


def _documents(query: Tensor, key: Tensor, value: Tensor, tokens: Tensor) -> Tensor:
    document = (tokens == 0).cumsum(0)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[i] == document[j])

    mask = create_block_mask(visible, None, None, LENGTH, LENGTH, device=tokens.device)
    return flex_attention(query, key, value, block_mask=mask)


def test_documents_that_a_graph_finds_in_known_tokens_are_counted_forward_and_backward():
    def program() -> None:
        trained(torch.compile(_documents), *qkv(), (torch.arange(LENGTH, device="meta") % 193))

    meter = metered(program)
    document = (TOKENS == 0).cumsum(0)
    dense = (document[:, None] == document).tril()
    assert blocks_of(meter) == [brute_force(dense[None])] * 2
    assert not meter.report().assumptions


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
def test_every_block_of_unknown_documents_is_counted_and_said_to_be(make):
    """Nobody knows what is in tokens that came from elsewhere, or in memory that nobody has written to."""
    foreign = torch.randint(9, (LENGTH,), device="meta")

    def program() -> None:
        tokens = foreign if make is torch.zeros else make(LENGTH, dtype=torch.int64, device="meta")
        trained(torch.compile(_documents), *qkv(), tokens)

    meter = metered(program)
    side = LENGTH // 128
    assert [computed for computed, _, _ in blocks_of(meter)] == [side * side] * 2
    assert any("values which are not known" in str(each) for each in meter.report().assumptions)


def test_lists_of_blocks_that_a_graph_makes_of_a_known_number_are_counted():
    """As in a window that grows while a model trains: mask_mod does not know it, the lists of blocks do."""

    def run(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> Tensor:
        place = torch.arange(4, dtype=torch.int32, device=query.device)
        seen = (place[:, None] >= place) & (place[:, None] - place < blocks)
        order = seen.int().argsort(dim=-1, descending=True, stable=True).int()
        mask = BlockMask.from_kv_blocks(seen.sum(-1).int()[None, None], order[None, None], mask_mod=causal)
        return flex_attention(query, key, value, block_mask=mask)

    meter = metered(lambda: trained(torch.compile(run), *qkv(), torch.tensor(2, dtype=torch.int32, device="meta")))
    assert [computed for computed, _, _ in blocks_of(meter)] == [1 + 2 + 2 + 2] * 2


def test_new_lengths_of_a_dynamic_graph_are_planned_anew():
    run = torch.compile(flex_attention, dynamic=True)

    def program() -> None:
        for length in (256, 512, 384):
            run(*qkv(False, queries=length, keys=length))

    with torch.no_grad():
        costs = templates(metered(program))
    assert [cost.flops for cost in costs] == [4 * 2 * HEADS * DEPTH * length**2 for length in (256, 512, 384)]


# --- without Triton


def _plain_kernels() -> str:
    return repr(kernels(metered(lambda: trained(torch.compile(flex_attention), *qkv()))))


def test_triton_need_not_be_there():
    """In a process of its own, where importing it is an error; the graph is the same."""
    hide = "import sys; sys.modules['triton'] = None; import test_compiled_attention as own"
    command = [sys.executable, "-c", f"{hide}; print(own._plain_kernels())"]
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == _plain_kernels()


# --- time


def _seconds(
    device: str = "a100-sxm4-80gb", *, heads: int = 16, key_heads: int = 16, score_mod: Any = None
) -> list[float]:
    """Of the templates forward and backward, on 4,096 tokens without a mask."""
    with torch.device("meta"):
        query, key, value = (
            torch.empty(1, each, 4096, 128, dtype=torch.bfloat16, requires_grad=True)
            for each in (heads, key_heads, key_heads)
        )
    run = torch.compile(flex_attention)
    with FlopMeter(device, compile="rules") as meter:
        trained(run, query, key, value, score_mod, None, None, key_heads < heads)
    rows = {row.name: row.seconds for row in meter.report().rows("op")}
    return [rows["flex_attention"], rows["flex_attention_backward"]]


def test_seven_products_backward_take_longer_than_five_but_no_more_than_their_share():
    query, key, value = (
        torch.empty(1, 16, 4096, 128, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    with FlopMeter("a100-sxm4-80gb") as meter:
        trained(nn.functional.scaled_dot_product_attention, query, key, value)
    rows = {row.name: row.seconds for row in meter.report().rows("op")}
    five = rows["_scaled_dot_product_flash_attention_backward"]
    assert five < _seconds()[1] < 7 / 5 * five


def test_each_further_operation_on_a_score_takes_as_much_longer():
    def chain(number: int) -> Any:
        def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            for _ in range(number):
                score = score * 3
            return score

        return score

    times = [_seconds(score_mod=chain(number)) for number in (0, 10, 20, 30)]
    for before, *others in zip(*times, strict=True):  # the first may still hide behind the power limit
        ten, twenty, thirty = others
        assert before < ten
        assert thirty - twenty == pytest.approx(twenty - ten, rel=0.01)
    of_ten = 10 * 16 * 4096**2 / (19.5e12 / 2)  # none is a fused multiply-add
    assert times[3][0] - times[2][0] == pytest.approx(of_ten, rel=0.1)
    # Backward ten operations and the ten of their gradients run in both kernels of the template.
    assert times[3][1] - times[2][1] == pytest.approx(2 * 2 * of_ten, rel=0.1)


def test_a_single_head_of_keys_leaves_few_blocks_to_compute_its_gradient():
    """Each of them serves all 16 heads of queries, as the grid of the template says."""
    forward, backward = _seconds(key_heads=1)
    assert forward == pytest.approx(_seconds()[0], rel=0.02)
    assert backward > 1.5 * _seconds()[1]
