"""Kernels that walk dense memory, and products of cuBLAS: torch copies operands that lie otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import costs_in, meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from flopmeter import FlopMeter
from flopmeter.records import ATTENTION, MOVEMENT, NORMALIZATION

aten = torch.ops.aten

PROGRAMS = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 4),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of another dimension": lambda x: torch.softmax(x, 1),
    "log softmax": lambda x: torch.log_softmax(x, -1),
}
ORDERS = {
    "dense": lambda x: x,
    "permuted": lambda x: x.transpose(1, 2),
    "sliced": lambda x: x[..., :32],
    "repeated": lambda x: x[:1].expand(8, -1, -1),
    "one row of each, turned": lambda x: x[:, :1].expand(-1, 4, -1).reshape(8, 4, 64, 1).transpose(2, 3)[:, :, 0],
}


def copies_by_torchs_profiler(program, x):
    with profile() as profiler:
        program(x)
    return sum(event.name == "aten::clone" for event in profiler.events())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_many_copies_as_torch_makes(program, order):
    costs = costs_in(lambda: PROGRAMS[program](ORDERS[order](meta(8, 64, 64))))
    made = copies_by_torchs_profiler(PROGRAMS[program], ORDERS[order](torch.ones(8, 64, 64)))
    assert sum(cost.op_class == MOVEMENT for cost in costs) == made
    assert sum(cost.op_class == NORMALIZATION for cost in costs) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("program", [torch.sum, torch.nansum, torch.prod, lambda x: x.cumsum(-1)])
def test_a_sum_casts_its_input_as_often_as_torch_does(program, dtype):
    costs = costs_in(lambda: program(meta(64, 64).to(dtype)))[0 if dtype is torch.float32 else 1 :]
    with profile() as profiler:
        program(torch.ones(64, 64, dtype=dtype))
    casts = sum(event.name == "aten::_to_copy" for event in profiler.events())
    assert sum(cost.op_class == MOVEMENT for cost in costs) == casts


def test_counting_a_mask_writes_it_in_eight_bytes_an_element_and_reads_that():
    mask = torch.empty(1000, 64, dtype=torch.bool, device="meta")
    cast, added = costs_in(lambda: mask.sum())
    assert (cast.bytes_read, cast.bytes_written) == (64000, 8 * 64000)
    assert (added.bytes_read, added.bytes_written) == (8 * 64000, 8)
    assert cast.work.index_operations == 40 * 64000


def test_sixteen_bits_are_summed_in_fp32_without_a_cast():
    half = torch.empty(1000, 64, dtype=torch.bfloat16, device="meta")
    assert len(costs_in(lambda: half.sum(dtype=torch.float32))) == 1
    assert len(costs_in(lambda: half.sum(dtype=torch.float64))) == 2


def test_a_permuted_row_is_copied_and_then_normalized_as_a_dense_one():
    dense = costs_in(lambda: F.layer_norm(meta(2, 196, 768), (768,)))
    copy, norm = costs_in(lambda: F.layer_norm(meta(2, 768, 196).transpose(1, 2), (768,)))
    assert (copy.flops, copy.bytes_read, copy.bytes_written) == (0, 4 * 2 * 196 * 768, 4 * 2 * 196 * 768)
    assert [(each.flops, each.bytes, each.work) for each in dense] == [(norm.flops, norm.bytes, norm.work)]


def test_a_permuted_gradient_is_copied_in_the_backward_pass():
    def step():
        x = meta(4, 32, 16).requires_grad_()
        return F.layer_norm(x, (16,)).transpose(1, 2).mul(meta(4, 16, 32)).sum().backward()

    names = [cost.op_class for cost in costs_in(step) if cost.name == "native_layer_norm_backward"]
    assert names == [MOVEMENT, NORMALIZATION]


def test_code_of_a_compiler_reads_a_permuted_row_where_it_lies():
    x = meta(2, 768, 196)
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.layer_norm(x.transpose(1, 2), (768,)).add(1)
    (kernel,) = meter.report(mode="compiled").kernels
    assert (kernel.cost.bytes_read, kernel.cost.bytes_written) == (x.nbytes, x.nbytes)


def test_a_cumulative_sum_of_a_transposed_matrix_copies_it():
    copy, scan = costs_in(lambda: meta(64, 32).t().cumsum(-1))
    assert (copy.op_class, copy.bytes_written) == (MOVEMENT, 4 * 64 * 32)
    assert scan.bytes_read == 4 * 64 * 32


# --- what cuBLAS takes

MATRICES = {
    "rows": lambda x: x[:8, :16],
    "columns": lambda x: x[:16, :8].t(),
    "every other row": lambda x: x[:16:2, :16],
    "every other column": lambda x: x[:8, :32:2],
    "a row repeated": lambda x: x[:1, :16].expand(8, 16),
    "a number repeated": lambda x: x[:1, :1].expand(8, 16),
    "rows that overlap": lambda x: x.as_strided((8, 16), (4, 1)),
    "columns that overlap": lambda x: x.as_strided((8, 16), (1, 4)),
    "one row": lambda x: x[:1, :16],
    "every other number of a row": lambda x: x[:1, :32:2],
    "one column": lambda x: x[:8, :1],
    "every other number of a column": lambda x: x[:16:2, :1],
}


@pytest.mark.parametrize("layout", MATRICES)
def test_a_product_copies_the_matrices_that_torch_copies_before_it_calls_blas(layout):
    """torch's CPU kernel calls a BLAS with the same demands."""

    def program(x):
        a = MATRICES[layout](x)
        return a @ x[: a.shape[1]], x[:, : a.shape[0]] @ a

    costs = costs_in(lambda: program(meta(64, 64)))
    assert sum(cost.op_class == MOVEMENT for cost in costs) == copies_by_torchs_profiler(program, torch.ones(64, 64))


def test_every_other_column_is_read_and_written_once_before_the_product():
    """[8, 16] of 4 bytes, whose neighbours in memory are not read; then the copy, [16, 32] and [8, 32]."""
    copy, product = costs_in(lambda: meta(8, 32)[:, ::2] @ meta(16, 32))
    assert (copy.bytes_read, copy.bytes_written, copy.access) == (512, 512, "strided")
    assert (product.bytes_read, product.bytes_written) == (512 + 2048, 1024)


def test_heads_of_one_tensor_are_multiplied_where_they_lie_and_their_elements_are_not():
    """The leading dimension of a batch may be that of all heads; a stride of 2 within both dimensions is none."""
    heads = costs_in(lambda: torch.bmm(meta(8, 4, 16).transpose(0, 1), meta(4, 16, 8)))
    shared = costs_in(lambda: torch.bmm(meta(1, 8, 16).expand(4, 8, 16), meta(4, 16, 8)))
    assert [len(heads), len(shared)] == [1, 1]
    copy, product = costs_in(lambda: torch.bmm(meta(4, 8, 16, 2)[..., 0], meta(4, 16, 8)))
    assert (copy.bytes_read, copy.bytes_written) == (2048, 2048)
    assert product.bytes == 2048 + 2048 + 1024


def test_the_gradient_of_a_sum_becomes_a_matrix_for_each_of_the_two_products():
    """One number over [8, 32], from which both products of the backward pass read 1,024 bytes."""
    x, weight = meta(8, 16).requires_grad_(), meta(16, 32).requires_grad_()
    copies = [cost for cost in costs_in(lambda: (x @ weight).sum().backward()) if cost.op_class == MOVEMENT]
    assert [(cost.bytes_read, cost.bytes_written) for cost in copies if cost.name == "mm"] == [(4, 1024)] * 2


def test_two_operands_that_both_repeat_a_number_are_both_matrices_to_the_product():
    """[8, 16] and [16, 32] of four bytes are written, and read by the product."""
    first, second, product = costs_in(lambda: meta(1, 1).expand(8, 16) @ meta(1, 1).expand(16, 32))
    assert [(copy.bytes_read, copy.bytes_written) for copy in (first, second)] == [(4, 512), (4, 2048)]
    assert product.bytes_read == 512 + 2048


def linear(rows, depth, columns):
    return F.linear(meta(rows, depth), meta(columns, depth), meta(columns))


@pytest.mark.parametrize(
    ("program", "copied"),
    [
        (lambda: linear(8, 16, 32), None),
        (lambda: linear(1, 16, 32), (128, 128)),
        (lambda: linear(8, 16, 1), (4, 32)),
        (lambda: torch.addmm(meta(32), meta(8, 16), meta(16, 32), beta=0.5), (128, 1024)),
        (lambda: torch.addmm(meta(1, 32), meta(8, 16), meta(16, 32)), (128, 1024)),
        (lambda: meta(8, 32).addmm_(meta(8, 16), meta(16, 32)), None),
        (lambda: torch.baddbmm(meta(4, 1, 32), meta(4, 8, 16), meta(4, 16, 32)), (512, 4096)),
        (lambda: torch.baddbmm(meta(4, 1, 32), meta(4, 8, 16), meta(4, 16, 32), beta=0), None),
        (lambda: torch.addmv(meta(8), meta(8, 16), meta(16)), (32, 32)),
    ],
    ids=["bias", "one row", "one column", "half", "row", "in place", "batches", "of nothing", "vector"],
)
def test_what_is_added_is_copied_into_the_result_first_unless_it_is_a_bias_or_the_result(program, copied):
    """A bias is added by the product's own kernel if both matrices have more than one row and column
    (`isInputCompliesAddmmCudaLt` in aten/src/ATen/native/cuda/Blas.cpp); what was copied is read as the result."""
    *copies, product = costs_in(program)
    assert [(cost.bytes_read, cost.bytes_written) for cost in copies] == [copied][: copied is not None]
    if copied is not None:
        assert product.bytes_read >= copied[1]


def test_a_matrix_that_is_added_is_copied_before_torch_2_15(monkeypatch):
    """[8, 32] read and written; torch 2.15 hands it to cuBLAS as it lies."""
    for version, kernels in (((2, 13), 2), ((2, 15), 1)):
        monkeypatch.setattr("flopmeter.costs.contractions.matmul.running_version", lambda version=version: version)
        costs = costs_in(lambda: torch.addmm(meta(8, 32), meta(8, 16), meta(16, 32)))
        assert len(costs) == kernels
        assert costs[-1].bytes_read == 4 * (8 * 32 + 8 * 16 + 16 * 32)


def test_a_compiled_product_has_its_copies_too():
    with FlopMeter("a100-sxm4-80gb") as meter:
        torch.relu(meta(8, 32).mul(2)[:, ::2] @ meta(16, 32))
    names = [kernel.cost.name for kernel in meter.report(mode="compiled").kernels]
    assert names == ["mul", "mm", "mm", "relu"]


# --- what attention takes


@pytest.mark.parametrize(
    ("backend", "by_heads", "of_a_sum"),
    [(SDPBackend.FLASH_ATTENTION, 1, 1), (SDPBackend.EFFICIENT_ATTENTION, 1, 1), (SDPBackend.CUDNN_ATTENTION, 0, 1)],
)
def test_attention_copies_a_gradient_whose_tokens_do_not_lie_whole(backend, by_heads, of_a_sum):
    """FlashAttention and the memory-efficient kernels take a gradient [B, S, H, D] in one piece, cuDNN one with dense
    rows (aten/src/ATen/native/transformers/cuda/attention_backward.cu)."""

    def copies(gradient):
        q, k, v = (meta(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
        with sdpa_kernel(backend), FlopMeter("h100-sxm5-80gb") as meter:
            F.scaled_dot_product_attention(q, k, v).backward(gradient)
        costs = [kernel.cost for kernel in meter.report().kernels if kernel.cost.name.endswith("_backward")]
        assert all(cost.bytes_written == 2 * 2 * 128 * 4 * 64 for cost in costs[:-1])
        return len(costs) - 1

    assert copies(meta(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2)) == 0
    assert copies(meta(2, 4, 128, 64, dtype=torch.bfloat16)) == by_heads
    assert copies(meta(1, 1, 1, 1, dtype=torch.bfloat16).expand(2, 4, 128, 64)) == of_a_sum


def test_flash_attention_copies_a_result_that_lies_by_heads_too():
    """As torch 2.11 did on an H100: two copies before the kernels of the gradients."""
    by_heads = [meta(2, 16, 512, 64, dtype=torch.bfloat16) for _ in range(5)]
    lse, state = meta(2, 16, 512), meta(2, dtype=torch.uint64)

    def backward():
        aten._scaled_dot_product_flash_attention_backward(*by_heads, lse, None, None, 512, 512, 0.0, True, state, state)

    assert [cost.op_class for cost in costs_in(backward)] == [MOVEMENT, MOVEMENT, ATTENTION]
