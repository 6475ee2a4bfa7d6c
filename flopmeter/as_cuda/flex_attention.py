"""flex_attention as on CUDA: one kernel under torch.compile, else the whole matrix of scores.

Works around: torch refuses meta tensors here; and eager flex_attention depends on Dynamo, which does not run under a
dispatch mode. What Dynamo does there is done here: the tensors that a score function captures become arguments.
Until: Dynamo runs under the meter in eager programs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter.as_cuda.dynamo import compiled_region
from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher, private
from flopmeter.torch_names.private import DispatchKey, no_dispatch_modes

MATERIALISED = (
    "flex_attention ran outside of torch.compile, where it writes the whole matrix of scores, as on CUDA: compile it"
)


def install(scope: Emulation) -> None:
    """Let flex_attention run on meta tensors, without Dynamo."""
    validate = private.FLEX_VALIDATE.value

    def validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
        if not dispatcher.is_emulated(query):
            validate(query, key, value)
        elif compiled_region() is None and not torch.compiler.is_compiling():
            scope.note(MATERIALISED)

    scope.patch_private(private.FLEX_VALIDATE, validate_device)
    scope.patch_private(private.FLEX_UNCOMPILED, True)
    operator = private.FLEX_OPERATOR.value
    of_torch = operator.py_kernels[DispatchKey.Autograd]

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if type(args[0]) in (Tensor, torch.nn.Parameter) and dispatcher.is_emulated(args[0]):
            casts = torch.is_autocast_enabled("cuda") and DispatchKey.AutocastCUDA in operator.py_kernels
            with dispatcher.without_spare_autocast_key() if casts else nullcontext():
                qkv = map(_cast, args[:3]) if casts else args[:3]
                return _with_gradients(FlexArguments(*qkv, *args[3:], **kwargs))
        return of_torch(*args, **kwargs)

    _set_autograd(operator, autograd)
    scope.on_close(_set_autograd, operator, of_torch)


def _set_autograd(operator: Any, kernel: Callable[..., Any]) -> None:
    operator.py_kernels[DispatchKey.Autograd] = kernel
    operator._dispatch_cache.clear()


class FlexArguments(NamedTuple):
    """What flex_attention is passed, and its backward pass too, among others."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: dict[str, Any]
    score_buffers: tuple[Any, ...] = ()
    mask_buffers: tuple[Any, ...] = ()


def _with_gradients(given: FlexArguments) -> Any:
    """torch's autograd kernel (`flex_attention_autograd`), for tensors without values. In a compiled region the
    gradient of the score function is part of the kernel and makes nothing else."""
    query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers = given
    with private.FLEX_GETITEM.value():
        learned = () if score_buffers else tuple(t for t in captured(score_mod, query) if t.requires_grad)
        if learned:
            score_mod, score_buffers = _lifted(score_mod, learned), learned
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(tensor, Tensor) and tensor.requires_grad for tensor in (query, key, value, *score_buffers)
        )
        graphs = score_mod, None
        if needs_grad and compiled_region() is None:
            examples = tuple(scalars(query))
            with no_dispatch_modes():
                graphs = private.FLEX_GRAPHS.value(score_mod, examples, score_buffers)
        return private.FLEX_FUNCTION.value.apply(
            query, key, value, *graphs, block_mask, scale, kernel_options, mask_buffers, *score_buffers
        )


def _cast(tensor: Tensor) -> Tensor:
    """What the operator's kernel for autocast does, in a torch that has one."""
    return tensor.to(torch.get_autocast_dtype("cuda"))


def scalars(query: Tensor, *, has_score: bool = True) -> list[Tensor]:
    """A score with a gradient, and the indices of batch, head, query and key: what score_mod takes."""
    indices = [query.new_zeros((), dtype=torch.int) for _ in range(4)]
    return [query.new_zeros((), requires_grad=True), *indices] if has_score else indices


class _Finds(TorchFunctionMode):
    """Collects the tensors that a function uses but was not passed and did not make."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.known = {id(tensor): tensor for tensor in given}
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self.known:
                self.found[id(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        self.known |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


def captured(function: Callable[..., Any], query: Tensor, *, has_score: bool = True) -> tuple[Tensor, ...]:
    """The tensors that score_mod, or mask_mod, uses and was not passed, whatever closure or module holds them."""
    with no_dispatch_modes(), private.FLEX_GETITEM.value():
        arguments = scalars(query, has_score=has_score)
        with _Finds(arguments) as mode:
            function(*arguments)
    return tuple(mode.found.values())


class _Replaces(TorchFunctionMode):
    def __init__(self, others: dict[int, Tensor]):
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda leaf: self._others.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _lifted(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """The function with these captured tensors as further arguments."""

    def lifted(*args: Any) -> Tensor:
        own, others = args[: -len(tensors)], args[-len(tensors) :]
        replaced = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
        with _Replaces(replaced):
            return function(*own)

    return lifted
