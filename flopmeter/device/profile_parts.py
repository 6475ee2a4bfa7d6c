"""The parts of a profile that have a structure of their own, and the values that a figure of it may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flopmeter.device.schema import (
    FrozenMapping,
    SchemaRecord,
    by,
    expected,
    mapping_of,
    number,
    one_of,
    record,
    text,
    tuple_of,
    whole_number,
)
from flopmeter.records.dtypes import MATRIX_DTYPES, VECTOR_DTYPES

DtypeRates = Mapping[str, float]

amount = number("a number over 0 and at most 1e9", above=0, most=1e9)  # so that products in SI units stay finite
# A part whose real clock exceeds the spec boost reaches more than its spec peak: an RTX 5090 measures 1.2.
fraction = number("a number over 0 and at most 1.5", above=0, most=1.5)
count = whole_number(1, 1_000_000)
vector_rates = mapping_of(amount, VECTOR_DTYPES)
matrix_rates = mapping_of(amount, MATRIX_DTYPES)


def capability(value: object) -> tuple[int, int]:
    parts = tuple_of(whole_number(0, 99))(value)
    if len(parts) != 2:
        raise expected("two whole numbers such as [9, 0]", value)
    return parts[0], parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved(SchemaRecord):
    """Fractions of the spec peaks that typical large kernels reach: medians, not the best ever seen.

    A fraction without a measurement is left out; power.py estimates it from the power of the device. `matrix` is for
    fp16 and bf16, `matrix_by_dtype` for other dtypes that were measured; those and `vector` are of long runs, in which
    the clock has fallen as far as the power limit asks. `matrix_burst` is of runs too short for that (below 20 ms), in
    fp16 or bf16; without `matrix`, the law of power says what is left of it in a long run.
    limit_w: the power limit under which they were measured; without it the device's `tdp_w`.
    """

    matrix: float | None = field(default=None, metadata=by(fraction))
    matrix_burst: float | None = field(default=None, metadata=by(fraction))
    matrix_by_dtype: DtypeRates = field(default_factory=FrozenMapping, metadata=by(mapping_of(fraction, MATRIX_DTYPES)))
    vector: float | None = field(default=None, metadata=by(fraction))
    memory: float | None = field(default=None, metadata=by(fraction))
    limit_w: float | None = field(default=None, metadata=by(amount))
    source: str = field(metadata=by(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect(SchemaRecord):
    """The link between devices; the rate is the sum of both directions of one device, as vendors print it.

    `peers`: how many others a device has a link of its own to, where no switch joins them; each gets its share.
    """

    name: str = field(metadata=by(text))
    bidirectional_gb_per_s: float | None = field(default=None, metadata=by(amount))
    peers: int | None = field(default=None, metadata=by(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie(SchemaRecord):
    """The link to the host; the rate is the sum of both directions of the lanes that the device has.

    `devices` share one link from their switch to the CPU in the machines that the device comes in.
    """

    generation: int = field(metadata=by(count))
    bidirectional_gb_per_s: float = field(metadata=by(amount))
    devices: int = field(default=1, metadata=by(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCheck(SchemaRecord):
    """A second way to the rates at one clock: sm_count x flop_per_clock_per_sm x clock."""

    unit: str = field(metadata=by(one_of("vector", "matrix", "matrix_fp16_accumulate")))
    clock_mhz: float = field(metadata=by(amount))
    flop_per_clock_per_sm: DtypeRates = field(metadata=by(matrix_rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck(SchemaRecord):
    """A second way to the bandwidth: bus width x data rate of one pin."""

    bus_bits: int = field(metadata=by(count))
    gbit_per_s_per_pin: float = field(metadata=by(amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCheck(SchemaRecord):
    """A second way to compute the peaks, from other figures, as far as those are known."""

    compute: tuple[ComputeCheck, ...] = field(default=(), metadata=by(tuple_of(record(ComputeCheck))))
    memory: MemoryCheck | None = field(default=None, metadata=by(record(MemoryCheck)))


# Host time of one step in a layer of cuDNN's RNN whose weights no kernel keeps: cuDNN asks for the product's kernel
# each time. From profiles of four layers (`validation/traces`): 20 to 49 µs, less 2.2 for each call of the driver under
# the profiler, on hosts whose launches take 1.45 times as long as those of other H100s (5.6 to 6.5 µs; 3.2 to 4.5).
RECURRENT_STEP_SECONDS = 20e-6

# What autograd costs the host for an op, as parts of a view's time: to record it, and its node in the backward pass
# (the engine's queue, checks of the gradient, the sum with others). Timed on a CPU with torch 2.13, by chains of 10 and
# of 110 additions, products and views of tiny tensors: .35 to .6 µs and 1.3 to 1.8 where a view takes .75.
RECORD_VIEWS, NODE_VIEWS = 0.5, 1.9

# What a cast (`to`, `_to_copy`, `empty_strided`, `copy_`) takes beyond an op of one call, as parts of a view's time:
# 1.25 µs where a view takes .75 (the same CPU). Fits ResNet-50 under AMP on a V100, one image (NVIDIA's
# DeepLearningExamples, NGC 21.03): 2.4 ms more than in fp32 for 55 casts, on a host of 2.6 times the default.
CAST_VIEWS = 1.7

# What an op on DTensors and a functional collective take beyond the ops inside: on a CPU (torch 2.13; 2.15 is 10 %
# faster) 65 to 105 µs a collective, and then 44 an op, with the Python of tensor-parallel styles around it: 15 cases,
# a layer and four modules of `parallelize_module`, forward without and with gradients and with the backward pass, of
# which 12 are within 20 % (the embedding takes up to half more). The same modules without it take that CPU 1 / 1.6 of
# what the costs below give. An op that a program calls on DTensors itself takes 8 to 28 µs there.
DTENSOR_OP_SECONDS, FUNCTIONAL_COLLECTIVE_SECONDS = 1.6 * 44e-6, 1.6 * 85e-6

# FSDP2's hooks in Python around each group of parameters, beyond the ops in them: for a gather, with the resharding
# that follows, and for the sums of its gradients, and for each parameter of the group. The same CPU and 1.6; fitted
# to steps and forward passes of four groups of 1, 4, 9 and 27 parameters, each within 11 %.
FSDP_GATHER_SECONDS, FSDP_GATHER_EACH_SECONDS = 1.6 * 180e-6, 1.6 * 6e-6
FSDP_REDUCE_SECONDS, FSDP_REDUCE_EACH_SECONDS = 1.6 * 260e-6, 1.6 * 18e-6
# What torch.utils.checkpoint takes in Python with use_reentrant=False, forward and backward pass together, beyond the
# ops that it runs again: a checkpoint, and each tensor that is saved in it, without the two views that detach it.
# Chains of 2 to 72 modules that save 2 to 120 tensors, on one core of an AMD EPYC (Zen 4) with torch 2.13, take 170
# and 11; of these 11 the default host's views are 6. A profile of an MI300X's host with Python's calls, which slow
# it, shows 380 and 9 (AMD-AGI/TraceLens, a ResNet; how C++ calls the hooks is not in it).
CHECKPOINT_SECONDS, CHECKPOINT_EACH_SECONDS = 170e-6, 5e-6

_seconds = number("a number of seconds from 0 to 1", least=0, most=1)  # 0: for what-ifs


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(SchemaRecord):
    """What a program costs the CPU, in seconds: for each op, view, module call and kernel of compiled code.

    The defaults are those of an AMD EPYC 7742 (Zen 2, 3.4 GHz, the host of a DGX A100). Another CPU has the same costs
    times `relative_time`; a cloud's virtual Xeon of 2020 (2.2 GHz) took 1.4. Set on thirteen published runs of torch
    2.0 and 2.1 that wait for the host, from 3.97 ms (DeepLab, compiled) to 25.8 ms (Llama-2-7B decoding, eager), which
    it predicts with a mean error of 5 % and a largest one of 13 %. Set on one half of them, it predicts the other half
    within 4 to 6 %. Hosts of an H100 and an MI300X with torch 2.7 take .8 to 1.3 times as long, by four traces from
    which the profiler's own time was taken away (about .8 µs an op, .9 µs a Python call, .7 µs a call of the driver).
    `flopmeter calibrate` measures a host.

    launch_seconds: an op that launches a kernel of torch's own, with the Python that calls it.
    library_seconds: what an op takes beyond that if a library (cuBLAS, cuDNN, flash attention) has the kernel: it asks
        for an algorithm, makes descriptors and a workspace. In traces of an H100 a matmul takes the CPU 24 to 40 µs,
        an addition 8 to 12.
    view_seconds: an op that launches none.
    module_call_seconds: nn.Module.__call__ and its forward.
    triton_launch_seconds: a kernel that inductor wrote. 4 to 6 µs of CPU time; 14 in torch 2.0 and 2.1, whose launcher
        is Python. Other kernels in compiled code are called through Python and the dispatcher as in eager code.
    relative_time: of this CPU, by which all of the above are multiplied.
    copy_gb_per_s: what a thread copies between the program's memory and the driver's page-locked buffers, around a
        copy over the link to memory that is not page-locked. 8.9 GB/s on the host of an H200 (`validation/traces`:
        16.8 MB take 1.86 ms beyond the link's time).
    """

    launch_seconds: float = field(default=6.5e-6, metadata=by(_seconds))
    library_seconds: float = field(default=31e-6, metadata=by(_seconds))
    view_seconds: float = field(default=3.2e-6, metadata=by(_seconds))
    module_call_seconds: float = field(default=6e-6, metadata=by(_seconds))
    triton_launch_seconds: float = field(default=5e-6, metadata=by(_seconds))
    relative_time: float = field(default=1.0, metadata=by(amount))
    copy_gb_per_s: float = field(default=8.9, metadata=by(amount))
    source: str | None = field(default=None, metadata=by(text))

    def op_seconds(self, *, is_library: bool) -> float:
        """A call of an op that launches a kernel."""
        return self.relative_time * (self.launch_seconds + (self.library_seconds if is_library else 0.0))

    @property
    def copy_bytes_per_s(self) -> float:
        return self.copy_gb_per_s * 1e9

    @property
    def further_launch_seconds(self) -> float:
        """A kernel that a library launches in a loop of its own: what a launch adds to an op that launches none."""
        return self.relative_time * (self.launch_seconds - self.view_seconds)

    @property
    def record_seconds(self) -> float:
        """An op or a view that autograd records takes as much longer."""
        return RECORD_VIEWS * self.relative_time * self.view_seconds

    @property
    def node_seconds(self) -> float:
        """Its node in the backward pass, beside the ops that this runs."""
        return NODE_VIEWS * self.relative_time * self.view_seconds

    @property
    def cast_seconds(self) -> float:
        """What a cast takes beyond another op."""
        return CAST_VIEWS * self.relative_time * self.view_seconds

    @property
    def dtensor_op_seconds(self) -> float:
        """An op on DTensors, beside the ops on the tensors inside."""
        return self.relative_time * DTENSOR_OP_SECONDS

    @property
    def functional_collective_seconds(self) -> float:
        """A collective that returns its result, beside its op."""
        return self.relative_time * FUNCTIONAL_COLLECTIVE_SECONDS

    def fsdp_gather_seconds(self, parameters: int) -> float:
        """What FSDP2's hooks take for a group of parameters that is gathered."""
        return self.relative_time * (FSDP_GATHER_SECONDS + parameters * FSDP_GATHER_EACH_SECONDS)

    def fsdp_reduce_seconds(self, parameters: int) -> float:
        """What they take for a group whose gradients are summed over ranks."""
        return self.relative_time * (FSDP_REDUCE_SECONDS + parameters * FSDP_REDUCE_EACH_SECONDS)

    def checkpoint_seconds(self, checkpoints: float, tensors: float) -> float:
        """What checkpoints with hooks take that save so many tensors together, beside the ops that run again."""
        return self.relative_time * (checkpoints * CHECKPOINT_SECONDS + tensors * CHECKPOINT_EACH_SECONDS)

    @property
    def recurrent_step_seconds(self) -> float:
        """A product and a kernel for the gates."""
        return self.relative_time * RECURRENT_STEP_SECONDS

    @property
    def summary(self) -> str:
        """What the model of the host assumes, in one line."""
        costs = {
            "an op": self.launch_seconds,
            "more for a library's kernel": self.library_seconds,
            "a view": self.view_seconds,
            "a module call": self.module_call_seconds,
            "a compiled kernel": self.triton_launch_seconds,
            "more for what autograd records": (RECORD_VIEWS + NODE_VIEWS) * self.view_seconds,
        }
        told = ", ".join(f"{self.relative_time * seconds * 1e6:.3g} µs {what}" for what, seconds in costs.items())
        return f"the host: {told} ({self.source or 'the default, of an AMD EPYC 7742'})"

    def before_op_seconds(self, views: int, module_calls: int) -> float:
        """Views and module calls that come before it."""
        return self.relative_time * (views * self.view_seconds + module_calls * self.module_call_seconds)
