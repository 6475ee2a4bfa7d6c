"""Which regions of a program run in low precision (transformer_engine/pytorch/quantization.py), and the scales that are
computed once for all layers of such a region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flopmeter.run.shims.transformer_engine.casts import update_scales
from flopmeter.run.shims.transformer_engine.recipes import DelayedScaling, MXFP8BlockScaling, Recipe


class History:
    """A layer's histories for delayed scaling: the largest values of its tensors in the last steps, and their
    scales."""

    def __init__(self, tensors: int, recipe: DelayedScaling, device: Any) -> None:
        self.largest = torch.zeros(recipe.amax_history_len, tensors, device=device)
        self.scales = torch.ones(tensors, device=device)


class _PrecisionRegion:
    """The innermost region of low precision, and the histories whose scales wait for an update."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.recipe: Recipe | None = None
        self.group: Any = None
        self.depth = 0
        self.runs_again = False  # in the backward pass
        self.is_first = False  # the next layer is the first of the outermost region
        self.forward: list[History] = []
        self.backward: list[History] = []

    def begins(self) -> bool:
        """Whether this layer is the first of its region. It is the last one to get its gradients; after these the
        scales are updated."""
        was, self.is_first = self.is_first, False
        return was

    def update(self, is_forward: bool, recipe: DelayedScaling, group: Any) -> None:
        """Gathers the largest values of all layers in one tensor, takes the maximum over all ranks, and runs the kernel
        that makes the scales."""
        used = self.forward if is_forward else self.backward
        histories = list({id(each): each for each in used}.values())
        used.clear()
        if not histories:
            return
        newest = torch.cat([each.largest[0] for each in histories])
        if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
        update_scales(newest, [each.largest for each in histories], [each.scales for each in histories])


REGION = _PrecisionRegion()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    chosen = (recipe or get_default_recipe()) if enabled else None
    _check(chosen)
    REGION.is_first = REGION.is_first or REGION.depth == 0
    REGION.depth += 1
    try:
        with as_in(chosen, amax_reduction_group):
            yield
    finally:
        REGION.depth -= 1
    if REGION.depth == 0 and isinstance(chosen, DelayedScaling) and torch.is_grad_enabled():
        with torch.no_grad():
            REGION.update(True, chosen, amax_reduction_group)


@contextmanager
def as_in(recipe: Recipe | None, group: Any) -> Iterator[None]:
    """Runs a part of a program by this recipe. Scales are not updated at its end."""
    before = REGION.recipe, REGION.group
    REGION.recipe, REGION.group = recipe, group
    try:
        yield
    finally:
        REGION.recipe, REGION.group = before


def _check(recipe: Recipe | None) -> None:
    if recipe is None:
        return
    if recipe.fp8_dpa or recipe.fp8_mha:
        raise NotImplementedError(
            "flopmeter's shim of transformer_engine has no attention in fp8: leave out fp8_dpa and fp8_mha"
        )
    available, reason = _available("fp8", return_reason=True)
    if not available:
        raise RuntimeError(reason)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Any:
    """The older name of `autocast`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    if enabled:
        raise NotImplementedError(
            "flopmeter's shim of transformer_engine has no weights that are held in fp8 (fp8_model_init,"
            " quantized_model_init): leave them in bf16"
        )
    yield


def get_default_recipe() -> Recipe:
    return MXFP8BlockScaling() if torch.cuda.get_device_capability() >= (10, 0) else DelayedScaling()


_LEAST_CAPABILITY = {
    "fp8": ("fp8", (8, 9)),
    "mxfp8": ("MXFP8", (10, 0)),
    "fp8_block_scaling": ("block scaling of fp8", (9, 0)),
    "nvfp4": ("NVFP4", (10, 0)),
}


def _available(name: str, return_reason: bool = False) -> Any:
    """Whether the device has that type, and, if asked for, why not."""
    major, minor = torch.cuda.get_device_capability()
    what, least = _LEAST_CAPABILITY[name]
    has = (major, minor) >= least
    reason = "" if has else f"{what} needs compute capability {least[0]}.{least[1]}, this device has {major}.{minor}"
    return (has, reason) if return_reason else has


IS_AVAILABLE = {f"is_{name}_available": partial(_available, name) for name in _LEAST_CAPABILITY}
CHECKS = {f"check_{name}_support": partial(_available, name, return_reason=True) for name in _LEAST_CAPABILITY}


class FP8GlobalStateManager:
    """What programs ask for, and tell, about the region that they are in."""

    HAS_FP8_BLOCK_SCALING = True

    @staticmethod
    def is_fp8_enabled() -> bool:
        return REGION.recipe is not None

    @staticmethod
    def is_fp8_calibration() -> bool:
        return False

    @staticmethod
    def with_fp8_parameters() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        return REGION.recipe or get_default_recipe()

    @staticmethod
    def get_fp8_group() -> Any:
        return REGION.group

    @staticmethod
    def is_first_fp8_module() -> bool:
        return REGION.begins()

    @staticmethod
    def reset() -> None:
        REGION.begin()

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        if isinstance(REGION.recipe, DelayedScaling):
            REGION.update(forward, REGION.recipe, REGION.group)

    @staticmethod
    def set_skip_fp8_weight_update_tensor(skip: bool) -> None:
        """Only CUDA graphs read it: their kernels then write no weights anew, which is not metered."""

    @staticmethod
    def get_skip_fp8_weight_update_tensor() -> Tensor | None:
        return None
