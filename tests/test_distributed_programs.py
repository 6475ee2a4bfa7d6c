"""The collectives of real programs: against closed forms, and against what real processes exchange over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_programs import BATCH, CLASSES, HIDDEN, LAYERS, LENGTH, MESHES, PROGRAMS, WIDTH, mesh_shape, run
from gloo import printed_by_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.distributed import world
from flopmeter.models.llama import Llama, LlamaConfig
from flopmeter.records import Collective, MatmulWork

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("distributed_programs.py")
STEPS = 2  # that run() makes

# By hand, in elements: a block has four [width, width] products, two of [width, hidden], and two norms of two vectors.
BLOCK = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN + 2 * 2 * WIDTH
HEAD = CLASSES * WIDTH + CLASSES
ACTIVATION = BATCH * LENGTH * WIDTH
FP32, BF16 = 4, 2


def metered(program: str, size: int, rank: int = 0) -> FlopMeter:
    """Two steps of the program on meta, as that rank of so many."""
    meter = FlopMeter("h100-sxm5-80gb")
    with world(size, mesh_shape(program, size), rank) as mesh:
        run(program, mesh, "meta", meter)
    return meter


def collectives(meter: FlopMeter) -> list[Collective]:
    return [kernel.cost.collective for kernel in kernels_of(meter.trace) if kernel.cost.collective is not None]


def sizes(meter: FlopMeter, kind: str) -> list[int]:
    return [each.nbytes for each in collectives(meter) if each.kind == kind]


def test_ddp_reduces_every_gradient_once_a_step():
    whole = (LAYERS * BLOCK + HEAD) * FP32
    buckets = sizes(metered("ddp", 8), "all_reduce")
    assert buckets[0] == whole  # the first step has one bucket; its order of gradients makes the others
    assert len(buckets) > 3
    assert sum(buckets[1:]) == whole


def test_fsdp_gathers_blocks_twice_and_the_root_once_a_step_and_scatters_each_gradient_once():
    meter = metered("fsdp", 4)
    assert sorted(sizes(meter, "all_gather")) == sorted(STEPS * (2 * LAYERS * [BLOCK * BF16] + [HEAD * BF16]))
    assert sorted(sizes(meter, "reduce_scatter")) == sorted(STEPS * (LAYERS * [BLOCK * FP32] + [HEAD * FP32]))
    assert {each.ranks for each in collectives(meter)} == {(0, 1, 2, 3)}


def test_fsdp_pads_what_its_ranks_do_not_divide():
    padded = 16 * WIDTH + 16  # 12 classes on 8 ranks: two rows a rank
    assert CLASSES == 12
    meter = metered("fsdp", 8)
    assert min(sizes(meter, "all_gather")) == padded * BF16
    assert min(sizes(meter, "reduce_scatter")) == padded * FP32


def test_megatrons_tensor_parallelism_sums_activations_twice_a_block_and_pass():
    meter = metered("tp", 4)
    assert sizes(meter, "all_reduce") == STEPS * LAYERS * 2 * 2 * [ACTIVATION * FP32]
    assert len(collectives(meter)) == STEPS * LAYERS * 4


def test_sequence_parallelism_splits_each_of_these_sums_in_two():
    """An all-reduce becomes a reduce-scatter and an all-gather; the norms' gradients, of parts, are summed.

    The head gathers what the last block left in parts, and scatters its gradient; the first block's input needs none.
    """
    meter = metered("sp", 4)
    gathered, scattered = sizes(meter, "all_gather"), sizes(meter, "reduce_scatter")
    assert set(gathered) == set(scattered) == {ACTIVATION * FP32}
    assert len(gathered) == len(scattered) == STEPS * (LAYERS * 4 + 1)
    assert sizes(meter, "all_reduce") == STEPS * LAYERS * 4 * [WIDTH * FP32]


def test_two_dimensions_do_both_each_among_its_own_ranks():
    """Rank 5 of 4 x 2: the mesh is [[0, 1], [2, 3], [4, 5], [6, 7]]."""
    meter = metered("fsdp x tp", 8, rank=5)
    by_ranks = {each.ranks: each.kind for each in collectives(meter)}
    assert set(by_ranks) == {(4, 5), (1, 3, 5, 7)}
    assert by_ranks[4, 5] == "all_reduce"
    sums = sizes(meter, "all_reduce")
    assert sums == STEPS * LAYERS * 4 * [ACTIVATION * BF16]  # mixed precision: activations are bf16
    split = (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) // 2 + 2 * 2 * WIDTH  # products are halved, norms are not
    assert sizes(meter, "all_gather").count(split * BF16) == STEPS * 2 * LAYERS
    assert sizes(meter, "reduce_scatter").count(split * FP32) == STEPS * LAYERS


def over_gloo(size: int, programs: list[str], folder: Path) -> dict[str, list[tuple[str, int]]]:
    """What processes of their own exchange: every rank the same."""
    first, *others = printed_by_ranks(SCRIPT, size, folder, *programs)
    assert all(other == first for other in others)
    return {name: [tuple(each) for each in found] for name, found in first.items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_collectives_are_those_that_real_processes_issue(size, tmp_path):
    """One by one and in the same order. On 4 ranks two dimensions are 2 x 2; on 2 ranks they would be 1 x 2."""
    programs = [name for name in PROGRAMS if len(MESHES[name]) == 1 or size > 2]
    for name, found in over_gloo(size, programs, tmp_path).items():
        assert [(each.kind, each.nbytes) for each in collectives(metered(name, size))] == found, name


def test_ops_are_counted_at_local_shapes_and_once():
    """Four ranks of tensor parallelism do a quarter of the products each, and all of the head, which is not split."""
    products = sum(
        kernel.cost.macs for kernel in kernels_of(metered("tp", 1).trace) if isinstance(kernel.cost.work, MatmulWork)
    )
    head = 3 * STEPS * BATCH * LENGTH * WIDTH * CLASSES
    split = sum(
        kernel.cost.macs for kernel in kernels_of(metered("tp", 4).trace) if isinstance(kernel.cost.work, MatmulWork)
    )
    assert split - head == pytest.approx((products - head) / 4)


def test_no_op_of_the_programs_is_uncounted():
    for program in PROGRAMS:
        assert metered(program, 4).report().uncounted == [], program


LLAMA = LlamaConfig(2, 512, heads=8, kv_heads=4, hidden=1024, vocabulary=512)
TENSOR_PARALLEL = {
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def attention_calls(model: Llama) -> list[tuple[str, tuple[int, ...]]]:
    """The fused attention ops of a step of the model in bf16, with the shape of their queries."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        model.loss(torch.empty(2, 256, dtype=torch.long, device="meta")).backward()
    ops = [op for op in meter.trace.ops if "attention" in op.call.name]
    return [(op.call.name, op.call.inputs["backward" in op.call.name].shape) for op in ops]


def test_a_sharded_llama_block_runs_the_attention_of_a_single_gpu_on_its_heads():
    with torch.device("meta"):
        alone, sharded = Llama(LLAMA).bfloat16(), Llama(LLAMA)
    with world(4, {"dp": 2, "tp": 2}) as mesh:
        for block in sharded.blocks:
            parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
            block.attention.heads //= 2
            block.attention.kv_heads //= 2
            fully_shard(block, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(sharded, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        found = attention_calls(sharded)
    assert {name for name, _ in found} == {
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    }
    assert {shape for _, shape in found} == {(2, 4, 256, 64)}
    assert [(name, (batch, heads // 2, *rest)) for name, (batch, heads, *rest) in attention_calls(alone)] == [
        (name, tuple(shape)) for name, shape in found
    ]
