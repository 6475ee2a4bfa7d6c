"""Python code of torch that asks for the device type: fast paths, checkpointing, flex_attention, torch.compile."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda import torch_private as private
from flopmeter.as_cuda.scope import Scope


def install_mha(scope: Scope) -> None:
    """Let nn.MultiheadAttention and nn.TransformerEncoderLayer take their one-op inference path.

    It accepts cpu, cuda and the renamed private backend; that name is read only there and where meta is listed anyway.
    """
    scope.patch(private.module(private.MHA_FAST_PATH), "_privateuse1_backend_name", "meta")

    def mask_is_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        scope.note("nn.TransformerEncoder with a padding mask: its values are not known, so no padding was left out")
        return False

    scope.kernel("aten::_nested_tensor_from_mask_left_aligned", mask_is_left_aligned, "Meta")


def install_checkpoint(scope: Scope) -> None:
    """Save and restore CUDA's autocast state around recomputation; meta has none."""
    checkpoint = private.module(private.CHECKPOINT)
    infer = checkpoint._infer_device_type

    def infer_device_type(*args: Any) -> str:
        device_type: str = infer(*args)
        return "cuda" if device_type == "meta" else device_type

    scope.patch(checkpoint, "_infer_device_type", infer_device_type)


def install_flex_attention(scope: Scope) -> None:
    """Refuse flex_attention by name: its kernel is a Triton template that only torch.compile makes."""
    flex = private.loaded(private.FLEX_ATTENTION)
    if flex is None:
        return
    validate = flex._validate_device

    def validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
        if private.is_emulated(query):
            raise NotImplementedError(
                "flex_attention cannot be metered: on a GPU it is one kernel that torch.compile generates from the "
                "score function and the block mask. Use scaled_dot_product_attention in the metered program."
            )
        validate(query, key, value)

    scope.patch(flex, "_validate_device", validate_device)


# --- torch.compile -------------------------------------------------------------------------------------------------

RAN_EAGERLY = (
    "torch.compile was called inside: its functions ran eagerly, so eager figures are those of unfused kernels"
)


@dataclass(frozen=True)
class _Region:
    """Handed to a compiled call on entering and back by it on leaving."""

    number: int
    before: _Region | None
    setting: Any  # what torch's own function returned


class CompiledRegions(threading.local):
    """Which call of a torch.compile'd function is running in this thread."""

    innermost: _Region | None = None

    @property
    def number(self) -> int | None:
        return None if self.innermost is None else self.innermost.number


def install_compile(scope: Scope, regions: CompiledRegions) -> None:
    """Run compiled functions eagerly and know when one runs.

    Under a dispatch mode torch.compile gives up on each frame, and raises with fullgraph=True; the public stance
    'force_eager' does neither. Torch is imported without its compiler: where the program has not asked for that
    yet, wait for torch.compile.
    """
    if private.loaded(private.COMPILE) is not None:
        _mark_regions(scope, regions)
        return
    compile_, marked = torch.compile, False

    @functools.wraps(compile_)
    def compile_and_mark(*args: Any, **kwargs: Any) -> Any:
        nonlocal marked
        if not marked:
            marked = True
            private.module(private.COMPILE)
            _mark_regions(scope, regions)
        return compile_(*args, **kwargs)

    scope.patch(torch, "compile", compile_and_mark)


def _mark_regions(scope: Scope, regions: CompiledRegions) -> None:
    stance = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    scope.on_close(stance.__exit__, None, None, None)
    eval_frame, count = private.module(private.COMPILE), 0
    set_unsafe = eval_frame.set_skip_guard_eval_unsafe

    def set_skip_guard_eval_unsafe(setting: Any) -> Any:
        """Called with a setting before each compiled call, and after it with what it then returned."""
        nonlocal count
        if isinstance(setting, _Region):
            regions.innermost = setting.before
            return set_unsafe(setting.setting)
        scope.note(RAN_EAGERLY)
        before = regions.innermost
        if before is None:  # a compiled call inside of one is inlined: the same region
            count += 1
        number = count if before is None else before.number
        regions.innermost = _Region(number, before, set_unsafe(setting))
        return regions.innermost

    scope.patch(eval_frame, "set_skip_guard_eval_unsafe", set_skip_guard_eval_unsafe)
