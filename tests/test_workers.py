"""Jobs on executors: processes, and those of a cluster engine that people have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scaling import A100, program, samples

from flopmeter import compare, plan, sweep
from flopmeter.ask.scaling import scale
from flopmeter.ask.workers import results_of
from flopmeter.cli import main
from flopmeter.models.llama import LlamaConfig

TINY = LlamaConfig(layers=2, width=256, heads=4, kv_heads=4, hidden=512, vocabulary=1000)


def products(size: int = 64) -> torch.Tensor:
    x = torch.empty(size, 512, device="meta")
    return x @ x.T


ASKED: dict[str, Any] = {
    "compare": partial(compare, products, [A100, "l4"]),
    "sweep": partial(sweep, products, [64, 128], A100),
    "scale": partial(scale, program, [{"dp": 4}, {"dp": 2, "tp": 2}], A100, items=samples),
    "plan": partial(plan, TINY, 4, A100, length=128, only={"tp": 1, "cp": 1, "microbatch": 1, "pp": 1}),
}


def test_fewer_workers_than_one_are_refused():
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        results_of(abs, [1], workers=0)


def test_processes_give_results_in_the_order_of_the_jobs():
    assert results_of(abs, [-3, 2, -1], workers=2) == [3, 2, 1]


def test_progress_sees_each_job():
    seen = []
    assert results_of(abs, [-3, 2], progress=lambda jobs: (seen.append(job) or job for job in jobs)) == [3, 2]
    assert seen == [-3, 2]


def test_processes_plan_a_model_whose_classes_are_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "own.py").write_text(
        "from flopmeter.models.llama import Llama, LlamaConfig\n"
        "class Own(Llama): pass\n"
        "def build(): return Own(LlamaConfig(2, 256, heads=4, kv_heads=4, hidden=512, vocabulary=1000))\n"
    )
    asked = f"plan {tmp_path}/own.py:build --gpus 2 --seq 128 --rows 1 --workers 2 --only tp=1 cp=1 pp=1 microbatch=1"
    assert main(asked.split()) == 0
    assert capsys.readouterr().out.startswith("Own, ")


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    """Two local workers of dask, as `client.get_executor()` gives them."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client, client.get_executor() as executor:
            yield executor


@pytest.mark.parametrize("name", ASKED)
def test_workers_of_dask_find_what_this_process_finds(name: str, dask: Executor):
    ask = ASKED[name]
    assert ask(executor=dask)._document().records == ask()._document().records
