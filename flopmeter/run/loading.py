"""What the data loaders of a step take of the host's cores. A prediction leaves that out: datasheets of GPUs do not say
how fast a program decodes its images. So it is measured on the machine that the program runs on here.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from flopmeter.report.quantities import duration
from flopmeter.run.patches import Patch
from flopmeter.run.world import environment
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import BATCHES, BATCHES_OF_LOADER, KIND_OF_DATA

SERIAL_SHARE = 0.1  # of a step: what the main process loads for longer than that is told first of all
PATIENCE_S = 10.0  # for a batch, beyond what the program has waited for its own
AS_IN_A_WORKER = {"TOKENIZERS_PARALLELISM": "false"}  # as tokenizers of Hugging Face are once a process was forked


class Loading(NamedTuple):
    """The batches that one data loader gives to a step."""

    data: str  # the class of its data set, where the step has several
    core_seconds: float  # of one core of this machine, for all of them, without what the prediction has
    batches: int
    workers: int  # that the program asks for

    def holds_up(self, step_seconds: float) -> bool:
        """Whether the device waits for it, on a host like this one: the main process loads before it goes on, workers
        while it does."""
        if self.workers:
            return self.core_seconds / self.workers > step_seconds
        return self.core_seconds > SERIAL_SHARE * step_seconds

    def told(self, step_seconds: float) -> str:
        batches = ("a batch" if self.batches == 1 else f"{self.batches} batches") + (self.data and f" of {self.data}")
        takes = f"loading {batches} takes {duration(self.core_seconds)} of one core of this machine"
        if not self.holds_up(step_seconds):
            return f"{takes}: left out of the prediction, and hidden by num_workers={max(self.workers, 1)}"
        has = f"with num_workers={self.workers}" if self.workers else "before each step (num_workers=0)"
        needed = ceil(self.core_seconds / step_seconds)
        cores = "one such core" if needed == 1 else f"{needed:,} such cores"
        return f"{takes}, {has}: left out of the prediction, and the device would wait for it; {cores} would keep up"


class DataLoaders:
    """The loaders that a program takes batches from. `now`: the number of ops so far. `is_on_device`: whether one of
    these ops ran there, so that the prediction has what makes the batch. `op_seconds`: what it has for any other op."""

    def __init__(self, now: Callable[[], int], is_on_device: Callable[[range], bool], op_seconds: float) -> None:
        self._now, self._is_on_device, self._op_seconds = now, is_on_device, op_seconds
        self._source_of: WeakKeyDictionary[Any, _DataSource] = WeakKeyDictionary()  # by the loader, and by its iterator
        self._taken: list[tuple[range, _DataSource]] = []  # by the ops that made the batch in this process

    def patches(self) -> Iterator[Patch]:
        why = "which loaders a step takes batches from"
        yield Patch(DataLoader, BATCHES, self._begin(getattr(DataLoader, BATCHES)), why)
        yield Patch(BATCHES_OF_LOADER, "__next__", self._take(BATCHES_OF_LOADER.__next__), why)

    def of(self, step: range) -> list[Loading]:
        """Of the loaders that this step takes batches from, those that can be asked for another. To be called when the
        program has ended."""
        taken = defaultdict[tuple[int, int], list[tuple[_DataSource, int]]](list)
        for ops, source in self._taken:
            if ops.start in step:
                taken[id(source.dataset), source.workers].append((source, len(ops)))
        return list(self._loadings(taken.values()))

    def _loadings(self, taken: Collection[Sequence[tuple[_DataSource, int]]]) -> Iterator[Loading]:
        for batches in taken:
            (source, _), count = batches[-1], len(batches)
            predicted_seconds = self._op_seconds * sum(ops for _, ops in batches)
            if source.core_seconds is not None and (seconds := source.core_seconds * count - predicted_seconds) > 0:
                data = type(source.dataset).__name__ if len(taken) > 1 else ""
                yield Loading(data, seconds, count, source.workers)

    @around
    def _begin(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        batches = original(loader)
        self._source_of[batches] = self._source_of.setdefault(loader, _DataSource(loader))
        return batches

    @around
    def _take(self, original: Callable[..., Any], batches: Any) -> Any:
        moment, start = self._now(), time.monotonic()
        batch = original(batches)
        source, ops = self._source_of.get(batches), range(moment, self._now())
        if source is not None and not self._is_on_device(ops):
            source.goes_on(batches, time.monotonic() - start)
            self._taken.append((ops, source))
        return batch


class _DataSource:
    """What a loader makes its batches of. It is kept for longer than the loader, whose workers end with it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        is_batched = loader.batch_sampler is not None
        self.dataset, self.workers = loader.dataset, loader.num_workers
        self._sampler: Any = loader.batch_sampler if is_batched else loader.sampler
        kind = KIND_OF_DATA.Iterable if isinstance(self.dataset, IterableDataset) else KIND_OF_DATA.Map
        parts = kind, self.dataset, is_batched, loader.collate_fn, loader.drop_last
        self._new_fetcher = functools.partial(KIND_OF_DATA.create_fetcher, *parts)
        self._waited_s = 0.0

    def goes_on(self, batches: Any, waited_s: float) -> None:
        """The program has taken a batch from there."""
        self._indices, self._fetcher = batches._sampler_iter, getattr(batches, "_dataset_fetcher", None)
        self._waited_s += waited_s

    @functools.cached_property
    def core_seconds(self) -> float | None:
        """What one core takes for a batch that the program has not had; None where it cannot be asked for: a thread
        asks, which is left alone if it waits for ever, as for a queue that the program does not fill any more."""
        found = list[float]()
        thread = threading.Thread(target=self._measure, args=(found,), name="flopmeter", daemon=True)
        with _as_in_a_worker():
            thread.start()
            thread.join(PATIENCE_S + self._waited_s)
        return found[0] if found else None

    def _measure(self, found: list[float]) -> None:
        torch.set_num_threads(1)
        try:
            fetcher = self._fetcher
            if fetcher is None:  # its workers have it, and have opened their files
                fetcher = self._new_fetcher()
                fetcher.fetch(self._next_indices())
            indices = self._next_indices()
            start = time.thread_time()
            fetcher.fetch(indices)
            found.append(time.thread_time() - start)
        except Exception:  # whatever the program's own data set raises out of its program
            return

    def _next_indices(self) -> Any:
        try:
            return next(self._indices)
        except StopIteration:  # the epoch has ended
            self._indices = iter(self._sampler)
            return next(self._indices)


@contextmanager
def _as_in_a_worker() -> Iterator[None]:
    """Afterwards threads and generators of random numbers are as they were."""
    threads, python, numpy = torch.get_num_threads(), random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()), environment(AS_IN_A_WORKER):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(of_numpy)
