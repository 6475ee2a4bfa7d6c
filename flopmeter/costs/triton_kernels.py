"""Triton kernels of the program: FLOPs of what its programs do, in all lanes of a block, also in those that a mask
hides.

A kernel is uncounted, and listed by its name, if values in memory decide how often a loop runs, or if an operation has
no entry here. At a branch on such a value its programs go the longer way, which is an assumption of the report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from flopmeter.costs.rules import make_contraction, make_cost, rule
from flopmeter.costs.traffic import regions
from flopmeter.records import (
    ELEMENTWISE,
    MOVEMENT,
    UNCOUNTED,
    Call,
    Cost,
    Kernel,
    Matmul,
    OpsBody,
    TritonBody,
    TritonOp,
)
from flopmeter.records.bodies import ATOMICS
from flopmeter.records.dtypes import DTYPES
from flopmeter.torch_names.own_operators import own

# One call of a library function an element.
_PTX = ("ptx.ex2", "ptx.lg2", "ptx.sqrt", "ptx.rsqrt", "ptx.tanh", "ptx.sin", "ptx.cos")
_FUNCTIONS = ("math.", "tt.extern_elementwise", "tt.precise_sqrt", *_PTX)
_PLAIN = {  # FLOP an element
    **dict.fromkeys(("arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.remf", "arith.negf"), 1),
    **dict.fromkeys(("math.absf", "math.floor", "math.ceil", "tt.precise_divf", *ATOMICS), 1),
    "math.fma": 2,
    # of inline PTX
    **dict.fromkeys(("ptx.add", "ptx.sub", "ptx.mul", "ptx.div", "ptx.rcp", "ptx.neg", "ptx.abs"), 1),
    **dict.fromkeys(("ptx.fma", "ptx.mad"), 2),
}
# Selections, casts, copies, and operations that only name elements.
_FREE = frozenset(
    re.findall(
        r"\S+",
        """arith.maxnumf arith.minnumf arith.maximumf arith.minimumf arith.cmpf arith.select arith.truncf arith.extf
        arith.sitofp arith.uitofp arith.bitcast tt.bitcast tt.fp_to_fp tt.clampf tt.load tt.store tt.splat tt.unsplat
        tt.broadcast tt.expand_dims tt.reshape tt.trans tt.join tt.split tt.cat tt.gather tt.descriptor_load
        tt.descriptor_gather tt.descriptor_store tt.make_tensor_descriptor ub.poison ptx.mov ptx.setp ptx.selp ptx.max
        ptx.min ptx.cvt""",
    )
)
# Operations that load and store, by direction.
_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", *ATOMICS)
_STORES = ("tt.store", "tt.descriptor_store", *ATOMICS)


@rule(own.triton_kernel)
def triton_kernel(call: Call) -> Cost:
    """One launch. Its bytes are those of its tensors, or of what it loads and stores where that is less."""
    body = call.body
    assert isinstance(body, TritonBody)
    read, written = _touched(call, body)
    if why_uncounted(body):
        cost = make_cost(call, UNCOUNTED, read=read, written=written)
    else:
        others = [op for op in body.ops if op.dot is None]
        flops = sum(_flops(op) or 0 for op in others)
        transcendentals = sum(op.number for op in others if _is_function(op.name))
        dots = [op for op in body.ops if op.dot is not None]
        if dots:
            products = [_product(op, body.programs) for op in dots]
            dtype = _dtype(max(dots, key=lambda op: op.number))  # of most of its multiply-adds
            cost = make_contraction(
                call, products, extra=((ELEMENTWISE, flops),), transcendentals=transcendentals, read=read,
                written=written,
            )  # fmt: skip
            cost = replace(cost, dtype=dtype)
        else:
            op_class = ELEMENTWISE if flops else MOVEMENT
            cost = make_cost(call, op_class, flops, transcendentals=transcendentals, read=read, written=written)
    return replace(cost, name=body.kernel)


def triton_assumptions(kernels: Iterable[Kernel]) -> list[str]:
    """The assumption about which way programs go where they ask for values in memory."""
    bodies = [kernel.op.call.body for kernel in kernels]
    names = sorted({body.kernel for body in bodies if isinstance(body, TritonBody) and body.is_longest})
    return [f"programs of {', '.join(names)} go the longer way where values in memory decide which"] if names else []


def why_uncounted(body: TritonBody) -> str:
    """Why the kernel's FLOPs are not known; empty if they are."""
    return ", ".join(dict.fromkeys((*body.unknown, *(op.name for op in body.ops if _flops(op) is None))))


def uncounted_notes(kernels: Iterable[Kernel]) -> list[str]:
    """For each Triton kernel that is not counted: why."""
    bodies = dict.fromkeys(body for kernel in kernels for body in _bodies(kernel.op.call))
    reasons = ((body.kernel, why_uncounted(body)) for body in bodies)
    return list(dict.fromkeys(f"uncounted: the Triton kernel {name}, for {why}" for name, why in reasons if why))


def _bodies(call: Call) -> Iterator[TritonBody]:
    """Of the kernel that it launches, or of those that the Python of a custom op does."""
    if isinstance(call.body, TritonBody):
        yield call.body
    elif isinstance(call.body, OpsBody):
        for op in call.body.ops:
            yield from _bodies(op.call)


def _touched(call: Call, body: TritonBody) -> tuple[int | None, int | None]:
    """Bytes read and written, where the kernel touches less than its tensors hold; else None. Of integers
    what goes through descriptors is not seen."""
    if body.unknown or body.moves_unknown:
        return None, None
    loaded, stored = (
        sum(op.number * _bits(op) // 8 for op in body.ops if op.name in names) for names in (_LOADS, _STORES)
    )
    in_reads, in_writes = (sum(spec.nbytes for spec in specs) for specs in regions(call))
    return loaded if 0 < loaded < in_reads else None, stored if 0 < stored < in_writes else None


def _bits(op: TritonOp) -> int:
    found = re.search(r"\d+", op.dtype)
    return int(found[0]) if found else 64  # a pointer


def _flops(op: TritonOp) -> int | None:
    """FLOPs of an operation that is no product; None if they are not known."""
    if op.dot is not None or op.name in _FREE or op.dtype.startswith("i"):
        return 0
    if op.name in _PLAIN:
        return _PLAIN[op.name] * op.number
    return op.number if _is_function(op.name) else None


def _is_function(name: str) -> bool:
    return name.startswith(_FUNCTIONS) and name not in _PLAIN


def _product(op: TritonOp, programs: int) -> Matmul:
    """The matmul of a tile, as deep as all steps of a program together."""
    assert op.dot is not None
    m, n, k = op.dot
    steps, rest = divmod(op.number, programs * m * n * k)
    return Matmul(op.number // (m * n * k), m, n, k) if rest or not steps else Matmul(programs, m, n, k * steps)


def _dtype(op: TritonOp) -> str:
    names = (dtype.name for dtype in DTYPES.values() if dtype.ttir and op.dtype.startswith(dtype.ttir))
    return next(names, "fp32")
