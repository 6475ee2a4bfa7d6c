"""Which storages hold parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.records import ForwardEnd, StorageRole, Trace
from flopmeter.torch_names.private import graph_task, node_count
from flopmeter.trace.storages import Storages
from flopmeter.trace.subclasses import wrapped


class TensorRoles:
    """Notes the tensors of modules and optimizers after each has run: those that it made late exist by then, and some
    of them no op has touched."""

    def __init__(self, trace: Trace, storages: Storages) -> None:
        self._trace, self._storages = trace, storages
        self._nodes = 0  # of autograd, when the last call of an outermost module ended

    def begin(self) -> None:
        """Recording begins."""
        self._nodes = node_count()

    def note_module(self, module: nn.Module) -> None:
        """An outermost module has run."""
        if graph_task() == -1:  # else a checkpoint recomputes
            nodes = node_count()
            self._trace.forward_ends.append(ForwardEnd(len(self._trace.ops), nodes - self._nodes))
            self._nodes = nodes
        # nn.Module.buffers: a module may have an attribute of that name (that of Megatron-LM around a model does)
        for parameter in (*module.parameters(), *nn.Module.buffers(module)):
            self._note_parameter(parameter)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made its step, or another one has."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._note_parameter(parameter)
                for inner in wrapped(parameter):
                    self._storages.note_trained(inner)
        for tensor in _held_by(optimizer.state, set()):
            self._note(tensor, "optimizer state")

    def _note_parameter(self, parameter: Tensor) -> None:
        self._note(parameter, "parameters")
        if parameter.is_leaf and parameter.grad is not None:
            self._note(parameter.grad, "gradients")

    def _note(self, tensor: Tensor, role: StorageRole) -> None:
        for inner in wrapped(tensor):
            self._storages.note(inner, role)


def _held_by(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in the state of an optimizer, which may keep them in objects of its own: GaLore's projector, the
    factors of a Kronecker product. `seen` has the identities of what was looked into."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = () if isinstance(value, type) else getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from _held_by(part, seen)
