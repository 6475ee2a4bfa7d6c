"""Jobs that do not depend on each other: one after another, in processes side by side, or on any executor.

A job that leaves this process is pickled, with the function that runs it. So functions in it have to be functions of a
module, which the other processes import; and where processes are started, the main module has to be guarded by
`if __name__ == "__main__":`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any, TypeVar

from flopmeter.ask.checks import is_whole

T = TypeVar("T")
R = TypeVar("R")


def results_of(
    run: Callable[[T], R],
    jobs: Sequence[T],
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[R]:
    """What `run` gives for each job, in order.

    workers: how many processes to start; 1: jobs run in this process.
    executor: used instead of them, and left open: any of concurrent.futures, or one with the same methods, such as
        dask's `client.get_executor()`.
    progress: wraps the jobs, as `tqdm` does.
    Raises ValueError for fewer workers than one.
    """
    if not is_whole(workers):
        raise ValueError(f"workers must be at least 1, not {workers!r}")
    if executor is not None and not hasattr(executor, "map"):
        raise TypeError(f"executor must be one of concurrent.futures, or have its methods, not {executor!r}")
    started = None
    if executor is None and workers > 1 and len(jobs) > 1:
        # Spawned, not forked: torch has threads by now.
        started = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn"))
    with started or nullcontext():
        pool = executor or started
        results = iter(map(run, jobs) if pool is None else pool.map(run, jobs))
        return [next(results) for _ in progress(jobs)]
