"""The rule table: op -> function of its call. Rules live in the folders next to this file, by op class.

A rule takes a `Call` and returns the `Cost` of each kernel that the op launches: one, several, or none
(`FREE`). It states FLOPs; bytes follow from the touched-bytes law (traffic.py) unless it says otherwise.

Convention, for every rule (Ivanov et al., 'Data Movement Is All You Need', MLSys 2021, arXiv 2007.00072):
a multiply-add is 2 FLOP; one FLOP per arithmetic operation and element; exp, log, tanh, erf, sqrt, sin
and other library functions 1; comparison, maximum, select, cast and copy 0; integer work 0.
In complex numbers an addition is 2 real operations and a multiply 6, so a multiply-add is 8 where it is 2
in real ones: an operation that is neither (a function, a factorization) counts four times its real self.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.costs.access import Walk, walk
from flopmeter.costs.index_arithmetic import RANDOM_OPERATIONS
from flopmeter.costs.traffic import as_regions, regions
from flopmeter.records import (
    ATTENTION,
    CONTRACTION,
    MOVEMENT,
    REDUCTION,
    UNCOUNTED,
    Access,
    AttentionBackend,
    AttentionShape,
    AttentionWork,
    Call,
    Convolution,
    ConvolutionWork,
    Cost,
    KernelWork,
    Matmul,
    MatmulWork,
    MatrixWork,
    Region,
    Reread,
    Scatter,
    TensorSpec,
    ThreadGrid,
    VectorWork,
)
from flopmeter.records.dtypes import name_of
from flopmeter.records.memory_format import dense_strides
from flopmeter.torch_names.operators import Absent

Rule = Callable[[Call], "Cost | tuple[Cost, ...]"]
_SameRule = TypeVar("_SameRule", bound=Rule)
Touched = Iterable["TensorSpec | Region"] | int
"""What a kernel reads or writes: whole tensors and parts of tensors; or that many bytes of what the law names."""
RULES: dict[OpOverloadPacket | OpOverload, Rule] = {}  # an overload's own rule goes before its packet's
FREE: tuple[Cost, ...] = ()

COMPLEX_ADD, COMPLEX_MULTIPLY, COMPLEX_DIVIDE, COMPLEX_OTHER = 2, 6, 11, 4
"""Real operations in one of complex numbers. A division: ac + bd and bc - ad 6, c·c + d·d 3, and two divisions."""


def rule(*ops: OpOverloadPacket | OpOverload) -> Callable[[_SameRule], _SameRule]:
    """Enter a function into the table, for those of the ops that this torch has.

    Raises ValueError where one has a rule already.
    """

    def enter(function: _SameRule) -> _SameRule:
        for op in ops:
            if isinstance(op, Absent):
                continue
            if op in RULES:
                raise ValueError(f"{op} has a rule already: {RULES[op].__module__}.{RULES[op].__name__}")
            RULES[op] = function
        return function

    return enter


def dtype_name(call: Call) -> str:
    """The type that the op computes in: that of its first floating input, or of its output if no input is floating. (An
    fp8 matmul that writes bf16 runs on the fp8 unit.)"""
    specs = [spec for spec in (*call.inputs, *call.outputs) if spec.is_floating]
    spec = specs[0] if specs else next(iter((*call.inputs, *call.outputs)), None)
    if spec is None:
        return "fp32"
    return name_of(spec.dtype)


def is_complex(call: Call) -> bool:
    """Whether any of the call's numbers are complex."""
    return any(spec.dtype.is_complex for spec in (*call.inputs, *call.outputs))


def make_cost(
    call: Call,
    op_class: str,
    flops: int = 0,
    *,
    transcendentals: int = 0,
    read: Touched | None = None,
    written: Touched | None = None,
    fused_multiply_add: bool = False,
    complex_factor: int = COMPLEX_OTHER,
    access: Access | None = None,
    rereads: tuple[Reread, ...] = (),
    walks: Sequence[TensorSpec] | None = None,
    index_operations: int | None = None,
    scatter: Scatter | None = None,
    grid: ThreadGrid | None = None,
    blocks_host: bool | None = None,
    kernels: int = 1,
    random_numbers: int = 0,
    work: KernelWork | None = None,
) -> Cost:
    """The cost of one kernel of one class, or of several of which one class holds all work.

    read, written: what is touched; None: what the touched-bytes law says.
    complex_factor: how many real operations one operation of complex numbers is.
    walks: the operands that an element-wise kernel walks together, outputs first.
    work: of a kernel whose time depends on more than arithmetic and memory traffic. It has no rereads and no index
        operations.

    The other arguments matter for the time model alone; None: what access.py says of the op.
    """
    specs = (*call.inputs, *call.outputs)
    if not any(spec.is_floating for spec in specs):
        flops = transcendentals = 0  # integer work
    if is_complex(call):
        flops, transcendentals = complex_factor * flops, complex_factor * transcendentals
    reads, writes = _touched(call, read, written)
    walked = walk(call) if walks is None else walk(call).over(walks)
    if work is None:
        work = walked.link
    if work is None:
        indexed = walked.index_operations if index_operations is None else index_operations
        indexed += RANDOM_OPERATIONS * random_numbers
        threads, apart = walked.grid if grid is None else grid, scatter or walked.scatter
        work = VectorWork(rereads, indexed, threads, apart, kernels, random_numbers)
    return Cost(
        name=call.name,
        op_class=op_class,
        flops_by_class=((op_class, flops),),
        reads=reads,
        writes=writes,
        dtype=dtype_name(call),
        work=work,
        transcendentals=transcendentals,
        fused_multiply_add=fused_multiply_add,
        access=access or walked.access,
        blocks_host=walked.blocks_host if blocks_host is None else blocks_host,
    )


def reduced(call: Call, x: TensorSpec, *written: TensorSpec, walked: Walk, flops: int = 0) -> Cost:
    """The cost of a kernel that reduces x so, among others that the op launches."""
    operations, grid = walked.index_operations, walked.grid
    return make_cost(call, REDUCTION, flops, read=(x,), written=written, index_operations=operations, grid=grid)


def make_contraction(
    call: Call,
    matmuls: Iterable[Matmul],
    *,
    extra: tuple[tuple[str, int], ...] = (),
    read: Touched | None = None,
    written: Touched | None = None,
    transcendentals: int = 0,
) -> Cost:
    """The cost of a kernel that is one or several matmuls: 2·batch·m·n·k each.

    `extra` adds FLOPs of other classes that the same kernel does (an addmm's bias). A complex multiply-add is four real
    multiplies and four adds: 8 FLOP. Matmuls of bytes count as operations of the int8 unit. No unit multiplies matrices
    of wider integers, and no CUDA library has such matmuls: they are uncounted, so that the report lists them.
    More decides the time of a convolution, a recurrence, groups or fused attention: see the functions below.
    """
    products = tuple(matmuls)
    work = MatmulWork(products, macs_of(call, products), alignment_bytes(call), across_depth=_lies_across_depth(call))
    return make_product(call, work, extra=extra, read=read, written=written, transcendentals=transcendentals)


def make_convolution(
    call: Call,
    implicit: Matmul,
    shape: Convolution,
    *,
    read: Touched,
    written: Touched | None = None,
    extra: tuple[tuple[str, int], ...] = (),
) -> Cost:
    """A convolution, or one of its gradients: the implicit matmul, and the shape that the matmul does not tell."""
    work = ConvolutionWork(implicit, macs_of(call, [implicit]), shape)
    return make_product(call, work, extra=extra, read=read, written=written)


def make_attention(
    call: Call,
    matmuls: Collection[Matmul],
    backend: AttentionBackend,
    shape: AttentionShape,
    *,
    masked_flops: int = 0,
    recomputed_flops: int = 0,
    extra: tuple[tuple[str, int], ...] = (),
    read: Touched | None,
    written: Touched | None = None,
    transcendentals: int = 0,
    on_score: tuple[int, int] = (0, 0),
) -> Cost:
    """Fused attention: its matmuls, the library whose kernel it is, and the shape that it works on. `on_score`: FLOPs
    of a function on one score, and how many of them are transcendental."""
    adds_bias, drops = call.get("attn_bias") is not None, bool(call.get("dropout_p"))
    macs = macs_of(call, matmuls)
    work = AttentionWork(backend, shape, macs, masked_flops, recomputed_flops, *on_score, adds_bias, drops)
    return make_product(
        call, work, op_class=ATTENTION, extra=extra, read=read, written=written, transcendentals=transcendentals
    )


def make_product(
    call: Call,
    work: MatrixWork,
    *,
    op_class: str = CONTRACTION,
    extra: tuple[tuple[str, int], ...],
    read: Touched | None = None,
    written: Touched | None = None,
    transcendentals: int = 0,
) -> Cost:
    """The cost of a kernel of any sort that multiplies matrices. `work` has what the time model of the sort needs."""
    if not any(spec.is_floating or spec.dtype.itemsize == 1 for spec in call.inputs):
        return make_cost(call, UNCOUNTED, read=read, written=written)
    reads, writes = _touched(call, read, written)
    return Cost(
        name=call.name,
        op_class=op_class,
        flops_by_class=((op_class, 2 * work.macs), *(part for part in extra if part[1])),
        reads=reads,
        writes=writes,
        dtype=dtype_name(call),
        work=work,
        transcendentals=transcendentals,
    )


def macs_of(call: Call, matmuls: Iterable[Matmul]) -> int:
    """Multiply-adds of real numbers: one of complex numbers is four."""
    return (4 if is_complex(call) else 1) * sum(matmul.macs for matmul in matmuls)


def zeros(call: Call, result: TensorSpec) -> Cost:
    """A kernel that fills a result before those that write or add to some of its elements, as torch's kernels for CUDA
    do (`gradInput.zero_()`, `at::zeros_like`)."""
    return make_cost(call, MOVEMENT, read=(), written=(result,))


def scratch(like: TensorSpec, number: int = 1) -> TensorSpec:
    """A tensor of the same shape that only the kernels of the op see."""
    return like._replace(storage=-number, offset=0)


def in_one_piece(like: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The tensor with another shape, and without gaps."""
    return like._replace(shape=shape, stride=dense_strides(shape, channels_last=False))


def _touched(
    call: Call, read: Touched | None, written: Touched | None
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    law = regions(call)
    reads, writes = (
        (*(Region(spec, 0) for spec in by_law), Region(None, given))
        if isinstance(given, int)
        else as_regions(by_law if given is None else given)
        for by_law, given in zip(law, (read, written), strict=True)
    )
    return reads, writes


def _lies_across_depth(call: Call) -> bool:
    """Whether the last two operands, where they are the factors, are both stored with the depth outside."""
    matrices = [spec for spec in call.inputs if len(spec.shape) >= 2][-2:]
    if len(matrices) < 2 or matrices[0].shape[-1] != matrices[1].shape[-2]:
        return False
    left, right = matrices
    return left.stride[-1] != 1 and right.stride[-2] != 1 and min(*left.shape[-2:], right.shape[-1]) > 1


def alignment_bytes(call: Call) -> int:
    """The largest power of two, at most 16, that divides the row pitch of every matrix among the operands."""
    alignment = 16
    for spec in (*call.inputs, *call.outputs):
        for size, stride in zip(spec.shape[-2:], spec.stride[-2:], strict=True):
            if size > 1 and stride > 1:
                pitch = stride * spec.dtype.itemsize
                alignment = min(alignment, pitch & -pitch)
    return alignment
