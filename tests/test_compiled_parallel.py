"""torch.compile of programs whose graphs hold collectives: they go through torch's compiler, collectives and all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flopmeter

RANKS, ROWS, WIDTH, BF16 = 4, 256, 512, 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def steady_step() -> flopmeter.Report:
    """Sequence parallelism around two products, compiled."""
    with flopmeter.cuda("h100-sxm5-80gb", gpus=RANKS, steps=3) as device:
        mesh = init_device_mesh("cuda", (RANKS,))
        model = Mlp().cuda().bfloat16()
        parallelize_module(
            model,
            mesh,
            {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))},
        )
        compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            x = torch.randn(ROWS // RANKS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            compiled(x).sum().backward()
            optimizer.step()
    return device.report().step


@pytest.fixture(scope="module")
def step() -> flopmeter.Report:
    return steady_step()


def test_a_tensor_parallel_layer_goes_through_torchs_compiler(step: flopmeter.Report) -> None:
    assert not [note for note in step.notes if note.startswith("not compiled")]
    assert [note for note in step.notes if note.startswith("compiled: graphs, kernels")]


def test_its_graphs_gather_and_scatter_what_the_layer_does(step: flopmeter.Report) -> None:
    """Forward gathers the rows for the first product and scatters the sums of the second one. Backward gathers their
    gradient, gathers the rows again for the weight's gradient unless they were kept, and scatters that of the rows."""
    found = Counter((each.kind, each.nbytes) for kernel in step.kernels if (each := kernel.cost.collective))
    whole = ROWS * WIDTH * BF16
    assert found["reduce_scatter", whole] == 2
    assert found["all_gather", whole] in (2, 3)
    assert sum(found.values()) == found["reduce_scatter", whole] + found["all_gather", whole]
    assert step.macs == 3 * 2 * ROWS * WIDTH * 4 * WIDTH // RANKS


def test_async_tensor_parallelism_of_a_graph_counts_every_product_and_says_that_none_overlaps(
    step: flopmeter.Report,
) -> None:
    with config.patch(_micro_pipeline_tp=True):
        pipelined = steady_step()
    assert (pipelined.macs, pipelined.bytes_read) == (step.macs, step.bytes_read)
    assert [note for note in pipelined.notes if note.startswith("_micro_pipeline_tp:")]
