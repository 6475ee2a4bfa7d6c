"""Images in NCHW, which convolutions on matrix units copy to NHWC first: the program with all of them in NHWC."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from math import prod

import torch

from flopmeter.records import ConvolutionWork, Op, TensorSpec, Trace
from flopmeter.records.memory_format import dense_strides, is_dense
from flopmeter.report.advice.copies import Whereabouts
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import in_place_of, is_view, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten, aten_overloads

# Their result has the strides of the last operand: TensorIterator gets it before the gradient (native/Activation.cpp).
_STRIDES_OF_LAST = (
    aten.threshold_backward, aten.leaky_relu_backward, aten.hardtanh_backward, aten.hardsigmoid_backward,
    aten.hardswish_backward, aten.softplus_backward,
)  # fmt: skip
_GROUP_NORMS = (aten.native_group_norm, aten.native_group_norm_backward)
GROUP_NORM_COPIES = running_version() < (2, 15)  # its input, where that is in NHWC (ATen/native/group_norm.cpp)


@remedy
def channels_last(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Convolutions of NCHW tensors on matrix units, and all other ops on the same tensors. A `.contiguous()` of an NCHW
    tensor is a no-op, so it was not recorded; in NHWC it would copy, which is not priced."""
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
    stays = _stays_nchw(trace, shapes)
    images = shapes.keys() - stays

    def converted(spec: TensorSpec, shape: object) -> TensorSpec:
        """An image, or a view of one, with the strides of NHWC. `shape`: of the whole image; None for other tensors."""
        if not isinstance(shape, tuple):
            return spec
        if _is_nchw(spec):
            return spec if _regroups(spec, shape) else _in_nhwc(spec)
        if len(shape) != 4:
            return spec
        image = spec._replace(shape=shape, stride=dense_strides(shape, channels_last=False), offset=0)
        return Whereabouts(shape, image.stride, _in_nhwc(image), 0).of(spec) or spec

    then = with_tensors(trace, converted, lambda number: shapes[number] if number in images else None)
    copies, put_in = defaultdict[int, list[Op]](list), dict[int, Op]()
    for index, op in enumerate(trace.ops):
        if op.packet in _GROUP_NORMS and GROUP_NORM_COPIES:
            put_in[index] = op
            given = op.inputs[0]  # the forward pass keeps the copy of its input for the backward pass
            if given.storage in images and _is_nchw(given):
                copies[index].append(_copy(op, converted(given, given.shape), given))
    for index, spec in _given(trace, images):
        copies[index].append(_copy(trace.ops[index], spec, converted(spec, spec.shape)))
    for index, spec in _viewed(trace, images):
        copies[index].append(_copy(trace.ops[index], converted(spec, spec.shape), spec))
    yield Proposal(
        "images lie as NCHW; matrix units take NHWC, and copies turn them",
        "model.to(memory_format=torch.channels_last), and the images",
        priced(report, with_ops(then, (), put_in, copies)),
        lambda kernel: any(number in images for number in kernel.op.storages), "convolutions and what is between them",
    )  # fmt: skip


def _in_nhwc(image: TensorSpec) -> TensorSpec:
    return image._replace(stride=dense_strides(image.shape, channels_last=True))


def _is_nchw(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and is_dense(spec.shape, spec.stride, channels_last=False)


def _regroups(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether the view splits batch and channels in another way than its image of that shape, as instance norms do,
    which view [N, C, H, W] as [1, N·C, H, W]. NHWC strides cannot express that: such a view is a copy to NCHW."""
    return spec.shape[2:] == shape[2:] and spec.shape != shape and spec.numel == prod(shape)


def _given(trace: Trace, images: Set[int]) -> Iterator[tuple[int, TensorSpec]]:
    """Images that the program does not compute from other images, each with the first op that computes an image from
    it. Point-wise ops on such images alone, such as a sum of gradients of single channels, are not converted: their
    results are, where an op reads them together with other images."""
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
    """The copy that converts an image before an op. Its result has the image's storage."""
    both = (converted, spec)
    return in_place_of(op, aten_overloads.copy_.default, both, {}, both, (converted,))


def _images(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Storages of four-dimensional tensors that convolutions touch, or that are connected to these by ops, each with
    the shape in which it first occurs."""
    images: set[int] = set()
    for ops in (trace.ops, trace.ops[::-1]):  # forwards for what is computed from them, backwards for gradients
        for op in ops:
            if _is_convolution(op) or any(number in images for number in op.storages):
                images |= {spec.storage for spec in (*op.inputs, *op.outputs) if len(spec.shape) == 4}
    shapes: dict[int, tuple[int, ...]] = {}
    for op in trace.ops:
        for spec in (*op.inputs, *op.outputs):
            if spec.storage in images and len(spec.shape) == 4:
                shapes.setdefault(spec.storage, spec.shape)
    lie_so = _channels_innermost(trace, shapes)
    return {number: shape for number, shape in shapes.items() if number not in lie_so}


def _channels_innermost(trace: Trace, shapes: Mapping[int, tuple[int, ...]]) -> set[int]:
    """What the program itself has as [N, H, W, C], as layer norms over channels take it: its strides are those of an
    image in NHWC once its dimensions are in order."""
    found: set[int] = set()
    for op in trace.ops * 2:  # what later ops tell of a gradient holds for earlier ones
        specs = [spec for spec in (*op.inputs, *op.outputs) if spec.storage in shapes and len(spec.shape) == 4]
        found |= {
            spec.storage
            for spec in specs
            if not _is_nchw(spec) and is_dense(spec.shape, spec.stride, channels_last=True)
        }
        if is_view(op) or _is_convolution(op):
            continue
        if any(_is_turned(spec) or (spec.storage in found and _is_nchw(spec)) for spec in specs):
            found |= {spec.storage for spec in specs if _is_nchw(spec)}
    return found


def _is_turned(spec: TensorSpec) -> bool:
    """Whether it is a view of an image in NCHW with its dimensions as [N, H, W, C]."""
    (n, h, w, c), (over_n, over_h, over_w, over_c) = spec.shape, spec.stride
    stride = (over_n, over_c, over_h, over_w)
    return not _is_nchw(spec) and is_dense((n, c, h, w), stride, channels_last=False)


def _is_convolution(op: Op) -> bool:
    return "convolution" in op.call.name


def _stays_nchw(trace: Trace, shapes: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Images computed from regrouped ones or from copies in NCHW: they stay NCHW until a convolution converts them."""
    found: set[int] = set()
    for op in trace.ops:
        read = [spec for spec in op.inputs if spec.storage in shapes and len(spec.shape) == 4]
        if torch.Tag.pointwise in op.call.func.tags:  # one operand decides the strides of the result
            read = read[-1:] if op.packet in _STRIDES_OF_LAST else read[:1]
        is_kept = any(spec.storage in found or _regroups(spec, shapes[spec.storage]) for spec in read)
        if (is_kept or _makes_nchw(op)) and not _is_convolution(op):
            found |= op.makes - op.reads
    return found


def _makes_nchw(op: Op) -> bool:
    """Whether its result is NCHW for any input: `.contiguous()`, and group norms before torch 2.15."""
    if op.packet is aten.clone:
        return op.call.get("memory_format") is torch.contiguous_format
    return op.packet in _GROUP_NORMS and GROUP_NORM_COPIES
