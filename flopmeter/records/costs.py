"""What a kernel does on any device: its class, FLOPs, regions read and written, and its sort of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from flopmeter.records.tensors import TensorSpec
from flopmeter.records.work import (
    AttentionBackend,
    AttentionWork,
    Collective,
    ConvolutionWork,
    FormulaWork,
    GroupedMatmulWork,
    HostCopy,
    KernelWork,
    MatmulWork,
    MatrixWork,
    RecurrentWork,
)

# Op classes in the order in which tables print them. The first three are those of the BERT table of
# 'Data Movement Is All You Need' (Ivanov et al., MLSys 2021, arXiv 2007.00072).
CONTRACTION = "tensor contraction"
NORMALIZATION = "statistical normalization"
ELEMENTWISE = "element-wise"
ATTENTION = "attention (fused)"
REDUCTION = "reduction"
MOVEMENT = "data movement"
INDEXING = "indexing"
RANDOM = "random"
SORTING = "sorting"
COMMUNICATION = "communication"
UNCOUNTED = "uncounted"
OP_CLASSES = (
    CONTRACTION, NORMALIZATION, ELEMENTWISE, ATTENTION, REDUCTION, MOVEMENT, INDEXING, RANDOM, SORTING,
    COMMUNICATION, UNCOUNTED,
)  # fmt: skip


# The access pattern of a kernel, if it is not that of its op class.
Access = Literal[
    "stream", "strided", "window", "gather", "rows", "scatter", "sort", "scan", "reduce", "normalize", "channels",
    "statistics", "chunks", "fused",
]  # fmt: skip


class Region(NamedTuple):
    """What a kernel reads or writes of one tensor.

    The tensor's storage is numbered as in the kernel's call. Numbers below 0 are scratch: memory that the op's kernels
    hand to one another, and that is gone when the op is done.
    """

    spec: TensorSpec | None  # None: bytes of no single tensor, such as those of several passes or of a fused kernel
    nbytes: int  # fewer than the tensor's where only a part is touched, or where other regions hold the rest


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """What one kernel does, on any device.

    `flops_by_class` separates the FLOPs of an addmm's matmul from those of its bias; calls, bytes and seconds count for
    `op_class` alone. A multiply-add is 2 FLOP; integer work is 0.
    """

    name: str
    op_class: str
    flops_by_class: tuple[tuple[str, int], ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    dtype: str  # of the inputs: it decides the unit that computes ('fp32', 'bf16', 'int8', ...)
    work: KernelWork  # what sort of kernel it is, and what the time model of that sort needs
    transcendentals: int = 0  # how many of the FLOPs are exp, log, tanh, erf, sqrt, sin, ...
    loop_macs: int = 0  # multiply-adds of products that the compiler writes as loops
    conversions: int = 0  # elements of one byte that the kernel makes floating-point ones of, and computes with
    fused_multiply_add: bool = False  # all FLOPs except those of matmuls are multiply-adds
    access: Access | None = None  # None: that of the op class
    blocks_host: bool = False  # the host waits for the result before it goes on (`item`, blocking copies)

    def __post_init__(self) -> None:
        is_attention, is_formula = isinstance(self.work, AttentionWork), isinstance(self.work, FormulaWork)
        if is_attention != (self.op_class == ATTENTION) and not is_formula:
            raise ValueError(
                f"the cost of {self.name} is of class '{self.op_class}', its work a {type(self.work).__name__}: fused "
                "attention, and nothing else, has an AttentionWork, which says whose kernel it is, one of "
                f"{', '.join(get_args(AttentionBackend))}; or a FormulaWork if only FLOPs are known"
            )

    @property
    def macs(self) -> int:
        """Multiply-adds of its matmuls."""
        return self.work.macs if isinstance(self.work, MatrixWork) else 0

    @property
    def collective(self) -> Collective | None:
        """What a group of ranks does together in the kernel; None if it concerns this device alone."""
        return self.work if isinstance(self.work, Collective) else None

    @property
    def link_bytes(self) -> int:
        """Bytes that it copies between host and device."""
        return self.work.link_bytes if isinstance(self.work, HostCopy) else 0

    @property
    def staged_bytes(self) -> int:
        """Those of the link's bytes that the host has to copy itself first."""
        return self.work.link_bytes if isinstance(self.work, HostCopy) and self.work.is_staged else 0

    @property
    def masked_flops(self) -> int:
        """FLOPs of a causal or windowed mask: they are in `flops`, but the kernel skips them."""
        return self.work.masked_flops if isinstance(self.work, AttentionWork) else 0

    @property
    def recomputed_flops(self) -> int:
        """FLOPs that the kernel itself computes a second time."""
        return self.work.recomputed_flops if isinstance(self.work, AttentionWork) else 0

    @property
    def masked_recomputed_flops(self) -> int:
        """Those of `recomputed_flops` that a mask hides."""
        return self.recomputed_flops - self._seen(self.recomputed_flops)

    @property
    def flops(self) -> int:
        return sum(count for _, count in self.flops_by_class)

    @property
    def model_flops(self) -> int:
        """FLOPs without the kernel's own recomputation; for MFU."""
        return self.flops - self.recomputed_flops

    @property
    def executed_flops(self) -> int:
        """FLOPs without masked blocks; for time and HFU."""
        return self.flops - self.masked_flops

    @property
    def product_flops(self) -> int:
        """Those of `executed_flops` that are of matmuls."""
        return self._seen(2 * self.macs)

    @property
    def other_flops(self) -> int:
        """The others of `executed_flops`."""
        return self.executed_flops - self.product_flops

    @property
    def flops_on_scores(self) -> int:
        """Those of `other_flops` that flex_attention's function on a score takes."""
        work = self.work
        return self._seen(work.score_flops * work.shape.scores) if isinstance(work, AttentionWork) else 0

    def _seen(self, flops: int) -> int:
        """What a mask leaves of these FLOPs: it hides the same share of each matmul and function on scores."""
        if not isinstance(self.work, AttentionWork) or not self.masked_flops:
            return flops
        unmasked = 2 * self.macs + self.work.score_flops * self.work.shape.scores
        return flops - flops * self.masked_flops // unmasked

    @property
    def bytes_read(self) -> int:
        return sum(region.nbytes for region in self.reads)

    @property
    def bytes_written(self) -> int:
        return sum(region.nbytes for region in self.writes)

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


class Switches(NamedTuple):
    """Settings of torch that decide which unit runs a matmul, as they were when the trace began."""

    matmul_tf32: bool
    cudnn_tf32: bool
    fp16_accumulate: bool

    def matmul_dtype(self, cost: Cost) -> str:
        """The dtype at whose rate the matmuls run: that of the cost, or tf32 if the switch of its library allows it."""
        if cost.dtype != "fp32":
            return cost.dtype
        match cost.work:
            case ConvolutionWork() | RecurrentWork():
                allowed = self.cudnn_tf32
            case MatmulWork() | GroupedMatmulWork() | AttentionWork():
                allowed = self.matmul_tf32
            case _:
                allowed = False
        return "tf32" if allowed else cost.dtype
