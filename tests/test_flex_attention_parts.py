"""What the kernels of flex_attention read and write, by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_flex_attention import compiled, flex_costs, metered, qkv
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

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
