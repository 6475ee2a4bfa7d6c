"""What torch.compile asks of a GPU and of its tensors, answered as on one for the thread of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from flopmeter.as_cuda.kernels.convolution import runs_channels_last
from flopmeter.compiler.lowering import copied
from flopmeter.compiler.posing import CUDA, PosedDevice, pose, posing, unpose, unposed
from flopmeter.records.memory_format import CHANNELS_LAST
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import BACKWARD_GRAPH, PrivateName
from flopmeter.trace import triton_kernels

Wrapper = Callable[[Any], Any]
"""Given a function of torch's, it makes what stands in its place."""


class GpuAnswers:
    """Wrappers of functions of torch.compile's. `is_here`: whether this thread compiles for the session."""

    def __init__(self, device: PosedDevice, is_here: Callable[[], bool]) -> None:
        self._device, self._is_here = device, is_here

    def wrappers(self) -> Iterator[tuple[PrivateName, Wrapper]]:
        yield names.JOINT_PASSES, self._in_place_of_joint_passes
        yield names.PARTITION, self._around_partition
        yield names.SAVES_GENERATORS, self._around_generators
        yield names.FIRST_RESULTS, self._around_first_results
        yield names.DECOMPOSES_FOR_GPU, self._around_is_gpu
        yield names.SET_CAPTURABLE, self._around_set_capturable
        yield names.CONVOLUTION_LAYOUT, self._in_place_of_convolution_layout
        yield names.HAS_TRITON, self._around_has_triton
        yield names.START_OF_DEVICE, self._around_start_of_device
        if BACKWARD_GRAPH.present():
            yield BACKWARD_GRAPH, self._around_backward_graph

    @around
    def _in_place_of_joint_passes(self, plain: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
        if not self._is_here():
            return plain(module, *args, **options)
        with posing(self._device):
            pose(module)
            if "input_device" in options:
                options["input_device"] = CUDA
            return plain(module, *args, **options)

    @around
    def _around_backward_graph(self, plain: Callable[..., Any], *args: Any) -> Any:
        """Compiled autograd traces the backward graph of a compiled function, as a part of its own, with the program's
        tensors."""
        found = plain(*args)
        if not self._is_here() or not isinstance(found, GraphModule):
            return found
        on_meta = copied(found)
        unpose(on_meta)
        return on_meta

    @around
    def _around_partition(self, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with posing(self._device) if self._is_here() else contextlib.nullcontext():
            return plain(*args, **options)

    @around
    def _around_first_results(self, plain: Callable[..., Any], *args: Any) -> Any:
        """Where DDP splits a graph, the next part is traced with the results of the one before: on meta, as the
        program's tensors are, not on the device that they pose to be on."""
        return tree_map(unposed, plain(*args)) if self._is_here() else plain(*args)

    @around
    def _around_generators(self, plain: Callable[..., Any], joint: Any, forward: Any, backward: Any, *args: Any) -> Any:
        """Around a random op that the backward graph computes again, attention among them, torch puts an op that keeps
        the generator's state. That is the host's work, and would hide the op."""
        return (forward, backward) if self._is_here() else plain(joint, forward, backward, *args)

    def _around_is_gpu(self, plain: Callable[..., bool]) -> Callable[..., bool]:
        """Asked while a function is traced, when its tensors still say meta."""
        return lambda device: plain(device) or (self._is_here() and device == "meta")

    def _around_has_triton(self, plain: Callable[..., bool]) -> Callable[..., bool]:
        """Without Triton and a device for it, Dynamo would trace into what launches a kernel."""
        return lambda *args, **kwargs: plain(*args, **kwargs) or (self._is_here() and triton_kernels.is_imported())

    def _around_start_of_device(self, plain: Callable[[Any], None]) -> Callable[[Any], None]:
        """Asked for each tensor on the device that torch makes, also between the compilers of two graphs: where it
        lays out what the backward graph takes as the forward graph has left it."""
        return lambda device: None if self._is_here() else plain(device)

    @around
    def _around_set_capturable(self, plain: Callable[..., Any], variable: Any, *args: Any) -> Any:
        for group in variable.value.param_groups:
            if "capturable" in group and all(map(dispatcher.is_emulated, group["params"])):
                group["capturable"] = True
        return plain(variable, *args)

    def _in_place_of_convolution_layout(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The layout that cuDNN chooses. torch would ask cuDNN only for tensors that are on CUDA for C++ too."""

        def layout(tensor: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
            if not self._is_here() or tensor.device.type == "cpu":
                return plain(tensor, weight, backend)
            is_last = runs_channels_last(tensor, weight)
            return CHANNELS_LAST[tensor.ndim] if is_last else torch.contiguous_format

        return layout
