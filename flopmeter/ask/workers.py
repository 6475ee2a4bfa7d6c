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
        started = ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _keep, (run,))
    with started or nullcontext():
        if started is not None:
            results = started.map(_run_kept, jobs)
        else:
            results = iter(map(run, jobs) if executor is None else executor.map(run, jobs))
        return [next(results) for _ in progress(jobs)]


_kept: list[Callable[[Any], Any]] = []  # in a process that was started here: what runs each of its jobs


def _keep(run: Callable[[Any], Any]) -> None:
    """Once in each process, so that what `run` remembers of one job serves the next one."""
    _kept[:] = [run]


def _run_kept(job: Any) -> Any:
    return _kept[0](job)
