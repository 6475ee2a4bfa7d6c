"""Images in NCHW, which matrix units take by way of copies: the program with all of them in NHWC."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

import torch

from flopmeter.records import ConvolutionWork, Op, TensorSpec, Trace
from flopmeter.records.memory_format import dense_strides, is_dense
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import in_place_of, is_view, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten_overloads


@remedy
def channels_last(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Convolutions on NCHW tensors on matrix units, and all other ops on the same tensors."""
    works = ((kernel.cost, kernel.cost.work) for kernel in report.kernels)
    of_images = [(cost, work.shape) for cost, work in works if isinstance(work, ConvolutionWork)]
    nchw = {
        report.switches.matmul_dtype(cost)
        for cost, shape in of_images
        if len(shape.kernel) == 2 and not shape.channels_last
    }
    if not any(report.hardware.contraction_peak(name).unit == "matrix" for name in nchw):
        return
    shapes = _images(trace)
    images = shapes.keys() - _regrouped(trace, shapes)

    def converted(spec: TensorSpec, shape: object) -> TensorSpec:
        """The tensor in NHWC. `shape`: that of the image in which it lies, or None."""
        if not isinstance(shape, tuple) or not _is_nchw(spec) or _regroups(spec, shape):
            return spec
        return spec._replace(stride=dense_strides(spec.shape, channels_last=True))

    then = with_tensors(trace, converted, lambda number: shapes[number] if number in images else None)
    copies = defaultdict[int, list[Op]](list)
    for index, spec in _given(trace, images):
        copies[index].append(_copy(trace.ops[index], spec, converted(spec, spec.shape)))
    for index, spec in _viewed(trace, images):
        copies[index].append(_copy(trace.ops[index], converted(spec, spec.shape), spec))
    yield Proposal(
        "images lie as NCHW; matrix units take NHWC, and copies turn them",
        "model.to(memory_format=torch.channels_last), and the images",
        priced(report, with_ops(then, (), put_before=copies)),
        lambda kernel: any(number in images for number in kernel.op.storages), "convolutions and what is between them",
    )  # fmt: skip


def _is_nchw(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and is_dense(spec.shape, spec.stride, channels_last=False)


def _regroups(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether the view has other batches and channels than its image of that shape, as in instance norms, which take
    all channels of a batch for those of one image. In NHWC these are not neighbours: such a view is a copy to NCHW."""
    return spec.shape[2:] == shape[2:] and spec.shape != shape


def _given(trace: Trace, images: Set[int]) -> Iterator[tuple[int, TensorSpec]]:
    """Images that the program does not make from other images, each with the first op that makes something else of it.
    What point-wise ops make of such images alone, as of the gradients of single channels that they add up, lies as
    they do: it is converted where it meets others."""
    left = {number for number in images if trace.storages[number].role is None}
    for index, op in enumerate(trace.ops):
        read = [spec for spec in op.inputs if spec.device == trace.device and spec.storage in images]
        made = op.makes - op.reads
        if not read or (torch.Tag.pointwise in op.call.func.tags and all(spec.storage in left for spec in read)):
            continue
        if made & images:
            for spec in read:
                if spec.storage in left and _is_nchw(spec):
                    yield index, spec
            left -= {spec.storage for spec in read}
        left -= made


def _viewed(trace: Trace, images: Set[int]) -> Iterator[tuple[int, TensorSpec]]:
    """Views that regroup an image, each with the image."""
    for index, op in enumerate(trace.ops):
        if is_view(op):
            (image, *_), (view, *_) = op.inputs, op.outputs
            if image.storage in images and _is_nchw(image) and _regroups(view, image.shape):
                yield index, image


def _copy(op: Op, spec: TensorSpec, converted: TensorSpec) -> Op:
    """The copy that converts an image before an op. Its result has the image's place."""
    both = (converted, spec)
    return in_place_of(op, aten_overloads.copy_.default, both, {}, both, (converted,))


def _images(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Storages that convolutions touch, and those that ops on tensors of four dimensions make of them or for them, with
    the shape in which each is met first."""
    images: set[int] = set()
    for ops in (trace.ops, trace.ops[::-1]):  # forwards for what is made of them, backwards for their gradients
        for op in ops:
            if _is_convolution(op) or any(number in images for number in op.storages):
                images |= {spec.storage for spec in (*op.inputs, *op.outputs) if len(spec.shape) == 4}
    shapes: dict[int, tuple[int, ...]] = {}
    for op in trace.ops:
        for spec in (*op.inputs, *op.outputs):
            if spec.storage in images and len(spec.shape) == 4:
                shapes.setdefault(spec.storage, spec.shape)
    return shapes


def _is_convolution(op: Op) -> bool:
    return "convolution" in op.call.name


def _regrouped(trace: Trace, shapes: Mapping[int, tuple[int, ...]]) -> set[int]:
    """What is made of images that are regrouped, until a convolution converts it: it stays in NCHW."""
    found: set[int] = set()
    for op in trace.ops:
        read = [spec for spec in op.inputs if spec.storage in shapes and len(spec.shape) == 4]
        is_kept = any(spec.storage in found or _regroups(spec, shapes[spec.storage]) for spec in read)
        if is_kept and not _is_convolution(op):
            found |= op.makes - op.reads
    return found
