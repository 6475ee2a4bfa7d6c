"""Sizes of weights that break the alignment of rows."""

from __future__ import annotations

from collections.abc import Iterator

from flopmeter.records import TensorSpec, Trace, matmuls_of
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import with_tensors
from flopmeter.report.advice.spots import alignment_of, odd_width
from flopmeter.report.report import Report
from flopmeter.timing import constants

PADDED_TO = 64  # tiles of matmuls have multiples of this


@remedy
def padded_widths(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Sizes of weights that break the alignment of rows, such as a vocabulary of 50257."""
    sizes = {
        size
        for kernel in report.kernels
        if kernel.cost.macs and alignment_of(kernel.cost) < constants.FULL_ALIGNMENT_BYTES
        if (size := odd_width(kernel.cost)) is not None
    }
    weights = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
    widths = {
        spec.shape[dim]
        for op in trace.ops
        for spec in op.inputs
        if spec.storage in weights
        for dim in range(len(spec.shape))
    }
    to = {size: -(-size // PADDED_TO) * PADDED_TO for size in sizes & widths if size > PADDED_TO}
    if not to:
        return

    def padded(spec: TensorSpec, _: object) -> TensorSpec:
        return _resized(spec, to) if to.keys() & set(spec.shape) else spec

    listed = ", ".join(f"{size} to {larger}" for size, larger in sorted(to.items()))
    yield Proposal(
        f"odd width {', '.join(map(str, sorted(to)))}: rows of it are not aligned to 16 bytes",
        f"pad {listed} (a multiple of {PADDED_TO}) and ignore the rest", priced(report, with_tensors(trace, padded)),
        lambda kernel: any(to.keys() & set(shape[1:]) for shape in matmuls_of(kernel.cost.work)),
    )  # fmt: skip


def _resized(spec: TensorSpec, to: dict[int, int]) -> TensorSpec:
    """The tensor with other sizes; strides over a dimension that grew grow with it."""
    stride = list(spec.stride)
    for dim, size in enumerate(spec.shape):
        if size in to:
            outer = [other for other in range(len(stride)) if stride[other] >= max(spec.stride[dim], 1) * size]
            for other in outer:
                stride[other] = stride[other] // size * to[size] if stride[other] % size == 0 else stride[other]
    return spec._replace(shape=tuple(to.get(size, size) for size in spec.shape), stride=tuple(stride))
