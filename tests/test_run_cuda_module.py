"""What torch.cuda and the modules below it answer in a run: the profile's facts, the allocator's model, or a refusal by
name. Which names there are torch says."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch

import flopmeter

MODULES = (
    "torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.nccl", "torch.cuda.tunable",
    "torch.accelerator", "torch.accelerator.memory",
)  # fmt: skip
LESS = {"CudaError", "DeferredCudaCallError", "make_graphed_callables"}  # errors and what needs modules


def function_names() -> list[tuple[str, str]]:
    """The public functions of these modules, where torch has them."""
    names = []
    for module in MODULES:
        try:
            found = vars(importlib.import_module(module))
        except ImportError:  # an older torch
            continue
        for name, value in found.items():
            is_torchs = str(getattr(value, "__module__", "")).startswith(("torch.cuda", "torch.accelerator"))
            if inspect.isfunction(value) and is_torchs and not name.startswith("_") and name not in LESS:
                names.append((module, name))
    return names


def arguments(function: object) -> list[object]:
    """Something for each argument that a function needs."""
    known = {"tensor": torch.zeros(2, device="cuda"), "inputs": [torch.zeros(2, device="cuda")], "fraction": 0.5}
    known["tensors"] = known["inputs"]
    known |= {"stream": torch.cuda.current_stream(), "pool": torch.cuda.graph_pool_handle()}
    known |= {"new_state": torch.zeros(16, dtype=torch.uint8), "filename_pattern": "none", "new_states": []}
    needed = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [known.get(each.name, 0) for each in needed if each.default is each.empty and each.kind in kinds]


@pytest.mark.parametrize(("module", "name"), function_names())
def test_a_function_of_torch_cuda_answers_or_is_refused_by_its_name(module, name):
    own = getattr(importlib.import_module(module), name)
    with flopmeter.cuda("h100-sxm5-80gb"):
        try:
            getattr(importlib.import_module(module), name)(*arguments(own))
        except NotImplementedError as refused:
            assert f"{name} is not available under flopmeter" in str(refused)  # noqa: PT017 - it may answer


def test_a_build_without_cuda_tells_the_handle_of_a_stream_as_one_with_it_does():
    """bitsandbytes takes the function as soon as it is imported, which peft does."""
    with flopmeter.cuda("h100-sxm5-80gb"), torch.cuda.stream(torch.cuda.Stream()):
        own = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        assert own == torch.cuda.current_stream().cuda_stream != torch.cuda.default_stream().cuda_stream


def test_what_the_profile_knows_is_told_and_that_no_gpu_runs():
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        x = torch.zeros(1000, device="cuda")
        assert torch.cuda.clock_rate() == 1980  # MHz, the boost clock of NVIDIA's datasheet
        assert torch.cuda.utilization() == 0
        assert 0 < torch.cuda.power_draw() < 350_000  # mW: less than half of 700 W
        assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == 4096  # of 4,000 B
        assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] == 0
        assert torch.cuda.memory_snapshot() == []
        assert torch.cuda.Stream.priority_range() == (0, -3)
        torch.cuda._sleep(1_000_000)
        x.add_(1)
    notes = device.report().step.notes
    for left in ("clock_rate was answered 1980 MHz", "memory_snapshot was left out", "_sleep, which keeps the device"):
        assert any(left in note for note in notes), notes


def test_what_is_made_in_a_pool_of_the_programs_own_takes_memory_as_elsewhere():
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = torch.zeros(1024, device="cuda")
        assert torch.cuda.memory_allocated() == x.nbytes
        assert pool.id != torch.cuda.MemPool().id
    assert any("use_mem_pool changes nothing" in note for note in device.report().step.notes)


def test_the_switches_of_tunable_ops_keep_what_the_program_says_and_no_kernel_is_tuned():
    tunable = torch.cuda.tunable
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        assert (tunable.is_enabled(), tunable.tuning_is_enabled()) == (False, True)
        tunable.enable(val=True)
        tunable.set_max_tuning_duration(7)
        assert (tunable.is_enabled(), tunable.get_max_tuning_duration()) == (True, 7)
        assert tunable.get_results() == ()
        torch.zeros(2, device="cuda").add_(1)
    assert any("torch.cuda.tunable tries no kernels" in note for note in device.report().step.notes)


def test_a_kernel_given_as_text_may_be_defined_and_is_refused_when_it_is_called():
    with flopmeter.cuda("h100-sxm5-80gb"):
        kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T one_more(T x) { return x + 1; }")
        with pytest.raises(NotImplementedError, match=r"a kernel of torch\.cuda\.jiterator is not available"):
            kernel(torch.zeros(2, device="cuda"))


def test_classes_that_say_what_torchs_functions_do_with_them_find_these_functions():
    """As TensorDict does: a table by function, made when the class is loaded, before or after the device is there."""
    made = []
    for loaded_before in (True, False):
        table = {torch.zeros_like: "zeros"} if loaded_before else {}
        with flopmeter.cuda("h100-sxm5-80gb"):
            table = table or {torch.zeros_like: "zeros"}

            class Bag:
                @classmethod
                def __torch_function__(cls, function, types, args=(), kwargs=None, *, table=table):
                    return table.get(function, NotImplemented)

            made.append(torch.zeros_like(Bag()))
    assert made == ["zeros", "zeros"]


@pytest.mark.parametrize(
    "view", [lambda x: x[:2], lambda x: x[1:], lambda x: x[::2], lambda x: x.clone(), lambda x: x[:], lambda x: x.t()]
)
def test_a_tensor_tells_whether_another_is_the_same_memory(view):
    """As on the CPU; and it costs nothing."""
    x = torch.zeros(4, 4)
    expected = x.is_set_to(view(x))
    with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        x = torch.zeros(4, 4, device="meta")
        y = view(x)
        assert x.is_set_to(y) is expected
    assert not [row for row in meter.report().rows("op") if "is_set_to" in row.name]


def test_a_deep_copy_of_a_tensor_is_on_its_device_and_shares_what_its_parts_shared():
    """Of a buffer of a module, as an average of weights copies it, and of two views of one storage."""
    with flopmeter.cuda("h100-sxm5-80gb"):
        model = torch.nn.BatchNorm1d(4).to("cuda")
        copied = copy.deepcopy(model).to("cuda")
        assert all(each.is_cuda for each in (*copied.parameters(), *copied.buffers()))
        whole = torch.zeros(6, device="cuda")
        first, second = copy.deepcopy([whole[:2], whole[2:]])
        assert first.is_cuda
        assert second.data_ptr() - first.data_ptr() == 2 * 4
        assert copy.deepcopy(torch.zeros(2, device="meta")).is_meta
        assert torch.UntypedStorage(8, device="meta").clone().device.type == "meta"
