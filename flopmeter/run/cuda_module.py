"""What torch.cuda, torch.accelerator and their kin answer: the profile's facts, the allocator's model, predicted time.

Works around: a torch without a GPU, in which torch.cuda finds no device.
Until: torch answers for a device that a profile describes.

Each answer is one entry of `CudaModule.answers`; the rest of torch.cuda says by name that it is not there.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from flopmeter.as_cuda import CudaTarget
from flopmeter.device.hardware import Hardware
from flopmeter.device.sm_limits import BLOCK_THREADS, KB, SM_REGISTERS, WARP_THREADS, sm_limits
from flopmeter.run import cuda_submodules, streams
from flopmeter.run.cuda_submodules import absent, left_out
from flopmeter.run.device import NamedCuda
from flopmeter.run.device_memory import DeviceMemory
from flopmeter.run.graph_pools import graph_pool_handle
from flopmeter.run.named_types import LegacyType
from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import INDUCTOR
from flopmeter.trace.streams import host_waits

_DTYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32,
    "ShortTensor": torch.int16, "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip

# Attributes of torch.cuda that are right without a device.
_AS_THEY_ARE = {
    "amp", "graphs", "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable", "jiterator",
    "CudaError", "DeferredCudaCallError", "cudaStatus", "has_half", "has_magma", "default_generators",
    "BFloat16Storage", "BoolStorage", "ByteStorage", "CharStorage", "ComplexDoubleStorage", "ComplexFloatStorage",
    "DoubleStorage", "FloatStorage", "HalfStorage", "IntStorage", "LongStorage", "ShortStorage",
    "make_graphed_callables",
}  # fmt: skip


CUDA_VERSION = "13.0"  # what a program is told on a CPU build; nothing that is counted depends on it


class DeviceProperties(types.SimpleNamespace):
    """torch.cuda.get_device_properties(): facts of the profile and of its compute capability."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"flopmeter's profile of {self.name} has no {name!r}")


def _success(*_: Any) -> int:
    return 0  # cudaSuccess


# What programs ask of torch.cuda.cudart(): to start and stop a profiler around some steps, and to pin memory.
_RUNTIME = types.SimpleNamespace(
    cudaProfilerStart=_success, cudaProfilerStop=_success, cudaHostRegister=_success, cudaHostUnregister=_success
)


class _CurrentDevice:
    """torch.cuda.device: a context, and a type that programs test devices against."""

    choose: ClassVar[Any]  # called with a device

    def __init__(self, device: Any = None) -> None:
        self.idx = device

    def __enter__(self) -> None:
        if self.idx is not None:
            self.choose(self.idx)

    def __exit__(self, *error: object) -> None: ...


class CudaModule:
    """The answers of torch.cuda. `named.count`: how many devices there are."""

    def __init__(self, hardware: Hardware, target: CudaTarget, named: NamedCuda, memory: DeviceMemory, clock: Any):
        self._note = clock.note
        self._hardware, self._target, self._named, self._memory = hardware, target, named, memory
        self.name = hardware.aliases[0] if hardware.aliases else hardware.title
        self._event = type("Event", (streams.CudaEvent,), {"clock": clock})
        self._device = type("device", (_CurrentDevice,), {"choose": staticmethod(self._set_device)})
        self._graph = type("CUDAGraph", (streams.CudaGraph,), {"clock": clock})
        self.nvtx = NvtxRanges(clock)
        self._properties = self._facts()  # made here, since Dynamo, which traces the answer, makes no such object

    def patches(self) -> Iterator[Patch]:
        why = "answers from the profile, the allocator's model and predicted time"
        answers = self.answers()
        for name, value in answers.items():
            yield Patch(torch.cuda, name, value, why)
        for name in torch.cuda.__all__:
            if name not in answers and name not in _AS_THEY_ARE:
                refused = absent(f"torch.cuda.{name}", getattr(torch.cuda, name))
                yield Patch(torch.cuda, name, refused, "says that it is not there")
        for module in (torch.cuda.random, torch.cuda.streams, torch.cuda.graphs, torch.cuda.profiler):
            for name in answers.keys() & vars(module).keys():
                yield Patch(module, name, answers[name], "the same function, where torch defines it")
        yield Patch(torch, "Stream", streams.CudaStream, "the stream of whichever accelerator there is")
        yield Patch(torch, "Event", self._event, "the event of whichever accelerator there is")
        for_import = "bitsandbytes looks for it when it is imported"
        yield Patch(torch._C, "_cuda_getCurrentRawStream", lambda device: streams.current_stream().number, for_import)
        for name, value in self.nvtx.answers().items():
            yield Patch(torch.cuda.nvtx, name, value, "ranges are rows of the report")
        for name, dtype in _DTYPES.items():
            yield Patch(torch.cuda, name, LegacyType(name, dtype, self._named), "torch.cuda.FloatTensor and its kin")
        cudnn = torch.backends.cudnn
        yield Patch(cudnn, "is_available", lambda: True, "CUDA wheels bring cuDNN")
        yield Patch(cudnn, "version", lambda: self._target.cudnn_version, "the one that CUDA wheels bring")
        yield Patch(cudnn, "is_acceptable", lambda tensor: False, "weights of RNNs are not flattened: they are on meta")
        yield Patch(torch.backends.cuda, "is_built", _is_built, why)
        yield Patch(torch.version, "cuda", torch.version.cuda or CUDA_VERSION, "a CPU build has none")
        yield Patch(torch.compiler, "cudagraph_mark_step_begin", _nothing, "imports what CUDA builds have")
        yield from cuda_submodules.patches(answers, self._accelerator(), self._note)
        yield from self._triton_patches()
        profiler = torch.autograd.profiler.profile
        yield Patch(profiler, "__init__", self._host_alone(profiler.__init__), "there is no device to profile")

    def _triton_patches(self) -> Iterator[Patch]:
        """Patches of Triton's driver, which programs ask for the device, and of what its do_bench needs."""
        if (module := sys.modules.get("triton.backends.nvidia.driver")) is None:
            return
        utilities = types.SimpleNamespace(get_device_properties=lambda device: self._facts_for_triton())
        yield Patch(module, "CudaUtils", lambda: utilities, "there is no driver to load")
        config = sys.modules["triton.runtime"].driver
        for name in ("_default", "_active"):
            yield Patch(config, name, None, "the driver is made in the run, and forgotten after it")

    def _facts_for_triton(self) -> dict[str, Any]:
        facts = vars(self._properties)
        names = {"multiprocessor_count": "multi_processor_count", "max_num_regs": "regs_per_multiprocessor"}
        names |= {"max_shared_mem": "shared_memory_per_block_optin", "warpSize": "warp_size"}
        return {name: facts[ours] for name, ours in names.items() if ours in facts}

    def answers(self) -> dict[str, Any]:
        """The answers by their name in torch.cuda."""
        random = {"default_generators": _Generators(self._named), **_ABOUT_RANDOM}
        return {**self._about_devices(), **self._about_memory(), **self._about_streams(), **random}

    def _about_devices(self) -> dict[str, Any]:
        named = self._named
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: named.count,
            "current_device": lambda: named.index,
            "set_device": self._set_device,
            "device": self._device,
            "device_of": lambda tensor: nullcontext(),
            "get_device_name": lambda device=None: self.name,
            "get_device_capability": lambda device=None: self._target.compute_capability,
            "get_device_properties": lambda device=None: self._properties,
            "get_arch_list": lambda: ["sm_{}{}".format(*self._target.compute_capability)],
            "get_gencode_flags": lambda: "",
            "is_tf32_supported": lambda: self._target.compute_capability >= (8, 0),
            "can_device_access_peer": lambda device, peer_device: True,
            "synchronize": host_waits,
            "get_sync_debug_mode": lambda: 0,
            **dict.fromkeys(("current_blas_handle", "current_solver_handle"), lambda: 0),
            "cudart": lambda: _RUNTIME,
            **dict.fromkeys(("init", "_lazy_init", "ipc_collect", "set_sync_debug_mode", "check_error"), _nothing),
            "utilization": self._idle("torch.cuda.utilization", 0, "%"),
            "memory_usage": self._idle("torch.cuda.memory_usage", 0, "%"),
            "power_draw": self._idle("torch.cuda.power_draw", round(self._hardware.idle_watts * 1e3), "mW"),
            **self._clock_rate(),
            "_sleep": left_out("torch.cuda._sleep, which keeps the device busy,", self._note),
            "list_gpu_processes": lambda device=None: f"GPU:{named.index}\nno processes are running",
        }

    def _about_memory(self) -> dict[str, Any]:
        memory = self._memory
        return {
            "memory_allocated": lambda device=None: memory.allocated,
            "max_memory_allocated": lambda device=None: memory.peak_allocated,
            "memory_reserved": lambda device=None: memory.reserved,
            "max_memory_reserved": lambda device=None: memory.peak_reserved,
            "memory_cached": lambda device=None: memory.reserved,
            "max_memory_cached": lambda device=None: memory.peak_reserved,
            "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(),
            "reset_max_memory_allocated": lambda device=None: memory.reset_peaks(),
            "reset_max_memory_cached": lambda device=None: memory.reset_peaks(),
            **dict.fromkeys(
                (
                    "reset_accumulated_memory_stats",
                    "reset_accumulated_host_memory_stats",
                    "reset_peak_host_memory_stats",
                ),
                _nothing,
            ),
            "get_allocator_backend": lambda: "native",
            "memory_snapshot": left_out("torch.cuda.memory_snapshot", self._note, []),
            "MemPool": cuda_submodules.MemPool,
            "use_mem_pool": cuda_submodules.use_mem_pool(self._note),
            "empty_cache": memory.give_back,
            "mem_get_info": lambda device=None: memory.free_and_total(),
            "device_memory_used": lambda device=None: memory.free_and_total()[1] - memory.free_and_total()[0],
            "memory_stats": lambda device=None: self._memory_stats(),
            "memory_stats_as_nested_dict": lambda device=None: _nested(self._memory_stats()),
            "host_memory_stats": self._host_memory_stats,
            "host_memory_stats_as_nested_dict": lambda: _nested(self._host_memory_stats()),
            "memory_summary": lambda device=None, abbreviated=False: memory.summary(),
            "set_per_process_memory_fraction": memory.set_fraction,
            "get_per_process_memory_fraction": lambda device=None: memory.fraction,
        }

    def _about_streams(self) -> dict[str, Any]:
        return {
            "Stream": streams.CudaStream,
            "ExternalStream": streams.CudaStream,
            "get_stream_from_external": lambda data_ptr, device=None: streams.CudaStream(),
            "Event": self._event,
            "current_stream": streams.current_stream,
            "default_stream": streams.default_stream,
            "stream": streams.StreamContext,
            "StreamContext": streams.StreamContext,
            "set_stream": streams.set_stream,
            "CUDAGraph": self._graph,
            "graph": streams.captured,
            "graph_pool_handle": graph_pool_handle,
            "is_current_stream_capturing": lambda: streams.CudaGraph.capturing,
        }

    def _accelerator(self) -> dict[str, Any]:
        devices, memory = self._about_devices(), self._about_memory()
        return {
            "is_available": devices["is_available"],
            "device_count": devices["device_count"],
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            **dict.fromkeys(("current_device_index", "current_device_idx"), devices["current_device"]),
            **dict.fromkeys(("set_device_index", "set_device_idx"), self._set_device),
            "device_index": self._device,
            "synchronize": host_waits,
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
            "get_memory_info": memory["mem_get_info"],
            "empty_host_cache": _nothing,
            "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES.values())},
            **{
                name: memory[name]
                for name in (
                    "empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
                    "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
                )
            },
        }  # fmt: skip

    def _set_device(self, device: Any) -> None:
        device = getattr(device, "idx", device)  # of a torch.cuda.device
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None or index >= 0:  # a negative index changes nothing
            self._named.check(index)

    def _facts(self) -> DeviceProperties:
        hardware, capability = self._hardware, self._target.compute_capability
        facts: dict[str, Any] = {"name": self.name, "major": capability[0], "minor": capability[1]}
        facts |= {"multi_processor_count": hardware.sm_count, "warp_size": WARP_THREADS, "gcnArchName": self.name}
        facts |= {"is_integrated": 0, "is_multi_gpu_board": 0, "regs_per_multiprocessor": SM_REGISTERS}
        if hardware.memory_bytes is not None:
            facts["total_memory"] = hardware.memory_bytes
        if hardware.l2_cache_bytes is not None:
            facts["L2_cache_size"] = hardware.l2_cache_bytes
        limits = sm_limits(capability)
        if limits.shared_kb is not None and limits.block_shared_kb is not None:
            facts |= {"max_threads_per_multi_processor": limits.threads, "max_threads_per_block": BLOCK_THREADS}
            facts |= {"shared_memory_per_multiprocessor": limits.shared_kb * KB, "shared_memory_per_block": 48 * KB}
            facts["shared_memory_per_block_optin"] = limits.block_shared_kb * KB
        return DeviceProperties(**facts)

    def _idle(self, name: str, value: int, unit: str) -> Callable[..., int]:
        """Utilization 0, since programs ask which GPU is free."""

        def answered(device: Any = None) -> int:
            self._note(f"{name} was answered {value} {unit}: no GPU runs")
            return value

        return answered

    def _clock_rate(self) -> dict[str, Any]:
        """The boost clock, where the profile has it."""
        mhz = self._hardware.boost_clock_mhz
        return {} if mhz is None else {"clock_rate": self._idle("torch.cuda.clock_rate", round(mhz), "MHz")}

    @around
    def _host_alone(self, make: Callable[..., None], profile: Any, /, *args: Any, **kwargs: Any) -> None:
        """torch.profiler without the device's activities, about which it would warn at each op."""
        if kwargs.get("use_device") == "cuda" or kwargs.get("use_cuda"):
            self._note("torch.profiler records only the host: no GPU runs")
            kwargs |= {"use_device": None} | ({"use_cuda": False} if "use_cuda" in kwargs else {})
        make(profile, *args, **kwargs)

    def _memory_stats(self) -> OrderedDict[str, int]:
        memory = self._memory
        now_and_most = {
            "allocated_bytes": (memory.allocated, memory.peak_allocated),
            "active_bytes": (memory.allocated, memory.peak_allocated),
            "reserved_bytes": (memory.reserved, memory.peak_reserved),
        }
        stats = {"allocation.all.allocated": memory.allocations, "num_alloc_retries": 0, "num_ooms": 0}
        for name, (now, most) in now_and_most.items():
            stats |= {f"{name}.all.current": now, f"{name}.all.peak": most}
        return OrderedDict(sorted(stats.items()))

    def _host_memory_stats(self) -> OrderedDict[str, int]:
        self._note("torch.cuda.host_memory_stats was answered 0: pinned memory has no allocator here")
        counts = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
        return OrderedDict(
            (f"{each}.{when}", 0) for each in sorted(counts) for when in ("allocated", "current", "freed", "peak")
        )


def _nested(stats: Mapping[str, int]) -> dict[str, Any]:
    """A.B.C as a dictionary of dictionaries."""
    nested: dict[str, Any] = {}
    for name, value in stats.items():
        *above, last = name.split(".")
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


class NvtxRanges:
    """torch.cuda.nvtx: the ranges of the program, each with the ops that ran in it."""

    def __init__(self, clock: streams.Moments) -> None:
        self._clock = clock
        self._open: list[tuple[str, int]] = []
        self._started: dict[int, tuple[str, int]] = {}
        self.ranges: list[tuple[str, range]] = []
        self.on_end: Callable[[str], None] = lambda name: None

    def answers(self) -> dict[str, Any]:
        return {
            "range_push": self._push,
            "range_pop": self._pop,
            "range_start": self._start,
            "range_end": self._end,
            "mark": _nothing,
            "range": self._range,
        }

    def _push(self, msg: str) -> int:
        self._open.append((msg, self._clock.now()))
        return len(self._open) - 1

    def _pop(self) -> int:
        if self._open:
            self._close(self._open.pop())
        return len(self._open)

    def _start(self, msg: str) -> int:
        number = len(self._started)
        self._started[number] = (msg, self._clock.now())
        return number

    def _end(self, range_id: int) -> None:
        self._close(self._started[range_id])

    @contextmanager
    def _range(self, msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._push(msg.format(*args, **kwargs))
        try:
            yield
        finally:
            self._pop()

    def _close(self, opened: tuple[str, int]) -> None:
        name, start = opened
        self.ranges.append((name, range(start, self._clock.now())))
        self.on_end(name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, since nothing waits and nothing is cached."""


def _seed(*args: Any) -> None:
    """Random numbers of the device are unknown, whatever the seed."""


def _rng_state(device: Any = "cuda") -> torch.Tensor:
    """A state of the size of CUDA's: a seed and an offset of 8 bytes each."""
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


class _Generator:
    """A GPU's generator of random numbers: Megatron-Core keeps and sets the states of torch.cuda.default_generators."""

    def get_state(self) -> torch.Tensor:
        return _rng_state()

    def set_state(self, state: Any) -> _Generator:
        return self

    def clone_state(self) -> _Generator:
        return self

    manual_seed = graphsafe_set_state = set_state
    graphsafe_get_state = clone_state


class _Generators(Sequence[_Generator]):
    """One for each GPU of the run; of how many it is may be told by the program."""

    def __init__(self, named: NamedCuda) -> None:
        self._named, self._one = named, _Generator()

    def __len__(self) -> int:
        return self._named.count

    def __getitem__(self, index: Any) -> Any:
        return ((self._one,) * len(self))[index]


_ABOUT_RANDOM: Mapping[str, Any] = {
    "initial_seed": lambda: 0,
    "get_rng_state": _rng_state,
    "get_rng_state_all": lambda: [_rng_state()],
    **dict.fromkeys(
        ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"), _seed
    ),
}


def _is_built() -> bool:
    """Whether torch is built with CUDA: no for the compiler, whose modules would import what only CUDA builds have."""
    return not str(sys._getframe(1).f_globals.get("__name__", "")).startswith(INDUCTOR)
