"""Images in NCHW, which matrix units take by way of copies: the program with all of them in NHWC."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flopmeter.records import ConvolutionWork, Op, TensorSpec, Trace
from flopmeter.records.memory_format import dense_strides, is_dense
from flopmeter.report.advice.remedies import Proposal, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import in_place_of, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten_overloads


@remedy
def channels_last(report: Report) -> Iterator[Proposal]:
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
    trace = trace_of(report)
    images = _images(trace)

    def turned(spec: TensorSpec, is_image: object) -> TensorSpec:
        strides = dense_strides(spec.shape, channels_last=True)
        return spec._replace(stride=strides) if is_image and _is_nchw(spec) else spec

    then = with_tensors(trace, turned, lambda number: number in images)
    turns = {index: _turn(trace.ops[index], spec, turned(spec, True)) for index, spec in _given(trace, images)}
    yield Proposal(
        "convolutions and what is between them", lambda kernel: any(number in images for number in kernel.op.storages),
        "images lie as NCHW; matrix units take NHWC, and copies turn them",
        "model.to(memory_format=torch.channels_last), and the images",
        priced(report, with_ops(then, (), put_before=turns)),
    )  # fmt: skip


def _is_nchw(spec: TensorSpec) -> bool:
    return len(spec.shape) == 4 and is_dense(spec.shape, spec.stride, channels_last=False)


def _given(trace: Trace, images: set[int]) -> Iterator[tuple[int, TensorSpec]]:
    """Images that the program makes of no others, each with the op that makes something else of it first."""
    left = {number for number in images if trace.storages[number].role is None}
    for index, op in enumerate(trace.ops):
        read = [spec for spec in op.inputs if spec.device == trace.device and spec.storage in images]
        made = {spec.storage for spec in op.outputs} - {spec.storage for spec in op.inputs}
        if read and made & images:
            for spec in read:
                if spec.storage in left and _is_nchw(spec):
                    yield index, spec
            left -= {spec.storage for spec in read}
        if read:
            left -= made


def _turn(op: Op, spec: TensorSpec, turned: TensorSpec) -> Op:
    """The copy that turns an image before an op. Its result has the image's place, which does not change the price."""
    options = {"memory_format": torch.channels_last}
    return in_place_of(op, aten_overloads.clone.default, (spec,), options, (spec,), (turned,))


def _images(trace: Trace) -> set[int]:
    """Storages that convolutions touch, and those that ops on tensors of four dimensions make of them or for them."""
    images: set[int] = set()
    for ops in (trace.ops, trace.ops[::-1]):  # forwards for what is made of them, backwards for their gradients
        for op in ops:
            is_convolution = "convolution" in op.call.name
            if is_convolution or any(number in images for number in op.storages):
                images |= {spec.storage for spec in (*op.inputs, *op.outputs) if len(spec.shape) == 4}
    return images
