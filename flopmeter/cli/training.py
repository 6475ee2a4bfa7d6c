"""A training step of a target: forward, backward and an optimizer, with or without activation checkpointing."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from flopmeter.as_cuda import CudaTarget, emulate_cuda
from flopmeter.device.hardware import load_hardware
from flopmeter.meter import DEFAULT_HARDWARE
from flopmeter.models import Trainable
from flopmeter.models.hub_inputs import TargetError

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
    if name != "LBFGS"  # its step calls the model
}


OptimizerChoice = partial[torch.optim.Optimizer]
"""An optimizer of torch.optim with its settings, to be called with parameters."""


def optimizer_choice(text: str) -> OptimizerChoice:
    """The choice in a text such as 'sgd,momentum=0.9' or 'adamw,fused=true'.

    Raises ValueError for an optimizer that torch.optim does not have, and for settings and values that it refuses.
    """
    name, *settings = text.split(",")
    if name.lower() not in OPTIMIZERS:
        raise ValueError(f"no optimizer is named {name!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    kind = OPTIMIZERS[name.lower()]
    takes = [each for each in inspect.signature(kind).parameters if each != "params"]
    values = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in takes:
            near = difflib.get_close_matches(key, takes, n=3) or takes
            raise ValueError(f"{kind.__name__} has no setting {setting!r}; write KEY=VALUE, with KEY {', '.join(near)}")
        values[key] = yaml.safe_load(value)
    try:
        kind([nn.Parameter(torch.zeros(1, 1))], **values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} does not take {','.join(settings)}: {error}") from error
    return partial(kind, **values)


def checkpoint_blocks(name: str, model: nn.Module) -> None:
    """Makes the model keep only the inputs of its blocks, and run the blocks again in the backward pass.

    Models of transformers and timm do that themselves; in others the blocks are the outermost lists of two or more
    modules of one class. Raises TargetError for a model without such blocks.
    """
    of_transformers = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # since 5.24, and before
    if callable(enable := next((getattr(model, name) for name in of_transformers if hasattr(model, name)), None)):
        enable({"use_reentrant": False})
    elif callable(enable := getattr(model, "set_grad_checkpointing", None)):
        enable()
    elif blocks := list(_blocks(model)):
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    else:
        raise TargetError(f"{name} has no list of like blocks to checkpoint: call torch.utils.checkpoint in its code")


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        parts = list(child.children())
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(parts) > 1 and len(set(map(type, parts))) == 1:
            yield from parts
        else:
            yield from _blocks(child)


class TrainingStep:
    """Forward, backward, step of the optimizer, whose state is there from the start, as after the first step."""

    def __init__(self, name: str, model: Callable[..., Any], *, optimizer: OptimizerChoice | None, compiled: bool):
        trained = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
        if not trained:
            raise TargetError(f"{name} has no parameters to train: return an nn.Module that has, or run it untrained")
        chosen = optimizer or partial(torch.optim.AdamW)
        prepared: Callable[..., Any] = torch.compile if compiled else lambda function: function
        self._has_loss = isinstance(model, Trainable)
        self._forward = prepared(model.loss if isinstance(model, Trainable) else model)
        with _allowing(chosen.keywords):
            self._optimizer = chosen(trained)
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._step = prepared(self._optimizer.step)

    def __call__(
        self, casting: contextlib.AbstractContextManager[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        with casting:
            result = self._forward(*arguments, **keywords)
            outputs = [result] if self._has_loss else _to_differentiate(result)
        # A part of a larger model gets its own output as gradient, which costs no kernel.
        torch.autograd.backward(outputs, [None if out.ndim == 0 else out.detach() for out in outputs])
        self._step()
        self._optimizer.zero_grad()
        for leaf in tree_leaves((arguments, keywords)):
            if isinstance(leaf, Tensor):
                leaf.grad = None


@contextlib.contextmanager
def _allowing(settings: dict[str, Any]) -> Iterator[None]:
    """torch takes `fused` and `capturable` only for devices of its lists, to which the emulation of CUDA adds meta."""
    with contextlib.ExitStack() as stack:
        if settings.keys() & {"fused", "capturable"}:
            with contextlib.suppress(RuntimeError):  # a meter is open around this thread, and has added it
                stack.enter_context(emulate_cuda(CudaTarget.of(load_hardware(DEFAULT_HARDWARE))))
        yield


def _to_differentiate(output: Any) -> list[Tensor]:
    """The loss where the output has one, else every tensor that depends on parameters."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return [loss]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
