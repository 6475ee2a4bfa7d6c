"""Jobs that do not depend on each other, one after another or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def results_of(
    run: Callable[[Job], Result], jobs: Sequence[Job], workers: int = 1, executor: Executor | None = None
) -> Iterator[Result]:
    """What `run` gives for each job, in order. With several workers, or an executor of processes, `run` and the jobs
    are pickled: functions in them have to be functions of a module, which the processes import.

    executor: any of concurrent.futures, or one like them, such as that of a dask cluster; it is left open. Without it
        `workers` processes are started, or with one worker none.
    Raises ValueError for fewer workers than one.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if executor is not None:
        yield from executor.map(run, jobs)
    elif workers == 1 or len(jobs) < 2:
        yield from map(run, jobs)
    else:
        # Spawned, not forked: torch has threads by now.
        with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
            yield from pool.map(run, jobs)
