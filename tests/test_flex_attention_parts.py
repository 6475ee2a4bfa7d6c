"""What the kernels of flex_attention read and write, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from test_flex_attention import compiled, flex_costs, metered, qkv
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flopmeter import load_hardware
from flopmeter.records import Cost, Switches
from flopmeter.timing.energy import energy
from flopmeter.timing.floors import least_seconds
from flopmeter.timing.timeline import KernelPrices

HEADS, TOKENS, DEPTH = 2 * 4, 512, 64
OF_TOKENS, OF_ROWS = 2 * HEADS * TOKENS * DEPTH, 4 * HEADS * TOKENS  # bytes of a tensor in bf16, of a number a row


@pytest.mark.parametrize("takes_lse", [False, True])
def test_backward_the_row_sums_stand_for_the_output(takes_lse):
    """The kernel before sums up out * grad_out (and takes a gradient of the logarithms away); the template reads q, k,
    v, the gradient, and two numbers a row, and writes three gradients."""

    def program():
        out, aux = compiled(*qkv(grad=True), return_aux=AuxRequest(lse=True))
        results = [out, aux.lse] if takes_lse else [out]
        torch.autograd.backward(results, list(map(torch.empty_like, results)))

    _, sums, template = flex_costs(metered(program))
    assert sums.bytes_read == 2 * OF_TOKENS + takes_lse * OF_ROWS
    assert sums.bytes_written == OF_ROWS
    one_block = 4 * 4  # no mask: how many blocks, and which, for queries and for keys
    assert template.bytes_read == 4 * OF_TOKENS + 2 * OF_ROWS + one_block
    assert template.bytes_written == 3 * OF_TOKENS


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_lists_of_blocks_need_not_be_as_wide_as_there_are_blocks(columns):
    """The first block of 128 keys for each of four blocks of queries, in lists of one column or more: a fourth."""
    counts = torch.ones(1, 1, 4, dtype=torch.int32)
    listed = torch.zeros(1, 1, 4, columns, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, listed, seq_lengths=(TOKENS, TOKENS), BLOCK_SIZE=128)
    (cost,) = flex_costs(metered(partial(lambda mask: compiled(*qkv(), block_mask=mask.to("meta")), mask)))
    assert cost.masked_flops == cost.flops * 3 // 4


NO_SWITCHES = Switches(False, False, False)


@cache
def with_function(operations: int, blocks: int) -> Cost:
    """Forward, of a function of so many operations on each score; of each four blocks of keys so many are visible."""

    def function(score: Tensor, *_: Tensor) -> Tensor:
        for _ in range(operations):
            score = score * 3
        return score

    counts = torch.full((1, 1, 4), blocks, dtype=torch.int32)
    listed = torch.arange(blocks, dtype=torch.int32).repeat(1, 1, 4, 1)
    mask = BlockMask.from_kv_blocks(counts, listed, seq_lengths=(TOKENS, TOKENS), BLOCK_SIZE=128)
    run = partial(lambda mask: compiled(*qkv(), score_mod=function, block_mask=mask.to("meta")), mask)
    (cost,) = flex_costs(metered(run))
    return cost


def test_what_a_mask_hides_is_hidden_from_products_and_from_the_function_on_scores():
    cost = with_function(40, 1)
    assert cost.product_flops == HEADS * TOKENS * TOKENS // 4 * 2 * 2 * DEPTH
    assert cost.flops_on_scores == cost.other_flops == HEADS * TOKENS * TOKENS // 4 * 40
    assert cost.executed_flops == cost.product_flops + cost.other_flops
    assert least_seconds(cost, load_hardware("tpu-v5e"), NO_SWITCHES) == cost.flops_on_scores / 6.1e12  # its ALUs


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "mi300x", "tpu-v5e", "cpu-xeon-8480plus"])
def test_a_function_on_scores_adds_a_fourth_where_a_fourth_is_visible(device):
    """To the time, and to the energy."""
    hardware = load_hardware(device)

    def added(of: Callable[[Cost], float], blocks: int) -> float:
        return of(with_function(60, blocks)) - of(with_function(40, blocks))

    for of in (
        lambda cost: KernelPrices(hardware, NO_SWITCHES)(cost, 0.0, 1.0).busy.compute_seconds,
        lambda cost: energy(cost, hardware, NO_SWITCHES).arithmetic,
    ):
        assert added(of, 1) == pytest.approx(added(of, 4) / 4, rel=0.01)
