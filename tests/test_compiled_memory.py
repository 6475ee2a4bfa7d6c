"""What compiled graphs keep for the backward pass, against torch's MemTracker around the same graphs on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_programs import programs
from test_compiled_programs import metered
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter
from flopmeter.models.vision import ResNet
from flopmeter.torch_names.dispatcher import running_version


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Perceptron(nn.Sequential):
    def __init__(self, width: int = 64) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))


Model = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""What makes it, and the shape of its input."""

MODELS: dict[str, Model] = {
    "gelu": (lambda: nn.Sequential(Perceptron(), Perceptron()), (512, 64)),
    "attention": (lambda: nn.Sequential(Block(), Block()), (4, 64, 64)),
    "resnet": (lambda: ResNet((1, 1), 16), (2, 3, 32, 32)),
}


def kept_on_cpu(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> int:
    """Bytes that are alive after the forward graph, less its arguments, its result and the buffers that it updates."""
    kept: list[int] = []

    def forward(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            tracker = MemTracker()
            tracker.track_external(*(each for each in args if isinstance(each, Tensor)))
            with tracker:
                results = graph(*args)
                total = sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("current").values())
            kept.append(total - storages(args))
            return results

        return run

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    model = make()
    out = torch.compile(model, backend=backend)(torch.randn(shape, requires_grad=True))
    return kept[0] - storages((out,)) - storages(model.buffers())


def storages(tensors: Any) -> int:
    held = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if isinstance(each, Tensor)
    }
    return sum(held.values())


def kept_by_flopmeter(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> int:
    """Without the filters and images that inductor also keeps in channels-last, which no graph shows."""
    with torch.device("meta"):
        model, x = make(), torch.randn(shape, requires_grad=True)
    with FlopMeter("h100-sxm5-80gb") as meter, inductor.patch(layout_optimization=False):
        torch.compile(model)(x).sum().backward()
    forward, _ = meter.report().graphs
    return forward.saved_bytes


@pytest.mark.parametrize("name", MODELS)
def test_as_many_bytes_are_kept_as_torch_s_tracker_sees(name: str) -> None:
    assert kept_by_flopmeter(*MODELS[name]) == pytest.approx(kept_on_cpu(*MODELS[name]), rel=0.03)


def test_an_encoder_layer_keeps_what_it_keeps_on_the_cpu_if_its_attention_is_written_out() -> None:
    """Flash attention on the CPU lays its result out like the queries, so that the copy before the next product is a
    view. The kernels of CUDA have a layout of their own: there the copy is kept too (9 %), with two numbers of 8 bytes
    that say where the random numbers of dropout begin."""
    layer: Model = (lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), (4, 64, 64))
    with sdpa_kernel(SDPBackend.MATH):
        kept, on_cpu = kept_by_flopmeter(*layer), kept_on_cpu(*layer)
    copy = 4 * 64 * 64 * 4
    if running_version() < (2, 12):  # its inductor copies the values out of the result of the projection, of q, k and v
        on_cpu -= 2 * copy
    assert kept == on_cpu
    assert kept_by_flopmeter(*layer) == kept_on_cpu(*layer) + copy + 2 * 8


def test_the_memory_budget_is_kept_to() -> None:
    """With a share of .5 the partitioner computes more again, about as on the CPU: what it gives up depends on its
    estimate of each op's time, and attention is another op there."""
    whole = kept_by_flopmeter(*MODELS["attention"])
    with config.patch(activation_memory_budget=0.5):
        kept, expected = kept_by_flopmeter(*MODELS["attention"]), kept_on_cpu(*MODELS["attention"])
    assert kept < 0.7 * whole
    assert kept == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "focal", "rotary", "dropout", "adamw", "top-k"])
def test_by_rules_a_program_holds_what_it_holds_by_the_compiler(name: str) -> None:
    (program,) = (each for each in programs() if each.name.startswith(f"{name}-"))
    meter, ops = metered(program)
    expected = meter.report(ops=ops).peak_memory_bytes
    meter, ops = metered(program, compile="rules")
    assert meter.report(mode="compiled", ops=ops).peak_memory_bytes == pytest.approx(expected, rel=0.002)


def metered_by_hand(program: Callable[[], object]) -> FlopMeter:
    with FlopMeter("a100-sxm4-80gb") as meter:
        program()
    return meter


def test_what_one_kernel_makes_for_itself_takes_no_memory_once_it_is_fused() -> None:
    x = torch.empty(1024, 1024, device="meta")
    meter = metered_by_hand(lambda: torch.exp(torch.sin(torch.cos(x) * 2) + 1))
    assert meter.report().peak_memory_bytes == 3 * x.nbytes  # an op's input and result, beside x
    assert meter.report(mode="compiled").peak_memory_bytes == 2 * x.nbytes


def test_activations_that_backward_computes_again_are_given_back_by_forward() -> None:
    x, weight = torch.empty(4096, 256, device="meta"), torch.empty(256, 1024, device="meta", requires_grad=True)
    meter = metered_by_hand(lambda: torch.sin(torch.cos(x @ weight)).sum().backward())
    made = 4096 * 1024 * 4
    eager, fused = (max(meter.report(mode=mode).memory.timeline["activations"]) for mode in ("eager", "compiled"))
    assert eager == pytest.approx(2 * made, rel=1e-3)  # the inputs of cos and sin
    assert fused == pytest.approx(made, rel=1e-3)  # the product, of which both follow


def test_of_logits_that_a_product_made_the_logits_are_kept() -> None:
    """A loss in fp32 of logits in bf16: eager PyTorch keeps their log-probabilities, and the partitioner what the
    product has written anyway."""
    x, targets = torch.empty(4096, 256, device="meta", dtype=torch.bfloat16), torch.empty(4096, device="meta").long()
    head = nn.Linear(256, 8192, device="meta", dtype=torch.bfloat16)
    meter = metered_by_hand(lambda: F.cross_entropy(head(x).float(), targets).backward())
    logits = 4096 * 8192 * 2
    eager, fused = (max(meter.report(mode=mode).memory.timeline["activations"]) for mode in ("eager", "compiled"))
    assert eager == pytest.approx(2 * logits, rel=0.01)
    assert fused == pytest.approx(logits, rel=0.01)


SQUARE = 1024 * 1024 * 4  # bytes of a matrix below


def squares(count: int, *, requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(1024, 1024, device="meta", requires_grad=requires_grad) for _ in range(count)]


def peak_of(function: Callable[..., Tensor], *given: Tensor) -> int:
    """Bytes, in matrices of 1024 x 1024."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        result = torch.compile(function)(*given)
        if result.requires_grad:
            result.sum().backward()
    return round(meter.report().peak_memory_bytes / SQUARE)


def test_a_result_takes_the_memory_of_what_its_kernel_reads_for_the_last_time() -> None:
    """Two factors, and a product that relu overwrites."""
    assert peak_of(lambda x, y: torch.relu(x @ y), *squares(2)) == 3


def test_what_is_read_again_later_keeps_its_memory() -> None:
    """Two factors, their product, its relu, and then, beside these, the sum."""
    assert peak_of(lambda x, y: (p := x @ y) @ torch.relu(p), *squares(2)) == 5


def test_what_stays_in_the_registers_of_a_kernel_takes_no_memory() -> None:
    """The sum of both, which softmax reads twice, is never written."""
    assert peak_of(lambda x, y: torch.softmax(x + y, -1), *squares(2)) == 3


def test_a_gradient_takes_the_memory_of_what_was_kept_for_it() -> None:
    """The result, the gradient that arrives, and the product of narrow factors, which its own gradient overwrites."""
    narrow = [torch.randn(1024, 8, device="meta", requires_grad=True) for _ in range(2)]
    assert peak_of(lambda x, y: nn.functional.gelu(x @ y.t()), *narrow) == 3


@torch.library.custom_op("flopmeter_tests::double_into", mutates_args=("out",))
def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(2 * x)


@double_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def test_memory_that_a_compiled_graph_allocates_for_an_op_to_write_into_lives_from_then_on() -> None:
    """The first matrix, the round's matrix and its double; then the first, the double and its square."""

    def rounds(x: Tensor) -> Tensor:
        for _ in range(4):
            out = torch.empty_like(x)
            double_into(x, out)
            x = out @ out
        return x

    assert peak_of(rounds, *squares(1)) == 3
