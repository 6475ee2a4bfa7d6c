"""Scripts as they are, on a device named cuda: FLOPs against torch's counter and by hand, steps, memory, values."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import flopmeter
from flopmeter.run.launchers import launch_of
from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

PROGRAMS = Path(__file__).parent / "programs"
A100 = "a100-sxm4-80gb"


@pytest.fixture(autouse=True)
def _own_switches():
    """Programs set them for the whole process."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield
    matmul.allow_tf32 = before


def run_program(name: str, *arguments: str, hardware: str = A100, **wishes):
    """The report of a program, and what it printed."""
    session = ScriptSession(hardware, Wishes(**{"steps": 3, **wishes}))
    with session.open(), contextlib.redirect_stdout(io.StringIO()) as out:
        ending = run(Script(str(PROGRAMS / name), arguments), session)
        assert ending.error is None, ending
        return session.report(name), out.getvalue()


def counted_on_cpu(name: str, *arguments: str) -> int:
    """What torch's counter sees of the program on the CPU."""
    argv = [name, *arguments]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()):
        with FlopCounterMode(display=False) as counter:
            runpy.run_path(str(PROGRAMS / name), run_name="__main__")
    return counter.get_total_flops()


def counts_attention_on_cpu() -> bool:
    x = torch.zeros(1, 1, 8, 8)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    return counter.get_total_flops() > 0


def test_a_step_has_the_flops_that_torch_counts_in_the_same_script_on_the_cpu(tmp_path):
    size = ("--dtype", "float32", "--out", str(tmp_path), "--accumulate", "2")
    report, _ = run_program("train_gpt.py", *size)
    with mock.patch.object(torch.cuda, "synchronize"):
        two, one = (counted_on_cpu("train_gpt.py", "--device", "cpu", "--steps", steps, *size) for steps in "21")
    # Before 2.15 torch's counter leaves out the CPU's attention: 2 products forward and 5 backward of 2 layers, in 2
    # micro-batches.
    batch, length, width = 4, 32, 64
    attention = 2 * 2 * (2 + 5) * 2 * batch * length**2 * width
    assert 2 * report.step.macs == two - one + (0 if counts_attention_on_cpu() else attention)


def test_precision_compilation_and_dropout_leave_the_products_as_they_are(tmp_path):
    base = run_program("train_gpt.py", "--dtype", "float32", "--out", str(tmp_path))[0].step.macs
    for options in (("--dtype", "float16"), ("--compile",), ("--dropout", "0.1")):
        assert run_program("train_gpt.py", *options, "--out", str(tmp_path))[0].step.macs == base


def test_a_script_that_compiles_is_priced_compiled(tmp_path):
    assert run_program("train_gpt.py", "--compile", "--out", str(tmp_path))[0].step.mode == "compiled"


def test_a_script_runs_to_its_third_step_and_saves_no_weights(tmp_path):
    report, out = run_program("train_gpt.py", "--out", str(tmp_path / "out"))
    assert "parameters on cuda:0 True" in out
    assert "step 1: loss 1.0000" in out
    assert "step 2" not in out
    assert not any((tmp_path / "out").iterdir())
    assert report.parts.count == 3
    assert any("not saved" in note for note in report.step.notes)
    assert {"forward", "backward", "optimizer"} == {row.name for row in report.step.rows("phase")}


def train(device: object, steps: int = 4, width: int = 64, batch: int = 8, before: bool = False) -> nn.Module:
    model = nn.Linear(width, width, bias=False)
    if not before:
        model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.to(device)
    for _ in range(steps):
        model(torch.randn(batch, width, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_products_of_a_linear_layer_are_counted_by_hand():
    with flopmeter.cuda(A100, steps=3) as device:
        train(device)
    assert device.report().step.macs == 2 * 8 * 64 * 64  # forward, and the gradient of the weight


def test_an_optimizer_made_before_the_model_moved_updates_the_moved_model():
    with flopmeter.cuda(A100, steps=3) as device:
        train(device, before=True)
    report = device.report()
    assert report.parts.count == 3
    assert "optimizer" in {row.name for row in report.step.rows("phase")}


def test_a_parameter_that_moves_keeps_the_attributes_that_the_program_gave_it():
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(8, 8)
        model.weight.no_decay = True
        model.to(device)
    assert model.weight.no_decay
    assert not hasattr(model.bias, "no_decay")


def test_data_of_the_other_device_may_be_given_to_a_parameter():
    """As between the CPU and CUDA: the parameter is the same object, which an optimizer may hold already."""
    with flopmeter.cuda(A100, steps=2) as device:
        weight = nn.Parameter(torch.zeros(64, 64))
        weight.no_decay = True
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.data = weight.data.cuda()
        assert isinstance(weight, nn.Parameter)
        assert (weight.is_cuda, weight.requires_grad, weight.is_leaf, weight.no_decay) == (True, True, True, True)
        while True:
            (torch.zeros(8, 64, device=device) @ weight).sum().backward()
            optimizer.step()
    assert device.report().step.macs == 2 * 8 * 64 * 64  # the product, and the weight's gradient


def test_tied_weights_stay_one():
    with flopmeter.cuda(A100):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
        model[0].weight = model[1].weight
        model.cuda()
        assert model[0].weight is model[1].weight
        assert len(list(model.parameters())) == 1


@pytest.mark.parametrize("of_data", [False, True])
def test_a_parameter_that_something_looks_at_moves_too_and_is_the_one_that_the_optimizer_has(of_data):
    """torch.export and DeepSpeed leave weak references, with which torch does not swap tensors."""
    with flopmeter.cuda(A100, steps=2) as device:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight, looks = model.weight, weakref.ref(model.weight)
        if of_data:
            weight.data = weight.data.cuda()
        else:
            model.cuda()
        assert model.weight.is_cuda
        assert model.weight is weight is looks()
        while True:
            model(torch.zeros(8, 64, device=device)).sum().backward()
            optimizer.step()
    assert "optimizer" in {row.name for row in device.report().step.rows("phase")}


def test_a_context_ends_after_its_steps_and_goes_on_behind():
    done = []
    with flopmeter.cuda(A100, steps=2) as device:
        train(device, steps=100)
        done.append("never")
    assert done == []
    assert device.report().parts.count == 2


def test_the_parts_of_a_trace_add_up_to_the_whole():
    meter = flopmeter.FlopMeter(A100)
    with meter:
        train("meta")
    total, cut = len(meter.trace.ops), len(meter.trace.ops) // 2
    whole, *halves = (meter.report(ops=ops) for ops in (range(total), range(cut), range(cut, total)))
    assert whole.flops == meter.report().flops == sum(half.flops for half in halves)
    assert whole.seconds == meter.report().seconds
    assert whole.peak_memory_bytes == meter.report().peak_memory_bytes == max(h.peak_memory_bytes for h in halves)


def test_the_program_is_told_what_it_is_told_on_the_gpu():
    with flopmeter.cuda("h100-sxm5-80gb", gpus=2) as device:
        x = torch.ones(2, 3, device="cuda")
        assert (str(x.device), x.is_cuda, x.is_meta, x.get_device(), x.type()) == (
            "cuda:0", True, False, 0, "torch.cuda.FloatTensor",
        )  # fmt: skip
        assert isinstance(x, torch.cuda.FloatTensor)
        assert isinstance(nn.Parameter(x.half()), (torch.cuda.FloatTensor, torch.cuda.HalfTensor))
        assert not isinstance(x, (torch.FloatTensor, torch.cuda.HalfTensor))
        assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
        assert torch.cuda.get_device_capability() == (9, 0)
        properties = torch.cuda.get_device_properties(0)
        assert (properties.multi_processor_count, properties.total_memory) == (132, 85_000_000_000)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.cuda.is_bf16_supported()
        with pytest.raises(AttributeError, match="has no 'uuid'"):
            _ = properties.uuid
        with pytest.raises(NotImplementedError, match=r"torch\.cuda\.temperature is not available"):
            torch.cuda.temperature()
        assert str(device) == "cuda:0"


WAYS = {
    "device=": lambda: torch.zeros(2, device="cuda"),
    "cuda:0": lambda: torch.zeros(2, device="cuda:0"),
    "an index": lambda: torch.zeros(2).to(0),
    "torch.device": lambda: torch.tensor([1.0], device=torch.device("cuda")),
    ".cuda()": lambda: torch.zeros(2).cuda(),
    ".cuda(0)": lambda: torch.zeros(2).cuda(0, non_blocking=True),
    ".to(device, dtype)": lambda: torch.zeros(2).to("cuda", torch.bfloat16),
    ".to(other)": lambda: torch.zeros(2).to(torch.ones(1, device="cuda")),
    "pinned": lambda: torch.zeros(2).pin_memory().to("cuda", non_blocking=True),
    "new_": lambda: torch.zeros(2).new_ones(3, device="cuda"),
    "_like": lambda: torch.zeros_like(torch.zeros(2), device="cuda"),
    "a legacy type": lambda: torch.cuda.FloatTensor(2, 3),
    "type()": lambda: torch.zeros(2).type(torch.cuda.HalfTensor),
    "another tensor's type()": lambda: torch.zeros(2).type(torch.zeros(2, dtype=torch.half, device="cuda").type()),
    "a module": lambda: nn.Linear(2, 2).cuda().weight,
    "a module's device": lambda: nn.Linear(2, 2, device="cuda").bias,
    "as_tensor": lambda: torch.as_tensor([1, 2], device="cuda"),
    "a generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
    "sparse": lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), device="cuda", check_invariants=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_name_the_device_leads_there(way):
    with flopmeter.cuda(A100):
        made = WAYS[way]()
        assert made.device == torch.device("cuda", 0)
        assert made.is_cuda


def test_programs_may_start_and_stop_a_profiler_of_the_driver():
    with flopmeter.cuda(A100) as device:
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        with torch.cuda.profiler.profile():
            torch.zeros(2, device=device)
        assert torch.cuda.cudart().cudaProfilerStop() == 0
        assert torch.cuda.memory._snapshot() is None
    assert "torch.cuda.memory._snapshot was left out" in str(device.report().step.notes)


def test_default_devices_are_taken():
    with flopmeter.cuda(A100):
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
            assert torch.tensor([1.0]).is_cuda
            assert not torch.zeros(2, device="cpu").is_cuda
        torch.set_default_device("cuda")
        try:
            assert torch.arange(3).is_cuda
            assert torch.get_default_device().type == "cuda"
        finally:
            torch.set_default_device(None)


@pytest.mark.parametrize("name", ["torch.cuda.HalfTensor", "the type"])
def test_a_default_tensor_type_of_the_device_is_taken(name):
    with flopmeter.cuda(A100):
        torch.set_default_tensor_type(torch.cuda.HalfTensor if name == "the type" else name)
        try:
            weight, numbers = nn.Linear(2, 2).weight, torch.arange(3)
            made = torch.Tensor(2, 3), torch.Tensor([1, 2])
        finally:
            torch.set_default_tensor_type(torch.FloatTensor)
        assert (weight.dtype, weight.is_cuda, numbers.dtype, numbers.is_cuda) == (torch.half, True, torch.int64, True)
        assert [(each.dtype, each.is_cuda, each.numel()) for each in made] == [
            (torch.half, True, 6),
            (torch.half, True, 2),
        ]
        assert (torch.zeros(1).dtype, torch.zeros(1).is_cuda) == (torch.float32, False)
        assert torch.Tensor([1]).device.type == "cpu"


def test_the_device_meta_keeps_its_name():
    with flopmeter.cuda(A100):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        assert model.weight.device == torch.device("meta")
        assert torch.zeros(2, device="meta").is_meta
        with pytest.raises(NotImplementedError, match="to_empty"):
            model.to("cuda")
        assert model.to_empty(device="cuda").weight.is_cuda


def test_a_function_that_stands_in_for_torch_s_makes_tensors_of_the_gpu_where_torch_calls_it(monkeypatch):
    """As those of DeepSpeed's zero.Init: on meta torch.ones asks for torch.empty, which is the program's."""
    with flopmeter.cuda(A100):
        empty = torch.empty
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs))
            ones = torch.ones(4, device="cuda")
            asked = torch.empty(4, device="meta")
        assert ones.to("cuda").is_cuda
        assert asked.is_meta


@pytest.mark.parametrize(("outer", "inner"), [("meta", "cuda"), ("cuda", "meta"), ("meta", "cpu"), ("cpu", "cuda")])
def test_the_innermost_device_is_the_default_one(outer, inner):
    """As in torch: tables of places are made on the GPU inside of a model that is made on meta."""
    with flopmeter.cuda("h100-sxm5-80gb"):
        with torch.device(outer):
            with torch.device(inner):
                made = torch.arange(4).float()
            around = torch.ones(2)
        assert (made.device.type, around.device.type) == (inner, outer)
        if inner != "meta":
            assert made.to("cuda").device.type == "cuda"


def test_a_model_on_meta_takes_neither_memory_nor_time_until_it_is_emptied_to_the_gpu():
    with flopmeter.cuda(A100) as device:
        with torch.device("meta"):
            model = nn.Linear(1024, 4096, bias=False)
        nn.init.normal_(model.weight)
        twin = model.weight.detach().clone() + 1
        assert (twin.device.type, twin.new_zeros(3).device.type) == ("meta", "meta")
        assert torch.empty_like(twin[0], device="cuda").device.type == "cuda"
        assert torch.cuda.max_memory_allocated() == 4096  # the row that was asked for on the GPU
        model.to_empty(device="cuda")
        assert torch.cuda.memory_allocated() == 1024 * 4096 * 4
    assert [kernel.cost.name for kernel in device.report().step.kernels if kernel.cost.bytes_written] == []


def test_another_gpu_than_the_metered_one_is_refused_by_name():
    with flopmeter.cuda(A100):
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match=r"no cuda:1 among 1"):
            torch.zeros(1, device="cuda:1")
    with flopmeter.cuda(A100, gpus=2):
        with pytest.raises(RuntimeError, match="one GPU of a process"):
            torch.zeros(1, device="cuda:1")


def test_the_one_gpu_has_the_index_that_the_program_names_first():
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(64, 64).to("cuda:3")
        x = torch.zeros(8, 64).cuda(3)
        assert model(x).device == torch.device("cuda:3")
        assert torch.zeros(1, device="cuda").device.index == torch.cuda.current_device() == 3
        with pytest.raises(RuntimeError, match="one GPU of a process"):
            torch.zeros(1, device="cuda:0")
    assert "the program names cuda:3, which is taken to be the one GPU that is metered" in device.report().step.notes


def state() -> dict[tuple[str, str], object]:
    owners = (torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.cuda.nvtx, torch.accelerator, nn.Module)
    owners += (torch.serialization, torch.backends.cudnn, torch.distributed)
    return {(owner.__name__, name): value for owner in owners for name, value in list(vars(owner).items())}


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_is_left_behind(error):
    with flopmeter.cuda(A100):  # what torch imports late is there from now on
        train("cuda")
    before = state()
    with contextlib.suppress(ValueError), flopmeter.cuda(A100, gpus=2):
        train("cuda")
        if error:
            raise error
    after = state()
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    # FlopMeter takes item's and new's places by itself, and gives the inherited ones back as own.
    assert [key for key in changed if key[1] not in ("new", "numpy", "new_tensor")] == []
    assert not torch.cuda.is_available()


def test_names_that_were_imported_before_are_those_of_the_device_inside(monkeypatch):
    module = sys.modules[__name__]
    taken = {"zeros": torch.zeros, "device": torch.device, "is_available": torch.cuda.is_available, "nothing": None}
    for name, value in taken.items():
        monkeypatch.setattr(module, name, value, raising=False)
    with flopmeter.cuda("a100-sxm4-80gb") as run:
        x = vars(module)["zeros"](4, 8, device=vars(module)["device"]("cuda"))
        y = torch.compile(_with_a_row)(x)
        assert (x.is_cuda, y.shape, vars(module)["is_available"]()) == (True, (5, 8), True)
        assert vars(module)["nothing"] is None  # as torch.version.cuda is of a build for the CPU
    assert run.report().step.bytes_written > 0
    assert vars(module)["zeros"] is torch.zeros


def _with_a_row(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, zeros(1, 8, device=device("cuda"))])  # type: ignore[name-defined]  # noqa: F821


def test_names_that_were_imported_inside_do_nothing_behind():
    with flopmeter.cuda(A100):
        zeros = torch.zeros
    assert zeros(2, device="meta").device == torch.device("meta")
    with pytest.raises((AssertionError, RuntimeError)):
        zeros(2, device="cuda")


def test_memory_is_that_of_the_allocator_in_blocks_of_512_bytes():
    with flopmeter.cuda(A100):
        x = torch.empty(1000, device="cuda")  # 4,000 B in a block of 4,096
        assert torch.cuda.memory_allocated() == 4096
        y = torch.empty(2**20, device="cuda")
        del x
        assert torch.cuda.memory_allocated() == 4 * 2**20
        assert torch.cuda.max_memory_allocated() == 4 * 2**20 + 4096
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 4 * 2**20
        assert torch.cuda.memory_reserved() == 2 * 2**20 + 20 * 2**20  # a small and a large segment
        free, total = torch.cuda.mem_get_info()
        assert total == 85_100_000_000
        assert free == total - 600_000_000 - torch.cuda.memory_reserved()
        assert y.is_cuda


def test_a_step_that_fits_tells_that_the_device_had_no_room_before():
    with flopmeter.cuda(A100, wishes=Wishes(on_out_of_memory="report")) as device, torch.no_grad():
        torch.empty(10**12, dtype=torch.uint8, device="cuda").zero_()
        nn.Linear(64, 64).cuda()(torch.zeros(8, 64, device="cuda"))
    step = device.report().step
    assert step.memory.fits(step.hardware)
    assert "the device had no room for a tensor" in step.caution


def test_what_does_not_fit_raises_as_the_device_does_or_goes_on_and_is_told():
    with flopmeter.cuda(A100):
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 83\.82 GiB"):
            torch.empty(90_000_000_000, dtype=torch.uint8, device="cuda")
        assert torch.ones(1, device="cuda").is_cuda  # as after torch.cuda.OutOfMemoryError
    with flopmeter.cuda(A100, wishes=Wishes(on_out_of_memory="report")) as device:
        torch.ones(90_000_000_000, dtype=torch.uint8, device="cuda")
    assert any(note.startswith("does not fit: CUDA out of memory") for note in device.report().step.notes)


def test_values_that_the_program_reads_stand_in_and_are_listed_once_a_line():
    with flopmeter.cuda(A100) as device:
        x = torch.randn(4, device="cuda")
        read = [x.sum().item() for _ in range(3)]
        loss = x.mean()
        assert read == [1.0] * 3
        assert float(loss) == 1.0
        assert f"{loss:.2f}" == "1.00"
        assert loss.cpu().numpy() == 1.0
        assert x.tolist() == [1.0] * 4
        assert int(x.argmax()) == 0
        assert not torch.isnan(loss)
        assert torch.isfinite(loss)
        assert repr(loss) == "tensor(1., device='cuda:0')"
        assert torch.tensor([3, 4], device="cuda").sum().item() == 7  # what is known stays known
    assumed = device.report().step.assumptions
    assert sum("test_run.py" in use and "(3x)" in use and "stand-in 1.0" in use for use in assumed) == 1


def test_printing_a_large_tensor_reads_the_numbers_that_it_shows():
    """torch shows 3 numbers at each end of each dimension, and takes these on the GPU: 6 x 6 of 2,000 x 1,000."""
    with flopmeter.cuda(A100) as device:
        x = torch.randn(2000, 1000, device="cuda").to(torch.int8)
        known = torch.arange(2000, device="cuda")
        assert "...," in repr(x)
        assert repr(known) == "tensor([   0,    1,    2,  ..., 1997, 1998, 1999], device='cuda:0')"
        parameter = torch.nn.Parameter(torch.ones(1, device="cuda"))
        assert repr(parameter) == "Parameter containing:\ntensor([1.], device='cuda:0', requires_grad=True)"
    read = [kernel.op.call.outputs[0].nbytes for kernel in device.report().step.kernels if kernel.cost.blocks_host]
    assert read == [6 * 6, 6 * 8, 4]


def test_what_torch_prints_below_the_dispatcher_is_not_read():
    """`lerp_` with a weight on the GPU: on meta torch prints its operands, on CUDA it does not, and one kernel runs."""
    with flopmeter.cuda(A100) as device:
        average, value, weight = (torch.randn(shape, device="cuda") for shape in ((2000, 3), (2000, 3), ()))
        average.lerp_(value, weight)
        torch._foreach_lerp_([average], [value], [weight])
    step = device.report().step
    assert step.assumptions == ()
    assert [kernel.op.call.name for kernel in step.kernels if kernel.cost.blocks_host] == []
    assert sum("lerp" in kernel.op.call.name for kernel in step.kernels) == 2


def test_a_deep_copy_is_known_as_what_was_copied_still_is():
    with flopmeter.cuda(A100):
        ends = torch.tensor([2, 7], device="cuda")
        assert copy.deepcopy(ends).tolist() == [2, 7]
        assert ends.tolist() == [2, 7]


@pytest.mark.parametrize(
    "computed",
    [
        lambda loss: 2 * loss / 4, lambda loss: round(loss, 4), lambda loss: +loss // 2 + 7 // loss,
        lambda loss: abs(-loss) % 3 - 5 % loss, lambda loss: 2**loss - loss**2 - (1 - loss),
    ],
)  # fmt: skip
def test_control_flow_that_hangs_on_a_stand_in_is_listed(computed):
    with flopmeter.cuda(A100) as device:
        loss = torch.randn(4, device="cuda").mean().item()
        assert computed(loss) < 10
    (note,) = (note for note in device.report().step.notes if "control flow" in note)
    assert "test_run.py" in note
    assert "(1x)" in note


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("accepts", ["error < 1.0", "error <= 1.0", "not error >= 1.0", "not error > 1.0", "1 > error"])
def test_an_adaptive_solver_accepts_its_first_step(accepts, is_read):
    """Its error over its tolerance is unknown, and where it is too large it tries a shorter step."""
    turns = 0
    with flopmeter.cuda(A100) as device:
        x = torch.randn(4, device="cuda")
        while turns < 10:
            turns += 1
            error = x.exp().max()
            if eval(accepts, {"error": error.item() if is_read else error}):
                break
    assert turns == 1
    assert len(device.report().step.assumptions) == 1


def test_strict_values_are_an_error():
    with flopmeter.cuda(A100, wishes=Wishes(strict_values=True)):
        with pytest.raises(flopmeter.DataDependentError, match=r"test_run\.py"):
            torch.randn(4, device="cuda").sum().item()


def test_numpy_of_a_gpu_tensor_is_refused_as_on_a_gpu():
    with flopmeter.cuda(A100), pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        torch.zeros(2, device="cuda").numpy()


def test_weights_are_loaded_onto_the_device_and_saved_ones_come_back(tmp_path):
    file, real = tmp_path / "real.pt", nn.Linear(4, 4)
    torch.save({"model": real.state_dict(), "step": 7}, file)
    with flopmeter.cuda(A100):
        for where in ("cuda", torch.device("cuda:0"), {"cpu": "cuda:0"}, lambda storage, _: storage.cuda()):
            loaded = torch.load(file, map_location=where)
            assert loaded["step"] == 7
            assert loaded["model"]["weight"].is_cuda
            assert loaded["model"]["weight"].shape == (4, 4)
        model = nn.Linear(4, 4).cuda()
        model.load_state_dict(loaded["model"])
        torch.save(model.state_dict(), tmp_path / "new.pt")
        assert not (tmp_path / "new.pt").exists()
        assert torch.load(tmp_path / "new.pt")["bias"].is_cuda


def test_weights_that_are_loaded_onto_meta_take_no_memory_of_the_gpu(tmp_path):
    """By torch.load, and by a storage of the program's own, as Lightning's lazy loading makes them."""
    torch.save(nn.Linear(512, 512).state_dict(), tmp_path / "real.pt")
    with flopmeter.cuda(A100):
        for where in ("meta", torch.device("meta")):
            kept = torch.load(tmp_path / "real.pt", map_location=where)
            assert kept["weight"].is_meta
        own = torch.UntypedStorage(4 * 512 * 512, device="meta")
        shapes = torch.empty(0, device="meta").set_(own, 0, (512, 512), (512, 1))
        assert shapes.is_meta
        assert torch.cuda.memory_allocated() == 0
    assert "__new__" not in vars(torch.UntypedStorage)
    assert torch.UntypedStorage(8).nbytes() == 8


def test_distributed_checkpoints_write_no_file_and_training_goes_on(tmp_path):
    with flopmeter.cuda(A100, gpus=4) as device:
        dist.init_process_group("nccl")
        model = nn.Linear(8, 8).cuda()
        fully_shard(model)
        for _ in range(2):
            state = get_model_state_dict(model)
            checkpoint.save({"model": state}, checkpoint_id=tmp_path / "a")
            checkpoint.async_save({"model": state}, checkpoint_id=tmp_path / "b").result()
            checkpoint.load({"model": state}, checkpoint_id=tmp_path / "a")
            set_model_state_dict(model, state)
            model(torch.zeros(2, 8, device="cuda")).sum().backward()
    assert list(tmp_path.iterdir()) == []
    assert device.report().step.macs == 2 * (2 * 8 * 8)  # of a step: the input needs no gradient
    assert any(note.startswith("checkpoints were neither") for note in device.report().step.notes)


def test_a_distributed_checkpoint_of_copies_on_the_host_does_not_ask_for_the_parts_of_other_ranks(tmp_path):
    with flopmeter.cuda(A100, gpus=4) as device:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        model = fully_shard(nn.Linear(8, 8).cuda())
        state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
        assert not any(each.is_cuda for each in state.values())
        checkpoint.save({"model": state}, checkpoint_id=tmp_path / "a")
        checkpoint.async_save({"model": state}, checkpoint_id=tmp_path / "b").result()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path / "a")
        model(torch.zeros(2, 8, device="cuda"))
    assert list(tmp_path.iterdir()) == []
    assert any(note.startswith("checkpoints were neither") for note in device.report().step.notes)


def test_weights_that_are_saved_into_memory_come_back_from_there():
    with flopmeter.cuda(A100):
        buffers = [io.BytesIO(), io.BytesIO()]
        for number, buffer in enumerate(buffers):
            torch.save({"weight": torch.zeros(number, device="cuda")}, buffer)
        assert [torch.load(buffer)["weight"].shape for buffer in buffers] == [(0,), (1,)]


def test_events_tell_predicted_time():
    with flopmeter.cuda(A100) as device:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x = torch.randn(4096, 4096, device="cuda")
        start.record()
        x @ x
        end.record()
        torch.cuda.synchronize()
        milliseconds = start.elapsed_time(end)
        with pytest.raises(ValueError, match="enable_timing"):
            torch.cuda.Event().elapsed_time(end)
    assert 2 * 4096**3 / 19.5e12 < milliseconds / 1e3 < 2 * (2 * 4096**3 / 19.5e12)  # at most the peak of fp32
    assert device.report().step.seconds > milliseconds / 1e3


def test_a_replay_of_a_graph_runs_it_again_for_one_launch():
    with flopmeter.cuda(A100) as device:
        x, weight = torch.zeros(8, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                x = x @ weight
        captured = device.report("eager").step
        for _ in range(3):
            graph.replay()
    report = device.report()
    assert report.parts.marked_by == "replays of a CUDA graph"
    assert report.step.macs == captured.macs == 20 * 8 * 64 * 64
    assert report.step.mode == "eager-cudagraph"
    assert report.step.launch_seconds < captured.launch_seconds / 5


def test_data_parallel_on_one_gpu_is_the_model_itself():
    with flopmeter.cuda(A100) as device:
        model = nn.DataParallel(nn.Linear(4, 4)).cuda()
        assert model(torch.zeros(2, 4)).shape == (2, 4)
    assert device.report().step.macs == 2 * 4 * 4


def test_attention_and_autocast_are_those_of_the_device():
    with flopmeter.cuda("h100-sxm5-80gb") as device, torch.autocast("cuda", dtype=torch.bfloat16):
        q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert (torch.zeros(4, 4, device="cuda") @ torch.zeros(4, 4, device="cuda")).dtype is torch.bfloat16
    names = {row.name for row in device.report().step.rows("op")}
    assert "_scaled_dot_product_cudnn_attention" in str(names)


def test_ddp_averages_all_gradients_over_the_world():
    report, out = run_program("ddp_train.py", gpus=8)
    assert "8 256" in out  # world, samples of a rank
    parameters = 2 * 256 * 1024 + 1024 + 256
    collectives = [kernel.cost.collective for kernel in report.step.kernels if kernel.cost.collective]
    assert sum(each.nbytes for each in collectives) == 4 * (parameters + 1)  # gradients in fp32, and the logged loss
    assert {len(each.ranks) for each in collectives} == {8}


def test_fsdp_holds_an_eighth_of_the_state():
    one, eight = (run_program("fsdp_train.py", gpus=gpus, gpus_per_node=gpus)[0].step.memory for gpus in (1, 8))
    assert eight.at_peak["optimizer state"] < one.at_peak["optimizer state"] / 7


@pytest.mark.parametrize(
    ("words", "script", "world"),
    [
        ("train.py --a 1", "train.py", None),
        ("python -u train.py", "train.py", None),
        ("-m pkg.train x", "pkg.train", None),
        ("torchrun --nproc-per-node 8 train.py --b", "train.py", 8),
        ("torchrun --standalone --nproc_per_node=gpu train.py", "train.py", 4),
        ("torchrun --nnodes 2 --nproc-per-node 8 -m pkg.train", "pkg.train", 16),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py", 2),
    ],
)
def test_launchers_are_understood(words, script, world):
    launch = launch_of(words.split(), gpus=4)
    assert (launch.script.target, launch.world_size) == (script, world)


def test_a_command_is_found_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    command = tmp_path / "bin" / "train"
    command.parent.mkdir()
    command.write_text("#!/usr/bin/env python3\n")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent))
    assert launch_of(["train"], gpus=1).script.target == str(command)


@pytest.mark.parametrize(
    "program", ["accelerate", "lightning", "fabric", "timm", "geometric", "peft", "diffusers", "hf"]
)
def test_programs_of_frameworks_run_to_a_steady_step(program, tmp_path, monkeypatch):
    needs = {"geometric": "torch_geometric", "fabric": "lightning", "hf": "accelerate"}
    files = {"peft": "peft_lora.py", "hf": "hf_trainer.py"}
    pytest.importorskip(needs.get(program, program))
    monkeypatch.chdir(tmp_path)
    report, _ = run_program(files.get(program, f"{program}_train.py"))
    assert report.parts.count == 3
    assert {"forward", "backward", "optimizer"} <= {row.name for row in report.step.rows("phase")}


def test_flash_attn_stands_in_by_the_same_kernel_and_is_told():
    with flopmeter.cuda(A100, wishes=Wishes(shims=("flash_attn",))) as device:
        from flash_attn import flash_attn_func

        q = torch.randn(2, 256, 8, 64, device="cuda", dtype=torch.bfloat16)
        assert flash_attn_func(q, q, q, causal=True).shape == q.shape
        with pytest.raises(NotImplementedError, match="softcap"):
            flash_attn_func(q, q, q, softcap=30.0)
        with pytest.raises(ImportError, match="no 'fused_softmax'"):
            from flash_attn import fused_softmax  # noqa: F401
    step = device.report().step
    assert step.macs == 2 * 2 * 8 * 256 * 256 * 64  # the whole square, as torch's counter has it
    assert any("flash_attn_func is flopmeter's shim" in note for note in step.notes)
    assert "flash_attn" not in sys.modules


class Wrapped(torch.Tensor):
    """As torchao's weights for products in fp8: it tells the device of what it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        bare = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return cls(func(*bare, **(kwargs or {})))


def test_a_wrapper_of_what_the_program_made_on_meta_is_on_meta_and_can_be_copied():
    with flopmeter.cuda(A100):
        here, there = (Wrapped(torch.zeros(2, 3, device=name)) for name in ("cuda", "meta"))
        assert [wrapped.device.type for wrapped in (here, there)] == ["cuda", "meta"]
        copied = copy.deepcopy(nn.Parameter(there))
        assert (type(copied.data), copied.is_meta) == (Wrapped, True)
        moved = torch.empty_like(copied, device="cuda")
        assert (type(moved), moved.device.type, moved.inner.device.type) == (Wrapped, "cuda", "cuda")


@pytest.mark.parametrize("is_aside", [False, True])
def test_a_device_that_is_busy_for_longer_than_the_run_takes_is_so_on_several_streams(is_aside):
    """Small products, since two kernels that need the whole device share it."""
    with flopmeter.cuda(A100) as device:
        x, aside = torch.zeros(256, 4096, device=device), torch.cuda.Stream()
        for _ in range(20):
            x @ x.T
            with torch.cuda.stream(aside if is_aside else torch.cuda.current_stream()):
                x @ x.T
    report = device.report().step
    assert (report.kernel_seconds > 1.01 * report.seconds) == is_aside
    assert (" on all streams, host " in str(report)) == is_aside
