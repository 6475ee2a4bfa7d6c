"""Launches of the program's own Triton kernels in a compiled graph: inductor leaves the kernels as they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from flopmeter.compiler.origins import origin_of
from flopmeter.compiler.regions import Sizes
from flopmeter.records import Call, CompiledKernel, Region, TensorSpec
from flopmeter.torch_names import compiler as names
from flopmeter.trace.recorder import Recorder
from flopmeter.trace.triton_kernels import LAUNCH, Analysed, analysed, note_choice
from flopmeter.trace.triton_tuning import first_fitting

Described = Mapping[str, TensorSpec | Any]
"""The arguments of a launch by name: tensors as they lie in memory, numbers."""


def launch_of(
    operation: Any,
    arguments: Described,
    tiles: Mapping[str, Sequence[int]],
    sizes: Sizes,
    recorder: Recorder,
    scheduler_bytes: int,
    *,
    is_backward: bool,
) -> tuple[Call, CompiledKernel] | None:
    """The launch that an operation of inductor's stands for. `tiles`: those of the arguments that are descriptors. None
    where that cannot be told: heuristics choose the constants of the kernel."""
    kernel = names.TRITON_KERNELS.value.get_kernel(operation.kernel_idx)
    configs: Sequence[Mapping[str, Any]] = [{}]
    if isinstance(kernel, sys.modules["triton.runtime.autotuner"].Autotuner):  # inductor times the configurations
        note_choice(kernel, recorder)
        kernel, configs = kernel.fn, [config.all_kwargs() for config in kernel.configs]
    if not isinstance(kernel, sys.modules["triton.runtime.jit"].JITFunction):
        return None
    tensors_too = {name: _as_tensor(value) for name, value in arguments.items()}
    grids = operation.grid if len(operation.grid) == len(configs) else operation.grid[:1] * len(configs)

    def with_constants(place: int) -> Analysed:
        known = {**configs[place], **tensors_too}
        given = {name: known[name] for name in kernel.arg_names if name in known}
        return analysed(kernel, given, tuple(map(sizes, grids[place])), tiles)

    bodies = [lambda place=place: with_constants(place).body for place in range(len(configs))]
    found = with_constants(first_fitting(bodies) if len(configs) > 1 else 0)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, TensorSpec)}
    read, written, updated = found.by_use(tensors)
    call = Call(LAUNCH, (read, written, updated), {}, (*read, *written, *updated), (), body=found.body)
    fx = next(node for node in operation.origins if isinstance(node.target, HigherOrderOperator))
    origin = origin_of(fx, call, is_backward=is_backward)._replace(op=found.body.kernel)
    reads, writes = (
        tuple(Region(spec, spec.nbytes) for spec in dict.fromkeys(specs))
        for specs in ((*read, *updated), (*written, *updated))
    )
    return call, CompiledKernel(found.body.kernel, "library", reads, writes, (origin,), scheduler_bytes)


def _as_tensor(value: TensorSpec | Any) -> Any:
    return torch.empty(0, dtype=value.dtype, device="cpu") if isinstance(value, TensorSpec) else value
