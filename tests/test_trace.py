"""The recorder: writes down what runs, changes nothing, leaves nothing behind."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter
from flopmeter.records import Trace
from flopmeter.trace.recorder import Recorder
from flopmeter.trace.shapes_only import ShapesOnly


class BareMode(TorchDispatchMode):
    """The smallest observer there can be: names only."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in ("prim", "profiler"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.blocks[0](x)
        if self.checkpointed is None:
            x = self.blocks[1](x)
        else:
            x = checkpoint(self.blocks[1], x, use_reentrant=self.checkpointed)
        return self.head(x)


def build(device="meta", **kwargs):
    with torch.device(device):
        model, x = Net(**kwargs), torch.ones(4, 8)
    return model, x, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, x, optimizer):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(trace):
    return [op.call.name for op in trace.ops]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_the_recorder_sees_the_op_stream_of_a_bare_mode(device, checkpointed):
    program = build(device, checkpointed=checkpointed)
    with BareMode() as bare:
        step(*program)
    program = build(device, checkpointed=checkpointed)
    with Recorder() as recorder:
        step(*program)
    assert names(recorder.trace) == bare.names


def test_meta_cpu_and_fake_tensors_give_the_same_ops_and_geometry():
    def geometry(trace):
        return [(op.call.name, [s[:3] for s in op.call.inputs], [s[:3] for s in op.call.outputs]) for op in trace.ops]

    traces = []
    for device in ("meta", "cpu"):
        program = build(device)
        with Recorder() as recorder:
            step(*program)
        traces.append(geometry(recorder.trace))
    with FakeTensorMode():
        program = build("cpu")
        with Recorder() as recorder:
            step(*program)
    traces.append(geometry(recorder.trace))
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_a_forward_pass_ends_with_its_outermost_module_also_where_backward_recomputes(checkpointed):
    model, x, _ = build(checkpointed=checkpointed)
    ends = []
    with Recorder() as recorder:
        for _ in range(2):
            out = model(x)
            ends.append(len(recorder.trace.ops))
            out.sum().backward()
    assert [end.op for end in recorder.trace.forward_ends] == ends


def test_an_op_seen_before_with_the_same_geometry_shares_its_call():
    x = torch.empty(4, 8, device="meta")
    with Recorder() as recorder:
        for _ in range(3):
            x = x.sin()
    first, second, third = recorder.trace.ops
    assert first.call is second.call is third.call
    assert first.outputs[0].storage == second.inputs[0].storage != second.outputs[0].storage


@pytest.mark.parametrize("scalars", [(1, 1.0), (1, True), (0.5, 0.25), (0, 0j)])
def test_calls_that_differ_in_the_type_or_value_of_a_scalar_are_kept_apart(scalars):
    x = torch.empty(4, dtype=torch.int64, device="meta")
    with Recorder() as recorder:
        found = [torch.mul(x, scalar).dtype for scalar in scalars]
    assert found == [torch.mul(torch.zeros(4, dtype=torch.int64), scalar).dtype for scalar in scalars]
    first, second = recorder.trace.ops
    assert first.call is not second.call


def test_the_aliasing_of_arguments_is_part_of_the_geometry():
    x, y = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    with Recorder() as recorder:
        _ = x * y
        _ = x * x
    apart, same = recorder.trace.ops
    assert apart.call is not same.call
    assert len(set(apart.inputs)) == 2
    assert len(set(same.inputs)) == 1


def test_a_region_tells_where_in_the_storage_a_view_lies():
    x = torch.empty(4, 6, device="meta")
    with Recorder() as recorder:
        x[1:3, 2:].neg()
    region = recorder.trace.ops[-1].inputs[0]
    assert (region.shape, region.stride, region.offset, region.dtype) == ((2, 4), (6, 1), 8, torch.float32)


def test_storages_are_numbered_apart_even_when_memory_is_reused():
    with Recorder() as recorder:
        for _ in range(50):
            torch.empty(3).fill_(1.0)
    fills = [op for op in recorder.trace.ops if op.call.name == "fill_"]
    assert len({op.storages for op in fills}) == 50


def test_a_storage_is_freed_when_its_last_tensor_is():
    with Recorder() as recorder:
        a = torch.empty(10, device="meta")
        view = a[2:]
        del a
        b = view + 1
        del view
        _ = b + 1
    freed = recorder.trace.storages[0]
    assert (freed.born, freed.died) == (0, 3)  # empty, slice, add | add


def test_phases_are_told_apart():
    with Recorder() as recorder:
        step(*build())
    phases = {op.call.name: op.phase for op in recorder.trace.ops}
    assert phases["native_layer_norm"] == "forward"
    assert phases["native_layer_norm_backward"] == "backward"
    assert {op.phase for op in recorder.trace.ops} == {"forward", "backward", "optimizer"}
    updates = [op for op in recorder.trace.ops if op.phase == "optimizer"]
    assert {op.call.name for op in updates} <= {"add_", "clone", "mul_", "detach", "copy_", "_foreach_add_"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_is_recomputed_in_its_own_module(reentrant):
    with Recorder() as recorder:
        step(*build(checkpointed=reentrant))
    again = [(op.call.name, op.module) for op in recorder.trace.ops if op.phase == "recompute"]
    assert ("native_layer_norm", "Net.blocks.1.norm") in again
    assert ("addmm", "Net.blocks.1.linear") in again
    assert not any("blocks.0" in module or "head" in module for _, module in again)


def test_a_backward_pass_that_builds_a_graph_recomputes_nothing():
    x = torch.empty(4, device="meta", requires_grad=True)
    with Recorder() as recorder:
        (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        grad.sum().backward()
    assert {op.phase for op in recorder.trace.ops} == {"forward", "backward"}


def test_backward_ops_belong_to_the_module_whose_forward_made_them():
    with Recorder() as recorder:
        step(*build())
    modules = {op.module for op in recorder.trace.ops if op.call.name == "native_layer_norm_backward"}
    assert modules == {"Net.blocks.0.norm", "Net.blocks.1.norm"}
    products = [op.module for op in recorder.trace.ops if op.call.name == "mm"]
    assert products == ["Net.head"] * 2 + ["Net.blocks.1.linear"] * 2 + ["Net.blocks.0.linear"] * 2


def test_a_module_used_in_two_places_has_the_path_of_each():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Linear(8, 8)
            self.a, self.b = nn.Sequential(shared), nn.Sequential(shared)

        def forward(self, x):
            return self.b(self.a(x))

    with torch.device("meta"):
        model, x = Twice(), torch.empty(2, 8)
    with Recorder() as recorder:
        model(x)
    assert [op.module for op in recorder.trace.ops if op.call.name == "addmm"] == ["Twice.a.0", "Twice.b.0"]


def test_two_outermost_modules_of_one_class_get_two_names():
    with torch.device("meta"):
        first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.empty(2, 8)
    with Recorder() as recorder:
        second(first(x))
        first(x)
    assert [op.module for op in recorder.trace.ops if op.call.name == "addmm"] == ["Linear", "Linear (2)", "Linear"]


def test_a_module_that_raises_does_not_spoil_the_paths_after_it():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("on purpose")

    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.empty(2, 8)
    with Recorder() as recorder:
        with pytest.raises(KeyError, match="on purpose"):
            nn.Sequential(Fails())(x)
        model(x)
    assert recorder.trace.ops[-1].module == "Linear"


def test_inference_mode_records_the_ops_of_no_grad():
    traces = []
    for context in (torch.no_grad, torch.inference_mode):
        model, x, _ = build()
        q = torch.empty(2, 2, 16, 8, device="meta")
        with context(), Recorder() as recorder:
            F.softmax(model(x), dim=-1)
            F.dropout(torch.matmul(x, x.mT), 0.1)
            F.scaled_dot_product_attention(q, q, q)
        traces.append([name for name in names(recorder.trace) if name != "detach"])
    assert traces[0] == traces[1]


def test_functional_transforms_are_recorded_as_plain_ops():
    x = torch.empty(5, 4, device="meta")
    weight = torch.empty(4, 4, device="meta")
    with Recorder() as recorder:
        torch.func.vmap(torch.func.grad(lambda row: (weight @ row).tanh().sum()))(x)
    recorded = names(recorder.trace)
    assert "tanh" in recorded
    assert "tanh_backward" in recorded
    shapes = {op.outputs[0].shape for op in recorder.trace.ops if op.call.name == "tanh"}
    assert shapes == {(4, 5)}  # functorch moves the batch to the end: weight @ rows^T


def test_a_data_dependent_shape_is_not_mixed_up_with_another():
    with Recorder() as recorder:
        torch.tensor([0, 1, 1]).nonzero()
        torch.tensor([0, 0, 1]).nonzero()
    counts = [op.outputs[0].shape[0] for op in recorder.trace.ops if op.call.name == "nonzero"]
    assert counts == [2, 1]


def test_the_source_line_of_the_caller_is_recorded_on_request():
    x = torch.empty(3, device="meta")
    with Recorder(source=True) as recorder:
        x.sin()
    file, line = recorder.trace.ops[0].source.rsplit(":", 1)
    assert file.endswith("test_trace.py")
    with open(file) as lines:
        assert "x.sin()" in lines.readlines()[int(line) - 1]


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_of_a_compiled_graph_tell_the_line_that_they_are_of_on_request(asked):
    x = torch.empty(1024, device="meta")
    with FlopMeter("h100-sxm5-80gb", source=asked) as meter:
        torch.compile(lambda x: x.sin())(x)
    (op,) = meter.trace.ops
    assert (op.source or "").startswith(__file__) == asked


def test_a_recorder_that_starts_inside_of_a_step_sees_the_next_one_whole():
    recorder = Recorder()
    model, x, optimizer = build()
    step(model, x, optimizer)
    starts = optimizer.register_step_pre_hook(lambda *_: recorder.__enter__() and None)
    step(model, x, optimizer)
    starts.remove()
    step(model, x, optimizer)
    recorder.__exit__(None, None, None)
    decayed = dict.fromkeys(op.phase for op in recorder.trace.ops if "mul_" in op.call.name)  # the momentum
    assert [*decayed] == ["forward", "optimizer"]


def test_nested_recorders_agree_on_ops_of_one_geometry():
    x = build()[1]
    with Recorder() as outer, Recorder() as inner:
        for _ in range(3):
            x.sin()
    assert names(outer.trace) == names(inner.trace) == ["sin"] * 3


def test_nested_recorders_agree():
    with Recorder() as outer, Recorder() as inner:
        step(*build())
    assert names(outer.trace) == names(inner.trace)
    assert [op.module for op in outer.trace.ops] == [op.module for op in inner.trace.ops]


def test_nothing_is_left_behind_even_after_an_exception():
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def state():
        hooks = (module._global_forward_hooks, module._global_forward_pre_hooks)
        steps = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
        return [len(hook) for hook in (*hooks, *steps)], _get_current_dispatch_mode()

    def fail(x):
        raise ZeroDivisionError

    before = state()
    model, x, _ = build()
    model.head.register_forward_hook(lambda *_: fail(x))
    with pytest.raises(ZeroDivisionError), Recorder():
        model(x)
    assert state() == before


def test_the_recorder_keeps_no_tensor_alive():
    model, x, optimizer = build("cpu")
    with Recorder() as recorder:
        step(model, x, optimizer)
    kept = [storage for storage in recorder.trace.storages if storage.died is None]
    parameters_and_momenta = 2 * len(list(model.parameters()))
    inputs = 1
    assert len(kept) == parameters_and_momenta + inputs
    del model, optimizer
    gc.collect()


def test_a_tensor_subclass_is_recorded_by_the_ops_that_it_runs():
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(3), torch.ones(3))
    with Recorder() as recorder:
        pair.sin()
    assert names(recorder.trace) == ["sin", "sin"]


def test_sparse_tensors_are_recorded_without_geometry_of_a_storage():
    sparse = torch.eye(3).to_sparse()
    with Recorder() as recorder:
        torch.mm(sparse, torch.ones(3, 2))
    assert "mm" in "".join(names(recorder.trace))


def test_the_program_runs_on_meta_if_any_op_does():
    with Recorder() as recorder:
        torch.ones(1) + 1  # the host's own arithmetic
        torch.ones(1, device="meta") + 1
    assert recorder.trace.device == "meta"
    assert Trace().device == "cpu"


def test_a_deep_program_costs_no_recursion():
    x = torch.empty(2, device="meta")
    with Recorder() as recorder:
        for _ in range(5000):
            x = x + 1
    assert len(recorder.trace.ops) == 5000


def test_ops_and_their_backward_belong_to_the_compiled_region_that_ran_them():
    x = torch.empty(4, device="meta", requires_grad=True)
    running = [None]
    recorder = Recorder()
    recorder.watch_regions(lambda: running[0])
    with recorder:
        y = x.sin()
        running[0] = 1
        y = y.cos()
        running[0] = None
        y.exp().sum().backward()
    forward = {op.call.name: op.region for op in recorder.trace.ops if op.phase == "forward"}
    assert (forward["sin"], forward["cos"], forward["exp"]) == (None, 1, None)
    backward = {op.call.name: op.region for op in recorder.trace.ops if op.phase == "backward"}
    assert (backward["neg"], backward["sin"]) == (1, 1)  # cos' is -sin
    assert (backward["expand"], backward["cos"]) == (None, None)  # of sum; sin' is cos


def test_what_is_freed_after_the_context_outlived_the_trace():
    with Recorder() as recorder:
        x = torch.empty(4, device="meta")
    del x
    assert recorder.trace.storages[0].died is None


def test_inference_mode_changes_neither_module_paths_nor_lifetimes():
    model, x, _ = build()

    def record(mode):
        with mode(), Recorder() as recorder:
            model(x)
        return recorder.trace

    plain, inference = record(torch.no_grad), record(torch.inference_mode)
    assert [(op.call.name, op.module) for op in inference.ops] == [(op.call.name, op.module) for op in plain.ops]
    assert inference.storages == plain.storages


@pytest.mark.parametrize("switch", ["tf32 of matmuls", "tf32 of convolutions", "fp16 accumulation"])
def test_a_trace_has_the_switches_that_the_program_set(switch):
    """torch.backends' own, each by itself."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_fp16_accumulation
    try:
        matmul.allow_tf32, matmul.allow_fp16_accumulation = switch == "tf32 of matmuls", switch == "fp16 accumulation"
        with torch.backends.cudnn.flags(allow_tf32=switch == "tf32 of convolutions"), Recorder() as recorder:
            torch.add(torch.empty(2, device="meta"), 1)
    finally:
        matmul.allow_tf32, matmul.allow_fp16_accumulation = before
    names = ("tf32 of matmuls", "tf32 of convolutions", "fp16 accumulation")
    assert tuple(recorder.trace.switches) == tuple(name == switch for name in names)


def test_a_trace_has_tf32_that_the_program_set_by_the_newer_of_torchs_two_ways():
    """Afterwards torch's older switch, allow_tf32, raises when it is read."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    matmul.fp32_precision, convolution.fp32_precision = "tf32", "ieee"
    try:
        with Recorder() as recorder:
            torch.add(torch.empty(2, device="meta"), 1)
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before
    assert tuple(recorder.trace.switches) == (True, False, False)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_torch_packs_for_the_cpu_are_arguments_like_others():
    """A TorchBind object: two of them cannot be compared."""
    linear = torch.ao.nn.quantized.dynamic.Linear(64, 64)
    with FlopMeter("cpu-xeon-8480plus") as meter:
        for _ in range(2):
            linear(torch.zeros(8, 64))
    assert [row.name for row in meter.report().uncounted] == ["quantized::linear_dynamic"]


@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("meta", 8)])
def test_a_scripts_loop_over_places_of_a_tensor_on_the_cpu_makes_no_new_calls(device, calls):
    rows = torch.zeros(8, 4, device=device).unbind()
    with Recorder(shapes_only=ShapesOnly()) as recorder:
        for row in rows:
            row.add_(1)
    assert len(recorder.trace.ops) == 8
    assert len({op.call for op in recorder.trace.ops}) == calls
