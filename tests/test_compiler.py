"""torch.compile inside a meter: kernels, graphs, breaks and memory are those of torch's own compiler."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Shard
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint
from watched_scheduler import watched_scheduler

from flopmeter import DataDependentError, FlopMeter, Report
from flopmeter.compiler import session
from flopmeter.compiler.composites import composites_differentiate
from flopmeter.costs import UncountedError, kernels_of
from flopmeter.launch.modes import MODES, launches
from flopmeter.records import CONTRACTION
from flopmeter.records.memory_format import is_channels_last
from flopmeter.run.session import ScriptSession, Wishes
from flopmeter.torch_names.private import DispatchKey, has_kernel
from flopmeter.trace.streams import MetaStream, stream


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.view(-1, 8, 16, 16)))).mean((2, 3))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **options)


def step(model: Callable[..., Tensor], *inputs: Tensor) -> None:
    out = model(*inputs)
    out.backward(torch.empty_like(out))


def metered(run: Callable[[], Any], **options: Any) -> tuple[FlopMeter, Report]:
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        run()
    return meter, meter.report()


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (on_meta(Mlp), meta(4, 128, 64)),
    "attention": lambda: (on_meta(lambda: nn.Sequential(Mlp(), Attention())).bfloat16(), meta(4, 128, 64).bfloat16()),
    "dropout": lambda: (on_meta(lambda: nn.Sequential(Mlp(), nn.Dropout(0.1), Mlp())), meta(4, 128, 64)),
    "convolutions": lambda: (on_meta(Convolutions), meta(4, 2048)),
    "softmax": lambda: (on_meta(lambda: nn.Sequential(nn.Linear(64, 5000), nn.Softmax(-1))), meta(512, 64)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_those_of_inductors_scheduler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count, kind, order and bytes, read off the Scheduler itself."""
    expected = watched_scheduler(monkeypatch)
    model, x = PROGRAMS[name]()
    meter, report = metered(lambda: step(torch.compile(model), x))
    found = [[(kernel.kind, kernel.scheduler_bytes) for kernel in graph.kernels] for graph in report.graphs]
    assert not meter.trace.compilation.failures
    assert found == expected
    assert len(found) == 2
    recorded = [op for op in meter.trace.ops if op.graph is not None]
    assert len(recorded) == sum(map(len, expected))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_those_of_the_eager_run(name: str) -> None:
    def facts(tensor: Tensor | None) -> Any:
        assert tensor is not None
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad

    seen = []
    for prepared in (lambda model: model, torch.compile):
        model, x = PROGRAMS[name]()
        with FlopMeter("h100-sxm5-80gb"):
            out = prepared(model)(x)  # type: ignore[operator]
            out.sum().backward()
        seen.append([facts(out), *(facts(parameter.grad) for parameter in model.parameters())])
    assert seen[0] == seen[1]


def test_products_are_counted_alike_and_what_fusion_leaves_moves_fewer_bytes() -> None:
    x = meta(4, 128, 64)
    _, eager = metered(lambda: step(on_meta(Mlp), x))
    _, compiled = metered(lambda: step(torch.compile(on_meta(Mlp)), x))
    products = [{row.name: row.flops for row in report.rows()}[CONTRACTION] for report in (eager, compiled)]
    assert products[0] == products[1]
    assert compiled.bytes_read + compiled.bytes_written < eager.bytes_read + eager.bytes_written
    assert compiled.flops == pytest.approx(eager.flops, rel=0.05)


def test_the_bias_of_a_convolution_is_part_of_the_kernels_around_it() -> None:
    """Inductor calls cuDNN without the bias and adds it where the result is read; its gradient is a sum of inductor's
    own (torch/_inductor/kernel/conv.py and decomposition.py)."""
    x = meta(8, 32, 16, 16).requires_grad_()
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()))
    _, report = metered(lambda: step(torch.compile(model), x))
    kinds = [[kernel.kind for kernel in graph.kernels] for graph in report.graphs]
    assert len(report.kernels) == sum(map(len, kinds)) + 2 - 1  # the gradients of x and weight are one call; empty_like
    elements = 8 * 64 * 16 * 16
    forward, backward = ([k.cost for k in report.kernels if k.op.phase == name] for name in ("forward", "backward"))
    (added,) = [cost for cost in forward if not cost.macs and cost.flops]
    assert (added.flops, added.bytes_read) == (elements, 4 * (elements + 64))
    assert sum(cost.flops for cost in backward if not cost.macs) == elements  # the bias's gradient


def test_each_of_two_convolutions_in_a_row_is_counted() -> None:
    """The second one's call also stems from the first, whose bias is added to its image."""
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.SiLU(), nn.Conv2d(4, 8, 1), nn.Sigmoid()))
    _, report = metered(lambda: torch.compile(model)(meta(2, 8, 1, 1)))
    assert report.macs == 2 * (8 * 4 + 4 * 8)
    assert not report.uncounted


def chosen(x: Tensor, _rows: Tensor) -> Any:
    return torch.cond(x.new_ones((), dtype=torch.bool), lambda x: x @ x, lambda x: x + x, (x,))


def looped(x: Tensor, _rows: Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, (x @ x).sin()), (x.new_zeros(()), x))


def scanned(x: Tensor, rows: Tensor) -> Any:
    weight = x + 1
    return scan(lambda state, row: (torch.tanh(state @ weight + row), state.clone()), x, rows)


@pytest.mark.parametrize("flow", [chosen, looped, scanned])
def test_control_flow_that_stays_in_a_graph_is_listed_as_uncounted(flow: Callable[[Tensor, Tensor], Any]) -> None:
    with torch.no_grad():
        _, report = metered(lambda: torch.compile(flow, fullgraph=True)(meta(64, 64), meta(8, 64, 64)))
    ((name,),) = [graph.uncounted for graph in report.graphs]
    assert name in ("Conditional", "Switch", "WhileLoop")  # Switch: from torch 2.15 on; a scan is made a loop
    assert [row.name for row in report.uncounted] == [name]
    with FlopMeter(strict=True), torch.no_grad(), pytest.raises(UncountedError, match=name):
        torch.compile(flow, fullgraph=True)(meta(64, 64), meta(8, 64, 64))


def test_a_scan_combines_each_element_once() -> None:
    """h = a h + b, step by step: the pair (a, b) of each step is combined with that of the steps before it in two
    products and a sum."""

    def combined(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def program() -> None:
        a, b = (torch.ones(128, 16, device="cuda") for _ in range(2))
        torch.compile(lambda: associative_scan(combined, (a, b), 0)[1], fullgraph=True)()

    session = ScriptSession("h100-sxm5-80gb", Wishes())
    with session.open():
        program()
    report = session.meter.report()
    ((kernel,),) = [graph.kernels for graph in report.graphs]
    assert (kernel.name, kernel.kind, kernel.flops) == ("associative_scan", "triton", 3 * 128 * 16)
    assert not report.uncounted


def test_regions_inside_of_a_compiled_function_are_compiled_with_it() -> None:
    """Their products are those of the layers, forward and twice backward, less the gradient of the input."""

    @torch.compiler.nested_compile_region
    def region(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x).relu()
        return out

    layers = on_meta(lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(3)))
    assert isinstance(layers, nn.ModuleList)

    @torch.compile(fullgraph=True)
    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(layer, x)
        return x

    meter, report = metered(lambda: step(model, meta(8, 64)))
    assert [graph.part for graph in report.graphs] == ["forward", "backward"]
    assert not meter.trace.compilation.failures
    assert report.macs == (3 * 3 - 1) * 8 * 64 * 64
    assert any(note.startswith("nested_compile_region") for note in report.notes)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrices", "batched"])
def test_a_matrix_times_itself_is_counted_as_a_product_each_time(batch: tuple[int, ...]) -> None:
    """A step of Newton and Schulz, as Muon takes it: four products of 16 x 16 matrices."""

    @torch.compile
    def orthogonalized(x: Tensor) -> Tensor:
        squared = x @ x.mT
        return x + (2 * squared + squared @ squared) @ x @ x

    _, report = metered(lambda: orthogonalized(meta(*batch, 16, 16)))
    products = 4 * 2 * 16**3 * (batch[0] if batch else 1)
    assert 2 * report.macs == products


def test_a_thread_that_goes_on_beside_the_program_makes_nothing_compile_again() -> None:
    goes_on = threading.Event()
    with FlopMeter() as meter:
        thread = threading.Thread(target=goes_on.wait)
        thread.start()
        try:
            compiled = torch.compile(torch.sin)
            for _ in range(3):
                compiled(meta(4, 4).cos())
        finally:
            goes_on.set()
            thread.join()
    assert [graph.calls for graph in meter.trace.compilation.graphs] == [3]


def test_cheap_activations_are_computed_again_instead_of_kept() -> None:
    """The gradient of y = exp(cos(sin(x))) is -y sin(sin(x)) cos(x): of the gradient that comes in, y and x, the caller
    holds the last two anyway, so that nothing else is kept."""
    x = meta(1000, 10, requires_grad=True)
    _, report = metered(lambda: step(torch.compile(lambda x: x.sin().cos().exp()), x))
    forward, backward = report.graphs
    assert forward.saved_bytes == 0
    again = {origin.op for kernel in backward.kernels for origin in kernel.origins if origin.is_recomputed}
    assert again == {"sin"}
    assert [(kernel.bytes_read, kernel.bytes_written) for kernel in backward.kernels] == [(120_000, 40_000)]


def test_attention_that_is_checkpointed_runs_again_in_the_backward_graph_as_in_eager_mode() -> None:
    """Twice its two products, and the five of its backward pass; torch counts it as an op with random numbers."""
    model, x = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Attention(), nn.Linear(64, 64))), meta(4, 128, 64)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    _, report = metered(lambda: step(torch.compile(checkpointed), x.bfloat16().requires_grad_()))
    attention = next(row for row in report.rows("class") if row.name == "attention (fused)")
    assert attention.flops == pytest.approx((2 + 2 + 5) * 2 * 4 * 128 * 128 * 64, rel=0.05)
    assert not any(graph.uncounted for graph in report.graphs)


def test_a_copy_to_the_device_inside_of_a_graph_goes_over_the_link() -> None:
    ids = torch.arange(4, device="cpu")
    _, report = metered(lambda: torch.compile(lambda x: x[ids.to(x.device)] * 2)(meta(64, 64)))
    assert [(kernel.cost.link_bytes, kernel.cost.blocks_host) for kernel in report.kernels] == [(32, True), (0, False)]
    assert not report.uncounted


def test_what_a_graph_copies_to_the_host_is_not_known_there() -> None:
    with pytest.raises(DataDependentError), FlopMeter():
        torch.compile(lambda x: (x * 2).cpu())(meta(64, 64))


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm5-80gb"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_attention_that_a_program_writes_out_is_the_kernel_that_cuda_takes_for_it(
    learns: bool, masked: bool, device: str
) -> None:
    """A pattern of inductor's puts scaled_dot_product_attention in its place, which CUDA dispatches."""
    q, k, v = (meta(4, 8, 256, 64, dtype=torch.bfloat16, requires_grad=learns) for _ in range(3))
    mask = meta(4, 8, 256, 256, dtype=torch.bfloat16) if masked else None

    def written_out() -> Tensor:
        scores = q @ k.transpose(-2, -1) / 8.0
        return torch.softmax(scores if mask is None else scores + mask, dim=-1) @ v

    def named() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def attention(run: Callable[[], Tensor]) -> list[str]:
        with torch.set_grad_enabled(learns), FlopMeter(device) as meter:
            run()
        return [kernel.cost.name for kernel in meter.report().kernels if kernel.cost.flops]

    assert attention(torch.compile(written_out)) == attention(named)


def test_what_products_need_is_kept() -> None:
    """Backward needs the input of gelu, for its derivative, and its output, for the gradient of v: 512 x 256 floats."""
    w, v = (meta(*shape, requires_grad=True) for shape in ((64, 256), (256, 32)))
    _, report = metered(lambda: step(torch.compile(lambda x: F.gelu(x @ w) @ v), meta(512, 64)))
    assert report.graphs[0].saved_bytes == 2 * 4 * 512 * 256


def test_a_pointwise_chain_is_one_kernel_that_reads_and_writes_once() -> None:
    _, report = metered(lambda: torch.compile(lambda x: (x.sin() + 1).cos() * x)(meta(1000, 10)))
    ((kernel,),) = [graph.kernels for graph in report.graphs]
    assert (kernel.kind, kernel.bytes_read, kernel.bytes_written, kernel.flops) == ("triton", 40_000, 40_000, 40_000)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device)),
        lambda x: x.var(),
        lambda x: F.selu(x).sum(),
        lambda x: F.prelu(x, x[0, :1]).sum(),
        lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear").sum(),
        lambda x: torch.broadcast_tensors(x, x.new_ones(2, 1, 1))[0].sum(),
    ],
    ids=["cross_entropy", "var", "selu", "prelu", "interpolate", "broadcast_tensors"],
)
def test_gradients_of_composites_reach_what_they_are_made_of(function: Callable[[Tensor], Tensor]) -> None:
    """Torch has Python kernels for these on meta, through which it does not differentiate. The gradient is written."""
    x = meta(64, 96, requires_grad=True)
    _, report = metered(lambda: torch.compile(function)(x).backward())
    _, backward = report.graphs
    assert sum(kernel.bytes_written for kernel in backward.kernels) >= x.nbytes
    assert x.grad is not None


def test_no_composite_keeps_a_kernel_on_meta_while_functions_are_compiled() -> None:
    """The dispatcher lists all ops, those of no table of torch's too."""

    def kept() -> list[str]:
        names = (name.removeprefix("aten::").partition(".") for name in torch._C._dispatch_get_all_op_names())
        packets = ((getattr(torch.ops.aten, name, None), overload or "default") for name, _, overload in names)
        ops = (getattr(packet, overload, None) for packet, overload in packets)
        return [
            op.name()
            for op in ops
            if op is not None
            and DispatchKey.Meta in op.py_kernels
            and has_kernel(op.name(), "CompositeImplicitAutograd")
        ]

    assert len(kept()) > 50
    with composites_differentiate():
        assert kept() == []


@pytest.mark.parametrize("is_half", [False, True])
def test_autocast_acts_on_what_dynamo_traces(is_half: bool) -> None:
    """torch's documentation: convolutions and linears take fp16 or fp32 and return the type of autocast. The compiled
    function asks for it."""
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8)))
    asked = []

    @torch.compile(fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        asked.append(y.dtype)
        return y

    x = meta(2, 4, 8, 8, dtype=torch.float16 if is_half else torch.float32)
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad(), torch.autocast("cuda", torch.float16):
        out = compiled(x)
    assert (asked, out.dtype) == ([torch.float16], torch.float16)
    assert not meter.trace.compilation.failures


def test_convolutions_hand_on_channels_last() -> None:
    """As cuDNN does: inductor turns the image and both filters (its heuristic chooses channels-last for 64 channels),
    and nothing between the convolutions."""
    model = on_meta(lambda: nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2)))).bfloat16()
    with torch.no_grad():
        meter, report = metered(lambda: torch.compile(model)(meta(8, 64, 16, 16).bfloat16()))
    library = [op.call for op in meter.trace.ops if op.call.func is torch.ops.aten.convolution.default]
    assert [is_channels_last(call.outputs[0].shape, call.outputs[0].stride) for call in library] == [True, True]
    assert library[0].outputs[0].stride == library[1].inputs[0].stride
    image, filters = 2 * 8 * 64 * 16 * 16, 2 * 64 * 64 * 9
    turned = [kernel.bytes_read for kernel in report.graphs[0].kernels if kernel.kind == "triton"]
    assert sorted(turned) == [filters, filters, image, image]  # at last the result is turned back for the caller
    assert report.flops == 2 * 2 * 8 * 64 * 16 * 16 * 64 * 9


def test_a_gather_reads_the_rows_that_it_picks() -> None:
    """16 rows of 32 floats and 16 indices, of a table of 1,000 rows; then a reduction in the same kernel."""
    table, ids = meta(1000, 32), meta(16, dtype=torch.long)
    _, report = metered(lambda: torch.compile(lambda t, i: F.embedding(i, t).sum(-1))(table, ids))
    ((kernel,),) = [graph.kernels for graph in report.graphs]
    assert kernel.bytes_read == 16 * 32 * 4 + 16 * 8
    assert kernel.bytes_written == 16 * 4


def test_a_graph_break_names_file_line_and_reason() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()  # here
        return y.cos()

    _, report = metered(lambda: torch.compile(broken)(meta(8)))
    (found,) = [each for graph in report.graphs for each in graph.breaks]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert found.file == __file__
    assert lines[found.line - 1].endswith("# here")
    assert "graph_break()" in found.reason
    assert [len(graph.kernels) for graph in report.graphs] == [1, 1]
    assert f"graph break at {__file__}:{found.line}" in str(report)
    assert "graph breaks: 1" in report.explain_compile()


def test_graph_breaks_are_as_many_as_dynamo_counts_also_before_any_op_and_after_the_last() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = x.sin()
        torch._dynamo.graph_break()
        torch._dynamo.graph_break()
        y = y.cos()
        torch._dynamo.graph_break()
        torch._dynamo.graph_break()
        return y

    _, report = metered(lambda: torch.compile(broken)(meta(8)))
    counters = torch._dynamo.utils.counters["graph_break"]
    counters.clear()
    torch._dynamo.reset()
    torch.compile(broken, backend="eager")(torch.zeros(8))
    found = [each for graph in report.graphs for each in graph.breaks]
    assert len(found) == sum(counters.values())
    assert f"graph breaks: {len(found)}" in str(report)


def test_equal_graph_breaks_have_one_line_with_their_number() -> None:
    def halved(x: Tensor) -> Tensor:
        x = x / 2
        torch._dynamo.graph_break()  # three times
        return x

    def run() -> None:
        for size in (8, 9, 10):  # compiled again for each
            torch.compile(halved, dynamic=False)(meta(size))

    _, report = metered(run)
    lines = [line for line in str(report).splitlines() if line.startswith("graph break at")]
    assert len(lines) == 1
    assert " (3 times): Call to" in lines[0]


def test_what_is_no_tensor_comes_out_of_a_compiled_graph_as_it_went_in() -> None:
    """A placement of DTensor that a function makes before a graph break, as torch compiles it since 2.13."""

    def broken(x: Tensor) -> tuple[Tensor, list[Any]]:
        made = [Shard(x.ndim - 1), None, x.ndim]
        torch._dynamo.graph_break()
        return x + 1, made

    made: list[Any] = []
    metered(lambda: made.extend(torch.compile(broken)(meta(2, 3))[1]))
    assert made == [Shard(1), None, 2]


def test_a_compiled_function_may_view_what_attention_returns_as_on_cuda() -> None:
    """CUDA's kernels lay the result out as the query is, so that its heads lie side by side again."""

    def attend(*qkv: Tensor) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in qkv)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).view(4, 97, 512)

    qkv = [meta(4, 97, 8, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    runs = [metered(lambda run=run: run(*qkv).sum().backward())[1] for run in (attend, torch.compile(attend))]
    eager, compiled = ([k.cost.name for k in report.kernels if k.cost.macs] for report in runs)
    assert compiled == eager == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]


def test_another_shape_compiles_again_and_a_third_does_not() -> None:
    double = torch.compile(lambda x: x * 2)
    _, report = metered(lambda: [double(meta(rows, 8)) for rows in (4, 6, 10)])
    assert [graph.calls for graph in report.graphs] == [1, 2]
    assert "size mismatch" in str(report.graphs[1].recompiled_because)
    assert [kernel.cost.bytes_read for kernel in report.kernels] == [4 * 8 * rows for rows in (4, 6, 10)]


def test_dynamic_shapes_are_compiled_once_though_dynamo_starts_again_on_the_way() -> None:
    """Numbers of Python in a graph, such as the eps of a norm, make Dynamo restart its trace."""
    layers = torch.compile(on_meta(lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))), dynamic=True)
    with FlopMeter() as meter, torch.no_grad():
        for length in (128, 160):
            layers(meta(4, length, 64))
    assert not meter.trace.compilation.failures
    (graph,) = meter.report().graphs
    assert graph.calls == 2
    assert meter.report().macs == 4 * (128 + 160) * 64 * 64


def test_products_of_equal_layers_in_one_graph_have_one_cost() -> None:
    """So that each is priced once: a report of a deep model that is compiled whole took seconds."""
    model = on_meta(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))))
    with torch.no_grad():
        _, report = metered(lambda: torch.compile(model)(meta(8, 64)))
    costs = [kernel.cost for kernel in report.kernels if kernel.cost.macs]
    assert (len(costs), len(set(costs))) == (6, 1)


def test_equal_blocks_are_compiled_once_and_keep_their_own_paths() -> None:
    model = on_meta(lambda: nn.Sequential(Mlp(), Mlp(), Mlp()))
    for block in model:
        block.compile()
    meter, report = metered(lambda: step(model, meta(4, 64, requires_grad=True)))
    assert [(graph.part, graph.calls) for graph in report.graphs] == [("forward", 3), ("backward", 3)]
    for phase in ("forward", "backward"):
        roots = {op.module[:12] for op in meter.trace.ops if op.graph is not None and op.phase == phase}
        assert roots == {"Sequential.0", "Sequential.1", "Sequential.2"}


def test_reduce_overhead_replays_a_graph() -> None:
    model = torch.compile(on_meta(Mlp), mode="reduce-overhead")
    with torch.no_grad():
        _, report = metered(lambda: model(meta(4, 64)))
    assert report.mode == "cudagraph"


def test_one_function_that_replays_does_not_make_a_program_of_replays() -> None:
    """What does not ask for CUDA graphs launches its kernels one by one."""
    replayed, plain = torch.compile(on_meta(Mlp), mode="reduce-overhead"), torch.compile(on_meta(Mlp))
    with torch.no_grad():
        _, report = metered(lambda: plain(replayed(meta(4, 64))))
    assert report.mode == "compiled"
    assert [graph.replays for graph in report.graphs] == [True, False]


def test_the_eager_run_of_a_compiled_program_has_to_be_asked_for_beforehand() -> None:
    meter, report = metered(lambda: torch.compile(torch.sin)(meta(8)))
    assert report.mode == "compiled"
    with pytest.raises(ValueError, match="compile='rules'"):
        meter.report(mode="eager")
    with pytest.raises(ValueError, match=r"torch\.compile\(model\)"):
        metered(lambda: meta(8).sin())[1].explain_compile()


def test_modules_that_a_compiled_function_holds_have_the_names_that_they_have_in_the_model() -> None:
    model, x = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), Mlp())), meta(4, 64)

    def of_one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return cast(Tensor, torch.func.functional_call(model, parameters, (row,)).sum())

    over_rows = torch.compile(torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0)))
    with FlopMeter("h100-sxm5-80gb") as meter:
        over_rows(dict(model.named_parameters()), x)
    modules = {kernel.op.module for kernel in meter.report().kernels if "mm" in kernel.cost.name}
    known = {f"Sequential.{name}" for name in ("0", "1.up", "1.down")}
    assert {"Sequential.0", "Sequential.1.up"} <= modules <= known | {""}  # torch forgets where some came from


class LoopWithBreaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Broken() for _ in range(2))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        out: Tensor = self.after(x)
        return out


def test_the_host_makes_what_lies_between_two_calls_of_compiled_graphs() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2)

    def twice(x: Tensor, views: int) -> Tensor:
        x = compiled(x)
        for _ in range(views):
            x = x.view(64, 64)
        return compiled(x)

    one, many = (metered(functools.partial(twice, meta(64, 64), views))[1] for views in (1, 11))
    assert many.host_seconds - one.host_seconds == pytest.approx(10 * 3.2e-6)  # as the report's line of the host says


def test_a_graph_break_in_a_loop_leaves_the_function_eager_and_the_modules_their_names() -> None:
    """torch compiles what the loop calls, in two parts each, and runs the head eagerly: it gives no graph a head."""
    model = torch.compile(on_meta(LoopWithBreaks))
    with FlopMeter("h100-sxm5-80gb") as meter:
        model(meta(4, 64))
    report = meter.report()
    places = [(kernel.op.module, kernel.op.graph is not None) for kernel in report.kernels]
    assert places == [
        ("LoopWithBreaks.blocks.0.before", True),
        ("LoopWithBreaks.blocks.0.after", True),
        ("LoopWithBreaks.blocks.1.before", True),
        ("LoopWithBreaks.blocks.1.after", True),
        ("LoopWithBreaks", False),
    ]
    (note,) = (note for note in report.notes if note.startswith("not compiled, so run eagerly"))
    assert f"forward ({__file__}:" in note
    assert note.endswith("graph break in loop, after Call to `torch._dynamo.graph_break()`")


@pytest.mark.parametrize("itself", [True, False])
def test_a_sequential_that_compiles_itself_is_said_to_compile_nothing_where_torch_compiles_nothing(
    itself: bool,
) -> None:
    def called(model: nn.Sequential, **options: Any) -> nn.Module:
        if not itself:
            return cast(nn.Module, torch.compile(model, **options))
        model.compile(**options)
        return model

    seen: list[object] = []
    called(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=lambda graph, _: seen.append(graph) or graph)(
        torch.ones(2, 8)
    )
    with FlopMeter("h100-sxm5-80gb") as meter:
        called(on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())))(meta(4, 64))
    report = meter.report()
    assert bool(report.graphs) is bool(seen)
    assert any("torch.compile compiled nothing" in note for note in report.notes) is (not seen)


def test_what_does_not_compile_is_fused_by_the_rules_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such lowering")

    x = meta(4, 64)
    _, by_rules = metered(lambda: step(torch.compile(on_meta(Mlp)), x), compile="rules")
    monkeypatch.setattr(session, "lower", fails)
    _, report = metered(lambda: step(torch.compile(on_meta(Mlp)), x))
    assert any("fused by the rules" in note and "no such lowering" in note for note in report.notes)
    assert not report.graphs
    expected = by_rules.in_mode("compiled")  # type: ignore[misc]
    assert [kernel.cost.name for kernel in report.kernels] == [kernel.cost.name for kernel in expected.kernels]


def test_what_the_rules_fuse_is_no_part_of_the_graph_that_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions, of which one does not compile: two graphs to launch."""
    plain, tried = session.lower, []

    def fails_once(*args: Any) -> Any:
        tried.append(None)
        if len(tried) == 1:
            raise RuntimeError("no such lowering")
        return plain(*args)

    monkeypatch.setattr(session, "lower", fails_once)
    x = meta(4, 64)
    with torch.no_grad():
        meter, _ = metered(lambda: torch.compile(torch.exp)(torch.compile(torch.sin)(x)))
    made = launches(kernels_of(meter.trace), meter.trace, MODES["cudagraph"])
    assert len(made.kernels) == len(set(made.graphs)) == 2


def test_a_backward_graph_that_does_not_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled when the backward pass comes to it."""
    plain = session.lower

    def fails_backward(module: Any, given: Any, options: dict[str, Any]) -> Any:
        if options.get("is_backward"):
            raise RuntimeError("no such lowering")
        return plain(module, given, options)

    monkeypatch.setattr(session, "lower", fails_backward)
    model = on_meta(lambda: nn.Sequential(Mlp(), nn.Dropout(0.1)))
    meter, report = metered(lambda: step(torch.compile(model), meta(4, 64)))
    assert [graph.part for graph in report.graphs] == ["forward"]
    assert any("no such lowering" in note for note in report.notes)
    products = [op for op in meter.trace.ops if op.phase == "backward" and op.call.name == "mm"]
    assert len(products) == 4  # two of each layer: what goes into the first comes from a norm, which has weights
    assert all(parameter.grad is not None for parameter in model.parameters())


def state() -> list[Any]:
    owners = [torch, torch.cuda, FakeTensor, torch.Tensor, session.names.COMPILE_FX.owner, torch._dynamo.eval_frame]
    own = [dict(vars(owner)) for owner in owners]
    registries = [dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)]
    return [*own, registries, config.get_config_copy(), {key: dict(count) for key, count in counters.items() if count}]


@pytest.mark.parametrize("fails", [False, True], ids=["in order", "after an exception"])
def test_torch_is_as_it_was_afterwards(fails: bool) -> None:
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert double(torch.ones(2)).tolist() == [2, 2]
    metered(lambda: step(torch.compile(on_meta(Mlp)), meta(4, 64)))  # imports what it imports
    before = state()

    def program() -> None:
        torch.compile(on_meta(Mlp))(meta(4, 64))
        if fails:
            raise KeyError("the program's own")

    if fails:
        with pytest.raises(KeyError):
            metered(program)
    else:
        metered(program)
    assert state() == before
    assert double(torch.ones(2)).tolist() == [2, 2]


def test_what_a_meter_compiled_is_forgotten_with_it() -> None:
    seen = torch.compile(torch.sin)
    first, _ = metered(lambda: seen(meta(8)))
    ops = len(first.trace.ops)
    _, report = metered(lambda: seen(meta(8)))
    assert len(report.kernels) == 1
    assert len(first.trace.ops) == ops


def test_importing_flopmeter_does_not_import_the_compiler() -> None:
    code = "import sys, flopmeter; print({'torch._dynamo', 'torch._inductor.ir'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def _decode(weight_type: torch.dtype) -> tuple[FlopMeter, Report]:
    with torch.device("meta"):
        weight, scales = torch.empty(256, 128, dtype=weight_type), torch.empty(256, dtype=torch.bfloat16)
        x = torch.empty(1, 1, 128, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: F.linear(x, weight.to(x.dtype)) * scales)
    with torch.inference_mode():
        return metered(lambda: compiled(x))


def test_a_library_kernel_that_a_pattern_put_in_is_counted_as_its_op() -> None:
    """inductor takes one matmul with int8 weights for cast, matmul and scaling; their nodes are gone from the graph."""
    _, report = _decode(torch.int8)
    (kernel,) = report.graphs[0].kernels
    assert (kernel.kind, kernel.name) == ("library", "_weight_int8pack_mm")
    assert report.flops == 2 * 128 * 256 + 256
    assert report.bytes_read == 256 * 128 + 2 * 128 + 2 * 256  # weights, activations, scales


def test_a_library_kernel_of_no_op_is_uncounted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopmeter.compiler.plan.op_without_node", lambda operation: None)
    _, report = _decode(torch.int8)
    assert report.graphs[0].uncounted == ("extern_kernels._weight_int8pack_mm",)
    assert "extern_kernels._weight_int8pack_mm" in str(report)


def test_what_inductor_would_measure_on_the_device_is_said() -> None:
    compiled = torch.compile(on_meta(Mlp), mode="max-autotune-no-cudagraphs")
    with torch.inference_mode():
        _, report = metered(lambda: compiled(meta(4, 64)))
    assert "max_autotune: inductor would time kernels on the GPU" in str(report)
    with torch.inference_mode():
        _, plain = metered(lambda: torch.compile(on_meta(Mlp))(meta(4, 64)))
    assert "max_autotune" not in str(plain)


def test_the_meters_own_hooks_cause_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    before, compiled = list(warnings.filters), torch.compile(on_meta(Mlp))
    with torch.inference_mode():
        metered(lambda: compiled(meta(4, 64)))
    assert not [each for each in recwarn if "global hooks" in str(each.message)]
    assert list(warnings.filters) == before


def test_a_compiled_kernel_runs_on_the_stream_that_calls_it() -> None:
    x, sine = meta(64), torch.compile(torch.sin)
    with FlopMeter("h100-sxm5-80gb") as meter:
        sine(x)
        with stream(MetaStream()):
            sine(x)
            torch.sin(x)
    first, compiled, eager = (timing.stream for timing in meter.report().timings)
    assert compiled == eager != first
