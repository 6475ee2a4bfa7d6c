"""Where one of several stands for all of them in nearly every call, or an error is caught: the calls that tell."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, costs_in, meta
from torch import Tensor

from flopmeter import DataDependentError, FlopMeter, on_meta
from flopmeter.as_cuda.target import CudaTarget
from flopmeter.costs import costs_of
from flopmeter.known_values.assumptions import Assumptions
from flopmeter.launch.fusion.grouping import _last_of_graph
from flopmeter.records import MOVEMENT
from flopmeter.timing.allocator import CachingAllocator
from flopmeter.torch_names.own_operators import own
from flopmeter.trace.mixed_devices import MixedDevicesError
from flopmeter.trace.ttir import body_of, parse

H100 = "h100-sxm5-80gb"
aten = torch.ops.aten


@dataclass
class Pair:
    ids: Tensor
    mask: Tensor


def test_every_tensor_of_a_dataclass_goes_to_meta():
    twin = on_meta(Pair(torch.arange(3), torch.ones(3)))
    assert twin.ids.is_meta
    assert twin.mask.is_meta


def test_a_mask_picks_in_any_of_the_dimensions():
    with FlopMeter(H100):
        mask = torch.tensor([True, False, True, True]).to("meta")
        assert meta(5, 4, 2)[:, mask].shape == (5, 3, 2)
        assert meta(5, 4, 2)[torch.tensor([1]).to("meta"), mask].shape == (3, 2)


@pytest.mark.parametrize("minor", [-1, 10])
def test_a_capability_whose_second_number_has_no_digit_is_refused(minor):
    with pytest.raises(ValueError, match="none that PyTorch runs on"):
        CudaTarget((9, minor))


def test_group_norm_copies_matrices_whose_columns_are_dense():
    """A product would take them as they are."""
    costs = costs_in(lambda: F.group_norm(meta(2, 4, 8, 16).transpose(2, 3), 2))
    assert sum(cost.op_class == MOVEMENT for cost in costs) == 1


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="2.15 lets one head of values serve all")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_with_one_head_for_all_queries_take_no_fused_kernel(dtype):
    q, v = meta(1, 4, 256, 64, dtype=dtype), meta(1, 1, 256, 64, dtype=dtype)
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.scaled_dot_product_attention(q, q, v)
    assert not any("attention" in op.call.name for op in meter.trace.ops)


def test_a_tensor_of_numbers_of_which_one_is_unknown_is_unknown():
    with FlopMeter(H100):
        made = torch.tensor([meta(4).sum(), 2.0], device="meta")
        with pytest.raises(DataDependentError):
            made.tolist()


def test_known_numbers_beside_a_tensor_that_was_left_on_the_cpu_are_one_error():
    with pytest.raises(MixedDevicesError, match=r"mixes"), FlopMeter(H100):
        torch.arange(4, device="meta") + torch.ones(4)


def test_a_source_that_was_edited_while_the_program_runs_tells_no_numbers():
    """Where the subscript stood there is half of a call now: the numbers stay unknown, and the program runs."""
    name, program = "edited.py", "picked = x[[2, 3]]\n"
    linecache.cache[name] = (len(program), None, ["picked = f((1, 2\n"], name)
    with FlopMeter(H100):
        names = {"x": torch.arange(5, device="meta")}
        exec(compile(program, name, "exec"), names)
        assert names["picked"].shape == (2,)
        with pytest.raises(DataDependentError):
            names["picked"].tolist()


TWO_PRODUCTS = """
module {{
  tt.func public @both(%arg0: !tt.ptr<f16>) attributes {{noinline = false}} {{
    %1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<{first}> * tensor<{first}> -> tensor<32x32xf32>
    %2 = tt.dot %d, %e, %f, inputPrecision = tf32 : tensor<{second}> * tensor<{second}> -> tensor<64x64xf32>
    tt.store %p, %2 : tensor<64x64x!tt.ptr<f32>>
    tt.return
  }}
}}
"""


@pytest.mark.parametrize(
    ("first", "second", "dtype"), [("32x32xf32", "64x64xf16", "fp16"), ("32x32xf16", "64x64xf32", "tf32")]
)
def test_a_triton_kernel_multiplies_in_the_type_of_most_of_its_work(first, second, dtype):
    body = body_of("both", parse(TWO_PRODUCTS.format(first=first, second=second)), (1,), (None,))
    (cost,) = costs_of(replace(call_by_hand(own.triton_kernel.default, (meta(64, 64),), ()), body=body))
    assert cost.dtype == dtype


def test_a_sort_whose_places_nobody_reads_writes_them_all_the_same():
    """Few long rows are sorted together and look up values and places at last (Sort.cu), whatever a graph keeps."""

    def last_of(program):
        with FlopMeter(H100) as meter:
            program(meta(4, 100_000))
        return meter.report(mode="compiled").kernels[-1].cost

    values_and_places = 4 * 100_000 * (4 + 8)
    assert last_of(torch.sort).bytes_written == values_and_places
    assert last_of(torch.compile(lambda x: torch.sort(x).values)).bytes_written == values_and_places


def test_a_mask_picks_no_negative_share():
    with pytest.raises(ValueError, match=r"a number from 0 to 1, not -0\.5"):
        FlopMeter(H100, mask_fraction=-0.5)


def test_a_step_is_told_what_was_assumed_in_it_and_not_later():
    ops = [0]
    assumptions = Assumptions("balanced", None, None, None, lambda: ops[0])
    for ops[0] in (2, 7, 9):
        assumptions.note("a stand-in", "aten._local_scalar_dense.default")
    assert [use.count for use in assumptions.uses_in(range(5))] == [1]
    assert [use.count for use in assumptions.uses_in(range(5, 9))] == [2]


def test_cudnn_normalizes_batches_of_fewer_elements_than_32_bits_count():
    """`select_batch_norm_backend` in Normalization.cpp: larger ones take torch's own kernel."""

    def kernel(elements):
        x, weights = meta(1, 2, elements // 2, dtype=torch.float16), [meta(2, dtype=torch.float32) for _ in range(4)]
        with FlopMeter(H100) as meter:
            F.batch_norm(x, *weights, training=True)
        return next(op.call.name for op in meter.trace.ops if "batch_norm" in op.call.name)

    assert kernel(2**31 - 2) == "cudnn_batch_norm"
    assert kernel(2**31) == "native_batch_norm"


@pytest.mark.parametrize("size", [32, 33])
def test_matrices_of_up_to_32_rows_are_factored_together_and_larger_ones_in_turn(size):
    """cuSOLVER's gesvdjBatched takes no larger ones (its documentation)."""
    together, *_ = costs_in(lambda: torch.linalg.svd(meta(64, size, size)))
    alone, *_ = costs_in(lambda: torch.linalg.svd(meta(1, size, size)))
    assert (together.work.kernels < 2 * alone.work.kernels) == (size == 32)


def test_kernels_of_a_graph_wait_for_its_last_and_eager_ones_for_themselves():
    assert _last_of_graph([1, 1, 1, None, None, 2, 2]) == [2, 2, 2, 3, 4, 6, 6]


def test_the_allocator_gives_back_what_is_free_of_small_blocks_and_of_large_ones():
    allocator = CachingAllocator()
    for block in [allocator.allocate(nbytes) for nbytes in (1000, 30_000_000)]:
        allocator.free(block)
    assert allocator.reserved_bytes >= 32_000_000
    allocator.give_back()
    assert allocator.reserved_bytes == 0
