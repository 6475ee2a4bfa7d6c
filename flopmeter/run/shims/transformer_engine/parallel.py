"""Layers that are split over ranks (transformer_engine/pytorch/distributed.py): collectives, random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class WeightSplit(NamedTuple):
    """How a weight is split over a group. `column`: each rank has some outputs, `row`: some inputs. With `sequence` a
    rank has some rows of what is not split so."""

    mode: str | None = None
    group: Any = None
    size: int = 1
    sequence: bool = False

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.sequence

    @property
    def gathers_gradient(self) -> bool:
        return self.mode == "row" and self.sequence


def size_of(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() and group is not None else 1


def gathered(part: Tensor, split: WeightSplit, is_async: bool = False) -> tuple[Tensor, Any]:
    """The rows of all ranks. Numbers of 8 bits travel as bytes."""
    sent = part.contiguous()
    sent = sent.view(torch.uint8) if sent.dtype.itemsize == 1 else sent
    whole = sent.new_empty((sent.shape[0] * split.size, *sent.shape[1:]))
    work = dist.all_gather_into_tensor(whole, sent, group=split.group, async_op=is_async)
    return whole.view(part.dtype), work


def summed(partial: Tensor, split: WeightSplit, is_async: bool = False) -> tuple[Tensor, Any]:
    """The sum over ranks: all of it, or the rows of this rank."""
    if not split.sequence:
        return partial, dist.all_reduce(partial, group=split.group, async_op=is_async)
    part = partial.new_empty((partial.shape[0] // split.size, *partial.shape[1:]))
    return part, dist.reduce_scatter_tensor(part, partial.contiguous(), group=split.group, async_op=is_async)


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


class CudaRNGStatesTracker:
    """States of random numbers by name. (No number drawn here depends on them.)"""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"the seed {seed} or the state {name} is there already")
        self.seeds_.add(seed)
        self.states_[name] = torch.cuda.get_rng_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"the state {name} was not added")
        yield
