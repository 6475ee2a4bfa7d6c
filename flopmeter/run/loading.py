"""What the data loaders of a step take of the host's cores. A prediction leaves that out: datasheets of GPUs do not say
how fast a program decodes its images. So it is measured on the machine that the program runs on here.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from math import ceil
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from flopmeter.report.quantities import duration
from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import BATCHES, BATCHES_OF_LOADER

SERIAL_SHARE = 0.1  # of a step: what the main process loads for longer than that is told first of all


class Loading(NamedTuple):
    """The batches that one data loader gives to a step."""

    core_seconds: float  # of one core of this machine, for all of them
    batches: int
    workers: int  # that the program asks for

    def holds_up(self, step_seconds: float) -> bool:
        """Whether the device waits for it, on a host like this one: the main process loads before it goes on, workers
        while it does."""
        if self.workers:
            return self.core_seconds / self.workers > step_seconds
        return self.core_seconds > SERIAL_SHARE * step_seconds

    def told(self, step_seconds: float) -> str:
        batches = "a batch" if self.batches == 1 else f"{self.batches} batches"
        takes = f"loading {batches} takes {duration(self.core_seconds)} of one core of this machine"
        if not self.holds_up(step_seconds):
            return f"{takes}: left out of the prediction, and hidden by num_workers={max(self.workers, 1)}"
        has = f"with num_workers={self.workers}" if self.workers else "before each step (num_workers=0)"
        needed = ceil(self.core_seconds / step_seconds)
        cores = "one such core" if needed == 1 else f"{needed:,} such cores"
        return f"{takes}, {has}: left out of the prediction, and the device would wait for it; {cores} would keep up"


class DataLoaders:
    """The loaders that a program takes batches from. `now`: the number of ops so far."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._loader_of: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()  # by its iterator
        self._taken: list[tuple[int, DataLoader[Any]]] = []
        self._seconds: dict[DataLoader[Any], float | None] = {}  # of a core, for a batch

    def patches(self) -> Iterator[Patch]:
        why = "which loaders a step takes batches from"
        yield Patch(DataLoader, BATCHES, self._begin(getattr(DataLoader, BATCHES)), why)
        yield Patch(BATCHES_OF_LOADER, "__next__", self._take(BATCHES_OF_LOADER.__next__), why)

    def of(self, step: range) -> Iterator[Loading]:
        """Of the loaders that this step takes batches from, those that can be asked for another. To be called when the
        program has ended."""
        for loader, count in Counter(loader for op, loader in self._taken if op in step).items():
            if loader not in self._seconds:
                self._seconds[loader] = _core_seconds(loader, sum(each is loader for _, each in self._taken))
            if (seconds := self._seconds[loader]) is not None:
                yield Loading(seconds * count, count, loader.num_workers)

    @around
    def _begin(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        batches = original(loader)
        self._loader_of[batches] = loader
        return batches

    @around
    def _take(self, original: Callable[..., Any], batches: Any) -> Any:
        if (loader := self._loader_of.get(batches)) is not None:
            self._taken.append((self._now(), loader))
        return original(batches)


def _core_seconds(loader: DataLoader[Any], taken: int) -> float | None:
    """What one core takes for a batch that the program has not had; None where it cannot be asked for."""
    if isinstance(loader.dataset, IterableDataset):  # a stream, which may have ended
        return None
    try:
        with _alone():
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            indices = next(islice(iter(sampler), taken, None), None)
            indices = next(iter(sampler)) if indices is None else indices
            start = time.thread_time()
            _load(loader, indices)
            return time.thread_time() - start
    except Exception:  # whatever the program's own data set raises out of its program
        return None


def _load(loader: DataLoader[Any], indices: Any) -> Any:
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        samples = dataset[indices]
    elif hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(indices)
    else:
        samples = [dataset[index] for index in indices]
    return loader.collate_fn(samples)


@contextmanager
def _alone() -> Iterator[None]:
    """On one thread, as in a worker, and with the generators of random numbers as they were afterwards."""
    threads, python, numpy = torch.get_num_threads(), random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy and numpy.random.get_state()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(of_numpy)
