"""What torch.cuda answers in a run, function by function, by hand: of an H100, after tensors that are given."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import flopmeter
from flopmeter.run.cuda_module import NvtxRanges
from flopmeter.run.device import NamedCuda, OtherDeviceError

H100 = "h100-sxm5-80gb"
KB, MB, GB = 1024, 2**20, 10**9


def test_the_properties_are_those_of_the_data_sheet_and_of_the_compute_capability():
    """NVIDIA's data sheet, torch's bytes of memory, and the CUDA programming guide's table of capability 9.0."""
    with flopmeter.cuda(H100):
        facts = vars(torch.cuda.get_device_properties())
        with pytest.raises(AttributeError, match="flopmeter's profile of NVIDIA H100 80GB HBM3 has no 'uuid'"):
            torch.cuda.get_device_properties().uuid  # noqa: B018
    assert facts == {
        "name": "NVIDIA H100 80GB HBM3", "gcnArchName": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0,
        "multi_processor_count": 132, "warp_size": 32, "is_integrated": 0, "is_multi_gpu_board": 0,
        "regs_per_multiprocessor": 65536, "total_memory": 85 * GB, "L2_cache_size": 50 * MB,
        "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
        "shared_memory_per_multiprocessor": 228 * KB, "shared_memory_per_block": 48 * KB,
        "shared_memory_per_block_optin": 227 * KB,
    }  # fmt: skip


@pytest.mark.parametrize(("device", "capability", "has_tf32"), [(H100, (9, 0), True), ("t4", (7, 5), False)])
def test_the_device_is_the_one_and_current_one(device, capability, has_tf32):
    with flopmeter.cuda(device):
        cuda = torch.cuda
        assert (cuda.is_available(), cuda.is_initialized()) == (True, True)
        assert (cuda.device_count(), cuda.current_device()) == (1, 0)
        assert (cuda.get_device_capability(), cuda.is_tf32_supported()) == (capability, has_tf32)
        assert cuda.get_arch_list() == [f"sm_{capability[0]}{capability[1]}"]
        assert (cuda.get_gencode_flags(), cuda.get_sync_debug_mode(), cuda.current_blas_handle()) == ("", 0, 0)
        assert cuda.can_device_access_peer(0, 1)
        assert cuda.cudart().cudaHostRegister(0, 1, 2) == 0
        assert cuda.list_gpu_processes() == "GPU:0\nno processes are running"
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.current_device_index() == 0
        assert (torch.accelerator.is_available(), torch.accelerator.device_count()) == (True, 1)
        assert torch.backends.cudnn.is_available()
        assert torch.backends.cuda.is_built()
        assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties("cuda:0").name
        assert torch.get_device_module("cuda") is torch.cuda


def test_a_device_is_chosen_by_index_name_or_context_and_another_one_is_refused():
    named = NamedCuda(count=4, index=2)
    named.check(2)
    named.check(None)
    for other in (0, 3):
        with pytest.raises(OtherDeviceError, match=f"cuda:{other}, and this process is metered as cuda:2"):
            named.check(other)
    for none in (4, -1):
        with pytest.raises(OtherDeviceError, match=f"there is no cuda:{none} among 4"):
            named.check(none)
    with flopmeter.cuda(H100) as device:
        for way in (0, "cuda:0", torch.device("cuda", 0), torch.device("cuda"), torch.cuda.device(0), -1):
            torch.cuda.set_device(way)
            torch.accelerator.set_device_index(way)
        with torch.cuda.device(0), torch.cuda.device(None), torch.cuda.device_of(torch.zeros(1)):
            assert torch.zeros(1, device=0).device == torch.device("cuda", 0)
        assert isinstance(torch.cuda.device("cuda"), torch.cuda.device)
        assert torch.zeros(1).to(device).is_cuda
        with pytest.raises(OtherDeviceError):
            torch.cuda.set_device(1)


def test_memory_is_told_as_the_allocator_has_it():
    """1 MB, then 3 MiB more that are freed again: blocks of 512 bytes in segments of 2 MiB, from 1 MiB on of 20."""
    with flopmeter.cuda(H100):
        cuda, small = torch.cuda, -(-1_000_000 // 512) * 512
        kept = torch.empty(1_000_000, dtype=torch.uint8, device="cuda")
        freed = torch.empty(3 * MB, dtype=torch.uint8, device="cuda")
        peaks = (cuda.max_memory_allocated(), cuda.max_memory_reserved(), cuda.max_memory_cached())
        assert peaks == (small + 3 * MB, 22 * MB, 22 * MB)
        del freed
        assert (cuda.memory_allocated(), cuda.memory_reserved(), cuda.memory_cached()) == (small, 22 * MB, 22 * MB)
        assert cuda.memory_stats() == torch.accelerator.memory_stats() == {
            "allocation.all.allocated": 2, "num_alloc_retries": 0, "num_ooms": 0,
            "allocated_bytes.all.current": small, "allocated_bytes.all.peak": small + 3 * MB,
            "active_bytes.all.current": small, "active_bytes.all.peak": small + 3 * MB,
            "reserved_bytes.all.current": 22 * MB, "reserved_bytes.all.peak": 22 * MB,
        }  # fmt: skip
        assert list(cuda.memory_stats()) == sorted(cuda.memory_stats())
        assert cuda.memory_stats_as_nested_dict()["reserved_bytes"] == {"all": {"current": 22 * MB, "peak": 22 * MB}}
        cuda.empty_cache()
        assert cuda.memory_reserved() == 2 * MB
        free, total = cuda.mem_get_info()
        assert (total, cuda.device_memory_used()) == (85 * GB, total - free)
        assert torch.accelerator.get_memory_info() == (free, total)
        cuda.reset_peak_memory_stats()
        assert (cuda.max_memory_allocated(), cuda.max_memory_reserved()) == (kept.nbytes + 448, 2 * MB)
        assert cuda.memory_summary().startswith("allocated 0.95 MiB (peak 0.95 MiB), reserved 2.00 MiB (peak 2.00 MiB)")
        assert (cuda.get_allocator_backend(), cuda.get_per_process_memory_fraction()) == ("native", 1.0)
        cuda.set_per_process_memory_fraction(0.25)
        assert cuda.get_per_process_memory_fraction() == 0.25
        assert set(cuda.host_memory_stats().values()) == {0}
        assert len(cuda.host_memory_stats()) == 16
        assert cuda.host_memory_stats_as_nested_dict()["active_bytes"] == dict.fromkeys(
            ("allocated", "current", "freed", "peak"), 0
        )


def test_ranges_hold_the_ops_between_their_ends_whether_they_nest_or_not():
    """Two ops run between any two calls."""
    numbers, ended = itertools.count(0, 2), []
    nvtx = NvtxRanges(SimpleNamespace(now=lambda: next(numbers)))
    nvtx.on_end = ended.append
    own = SimpleNamespace(**nvtx.answers())
    assert own.range_pop() == 0  # there is none
    assert [own.range_push("outer"), own.range_push("inner")] == [0, 1]
    first, second = own.range_start("first"), own.range_start("second")
    assert own.range_pop() == 1
    own.range_end(second)
    own.mark("here")
    assert own.range_pop() == 0
    own.range_end(first)
    with pytest.raises(KeyError, match="stop"), own.range("layer {} of {n}", 7, n=9):
        raise KeyError("stop")
    assert [(name, each.start, each.stop) for name, each in nvtx.ranges] == [
        ("inner", 2, 8), ("second", 6, 10), ("outer", 0, 12), ("first", 4, 14), ("layer 7 of 9", 16, 18)
    ]  # fmt: skip
    assert ended == [name for name, _ in nvtx.ranges]


def test_states_of_random_numbers_are_as_large_as_those_of_cuda_and_seeds_change_nothing():
    with flopmeter.cuda(H100):
        cuda = torch.cuda
        assert cuda.initial_seed() == 0
        states = [cuda.get_rng_state(), *cuda.get_rng_state_all(), cuda.default_generators[0].get_state()]
        told = [(each.dtype, tuple(each.shape), each.device.type) for each in states]
        assert told == [(torch.uint8, (16,), "cpu")] * 3
        for function, given in ((cuda.manual_seed, (1,)), (cuda.seed_all, ()), (cuda.set_rng_state, (states[0],))):
            assert function(*given) is None
        generators = cuda.default_generators
        assert len(generators) == len(list(generators)) == 1
        assert generators[0].manual_seed(3) is generators[0].clone_state() is generators[0]


def test_types_named_for_cuda_make_and_tell_tensors_of_their_number_type():
    kinds = {"FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
             "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32,
             "ShortTensor": torch.int16, "CharTensor": torch.int8, "ByteTensor": torch.uint8,
             "BoolTensor": torch.bool}  # fmt: skip
    with flopmeter.cuda(H100):
        for name, dtype in kinds.items():
            kind = getattr(torch.cuda, name)
            made = kind(2, 3)
            assert (made.dtype, made.shape, made.is_cuda) == (dtype, (2, 3), True)
            assert made.type() == f"torch.cuda.{name}"
            assert isinstance(made, kind)
            assert not isinstance(torch.zeros(1, dtype=dtype), kind)
            for asked in (kind, f"torch.cuda.{name}"):
                assert torch.zeros(2).type(asked).type() == f"torch.cuda.{name}"
        assert torch.zeros(1, device="cuda").type(torch.float64).type() == "torch.cuda.DoubleTensor"
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_pinned_memory_is_told_apart_and_pinned_once():
    with flopmeter.cuda(H100):
        x = torch.ones(2, 3, requires_grad=True)
        pinned = x.pin_memory()
        assert (x.is_pinned(), pinned.is_pinned(), pinned.requires_grad) == (False, True, True)
        assert pinned.pin_memory() is pinned
        assert torch.equal(x, pinned)
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert not torch.empty(3, pin_memory=False).is_pinned()
        with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.cuda\.FloatTensor' only dense CPU tensors"):
            torch.zeros(1, device="cuda").pin_memory()


def test_a_tensor_tells_its_device_and_whether_it_is_one_of_the_gpus():
    with flopmeter.cuda(H100):
        on_gpu, on_cpu, on_meta = (torch.zeros(2, 3, device=each) for each in ("cuda", "cpu", "meta"))
        told = [(each.device.type, each.is_cuda, each.is_meta) for each in (on_gpu, on_cpu, on_meta)]
        assert told == [("cuda", True, False), ("cpu", False, False), ("meta", False, True)]
        assert (on_gpu.get_device(), on_cpu.get_device()) == (0, -1)
        assert on_gpu.data_ptr() == on_gpu.view(6).data_ptr() != torch.zeros(2, 3, device="cuda").data_ptr()
        assert on_gpu[1].data_ptr() - on_gpu.data_ptr() == 3 * 4
        assert on_gpu.untyped_storage().is_shared()
        assert not on_cpu.untyped_storage().is_shared()
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            on_meta.to("cuda")
        assert on_meta.to(torch.float16).is_meta
        ones = torch.ones(2, device="cuda", requires_grad=True)
        assert str(ones) == "tensor([1., 1.], device='cuda:0', requires_grad=True)"
        assert str(ones * 2).endswith("], device='cuda:0', grad_fn=<MulBackward0>)")


def test_modules_move_to_the_gpu_by_each_of_its_names_and_back():
    with flopmeter.cuda(H100) as device:
        for where in (0, "cuda", device, torch.device("cuda:0")):
            layer = torch.nn.Linear(2, 2)
            weight, held = layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1).param_groups[0]["params"][0]
            assert layer.to(where).weight.is_cuda
            assert layer.weight is weight is held
            assert torch.nn.Linear(2, 2).to(device=where, dtype=torch.float16).weight.is_cuda
            assert torch.nn.Linear(2, 2).cuda(where).weight.is_cuda
        assert not layer.cpu().weight.is_cuda
        assert torch.zeros(2).cuda().is_cuda
        assert torch.zeros(2).cuda(0, non_blocking=True).is_cuda
        with pytest.raises(OtherDeviceError):
            layer.to(1)


def test_memory_that_each_step_gives_back_to_the_driver_is_told_of():
    """64 MiB of a tensor that each step makes anew. A step without it is silent."""
    said = {}
    for clears in (False, True):
        with flopmeter.cuda(H100) as run:
            model = torch.nn.Linear(8, 8, device="cuda")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                large = torch.empty(64 * MB, dtype=torch.uint8, device="cuda").zero_()
                model(torch.ones(8, 8, device="cuda")).sum().backward()
                optimizer.step()
                del large
                if clears:
                    torch.cuda.empty_cache()
        said[clears] = [note for note in run.report().step.notes if "empty_cache" in note]
    assert not said[False]
    (note,) = said[True]
    assert "gives 67.1 MB back in each step" in note
