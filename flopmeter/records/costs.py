"""What a kernel does on any device: its class, FLOPs, regions read and written, and what its time model needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from flopmeter.records.collectives import CollectiveKind
from flopmeter.records.tensors import TensorSpec

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
)  # fmt: skip  # fmt: skip


Tf32Switch = Literal["matmul", "cudnn"]  # torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Matmul(NamedTuple):
    """`batch` independent matmuls [m, k] @ [k, n], as the time model needs them."""

    batch: int
    m: int
    n: int
    k: int


class Convolution(NamedTuple):
    """The shape of a convolution, beside its implicit GEMM (a Matmul whose batch is the number of groups)."""

    channels: int  # of the input that each filter sees: input channels over groups
    kernel: tuple[int, ...]
    positions: tuple[int, ...]  # spatial size of what is computed; () for a gradient of the filters
    is_dense: bool  # stride and dilation 1, not transposed
    channels_last: bool = False  # the channels of a position are contiguous: matrix units need no copy


class Recurrence(NamedTuple):
    """Steps of which each waits for the one before. `matmuls` are those of one step: one per layer and direction."""

    steps: int
    matmuls: tuple[Matmul, ...]


class Reread(NamedTuple):
    """How a kernel with a block of threads for each row works, and what it reads a second time. It depends on the
    device whether a second read hits the L2 cache: the rows that all SMs work on at a time, at `threads` threads a row,
    compete for the cache.
    """

    nbytes: int  # of second reads; 0 if a row stays in registers
    rows: int
    row_bytes: int
    threads: int  # that work on one row
    operations: int = 0  # with which each of these threads combines its partial result with the others'
    accesses: int = 0  # to memory, of each of these threads, one after the other; 0: not known to bound the kernel
    amd_threads: int = 0  # if other on AMD, whose warps have 64 threads


class Collective(NamedTuple):
    """What a group of ranks does together. Its price depends on how they are linked (device/cluster.py)."""

    kind: CollectiveKind
    nbytes: int  # of the whole tensor: after a gather, before a reduce-scatter or a scatter, as in nccl-tests
    ranks: tuple[int, ...]  # global ranks of the group, this rank's included
    gpus_per_node: int | None = None  # of the world; None: as many as the cluster has
    adds_in_switch: bool = True  # False: the switch cannot add numbers of this type


# The access pattern of a kernel, if it is not that of its op class.
Access = Literal[
    "stream", "strided", "window", "gather", "scatter", "sort", "reduce", "normalize", "channels", "statistics", "fused"
]  # fmt: skip  # fmt: skip
AttentionBackend = Literal["flash", "efficient", "cudnn", "other"]


class Mask(NamedTuple):
    """Query i sees the keys from i + shift - left to i + shift + right; None: as far as there are keys."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False  # shift is keys - queries, so that the last query sees the last key; else 0


class AttentionShape(NamedTuple):
    """What fused attention works on: squares of queries x keys, one for each sequence and head of queries."""

    sequences: int
    heads: int  # of queries
    key_heads: int  # heads / key_heads heads of queries share one head of keys and values
    queries: int  # of one sequence
    keys: int
    head_dim: int  # of q and k
    value_dim: int  # of v and the output
    mask: Mask = Mask()
    is_backward: bool = False


class Region(NamedTuple):
    """What a kernel reads or writes of one tensor.

    The tensor's storage is numbered as in the kernel's call. Numbers below 0 are scratch: memory that the op's kernels
    hand to one another, and that is gone when the op is done.
    """

    spec: TensorSpec | None  # None: passes beside the first, and what stays within the kernel
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
    macs: int = 0  # multiply-adds of contractions
    transcendentals: int = 0  # how many of the FLOPs are exp, log, tanh, erf, sqrt, sin, ...
    fused_multiply_add: bool = False  # all FLOPs beside those of contractions are multiply-adds
    recomputed_flops: int = 0  # that the kernel itself computes again (flash backward's fifth matmul)
    masked_flops: int = 0  # of a causal or windowed mask: counted in `flops`, skipped by the kernel
    matmuls: tuple[Matmul, ...] = ()
    is_grouped: bool = False  # its matmuls run at the same time if the device can (launch/grouped_matmul.py)
    tf32_switch: Tf32Switch | None = None
    alignment_bytes: int = 16  # of the rows of a matmul's operands: the largest power of two, at most 16
    may_pad: bool = False  # inductor copies unaligned operands to aligned rows where that pays
    convolution: Convolution | None = None
    recurrence: Recurrence | None = None
    attention: AttentionBackend | None = None
    attention_shape: AttentionShape | None = None  # None where only FLOPs are known (a formula of the program's own)
    access: Access | None = None  # None: that of the op class
    rereads: tuple[Reread, ...] = ()
    index_operations: int = 0  # integer operations that compute addresses, for operands with different strides
    serial_steps: int = 0  # memory accesses of a thread that wait for one another, if they bound the kernel
    link_bytes: int = 0  # of a copy between host and device
    collective: Collective | None = None
    blocks_host: bool = False  # the host waits for the result before it goes on (`item`, blocking copies)

    def __post_init__(self) -> None:
        if (self.op_class == ATTENTION) != (self.attention is not None):
            raise ValueError(
                f"the cost of {self.name} is of class '{self.op_class}' with attention={self.attention!r}: fused "
                f"attention, and nothing else, says whose kernel it is, one of {', '.join(get_args(AttentionBackend))}"
            )

    @property
    def flops(self) -> int:
        return sum(count for _, count in self.flops_by_class)

    @property
    def model_flops(self) -> int:
        """Without the kernel's own recomputation; for MFU."""
        return self.flops - self.recomputed_flops

    @property
    def executed_flops(self) -> int:
        """Without masked blocks; for time and HFU."""
        return self.flops - self.masked_flops

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
        """The dtype at whose rate the matmuls run: that of the cost, or tf32 if a switch allows it."""
        allowed = {"matmul": self.matmul_tf32, "cudnn": self.cudnn_tf32, None: False}[cost.tf32_switch]
        return "tf32" if cost.dtype == "fp32" and allowed else cost.dtype
