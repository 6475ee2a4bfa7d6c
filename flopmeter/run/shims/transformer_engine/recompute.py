"""Checkpoints (transformer_engine/pytorch/distributed.py): activations are computed again in the backward pass, in the
precision of the region that they were in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torchs

from flopmeter.run.shims.transformer_engine.state import REGION, as_in


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **options: Any) -> Any:
    if options.pop("distribute_saved_activations", False):
        raise NotImplementedError(
            "flopmeter's shim of transformer_engine has no distribute_saved_activations: leave it out"
        )
    for name in ("get_rng_state_tracker", "tp_group", "determinism_check", "context_fn", "debug"):
        options.pop(name, None)
    recipe, group = REGION.recipe, REGION.group

    def run(*inputs: Any) -> Any:
        with as_in(recipe, group):
            return function(*inputs, **options)

    with torchs.set_checkpoint_early_stop(False), activation_recompute_forward(recipe is not None):
        return torchs.checkpoint(run, *args, use_reentrant=use_reentrant)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Around both runs of what is computed again: the first one keeps what only the second needs."""
    before, REGION.runs_again = REGION.runs_again, activation_recompute and not recompute_phase
    try:
        yield
    finally:
        REGION.runs_again = before


def is_fp8_activation_recompute_enabled() -> bool:
    return REGION.runs_again


def in_fp8_activation_recompute_phase() -> bool:
    return False
