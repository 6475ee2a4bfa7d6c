"""A plan's table and record of two splits, figure by figure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flopmeter import Split, SplitRow
from flopmeter.ask.plan.rows import ParallelPlan

SPLIT = Split(
    dp=2, fsdp=4, tp=8, cp=1, pp=4, ep=1, microbatch=2, recompute="full", schedule="interleaved", chunks=3,
    gather="microbatch",
)  # fmt: skip
# On 256 GPUs: 64 sequences of 8,192 tokens in 4 s.
ROW = SplitRow(
    split=SPLIT, how="composed", microbatches=4, tokens=64 * 8192, seconds=4.0, composed_seconds=4.0,
    seconds_by_bound={"compute": 2.2, "memory": 0.4, "communication": 1.0, "overhead": 0.1, "bubble": 0.3,
                      "delays": 0.0},
    mfu=0.425, peak_memory_bytes=50 * 10**9, reserved_memory_bytes=60 * 10**9, usable_memory_bytes=80 * 10**9,
    fits=True, dollars_per_gpu_hour=2.25,
)  # fmt: skip
PIPELINE_FREE = replace(SPLIT, dp=1, pp=1, schedule="none", chunks=1, gather="step", recompute="none", microbatch=1)
TIGHT = replace(ROW, split=PIPELINE_FREE, how="whole", fits=None, usable_memory_bytes=None, dollars_per_gpu_hour=None)


def plan_of(*rows: SplitRow) -> ParallelPlan:
    return ParallelPlan("a plan", rows, 1200, 300, 7, ("a note",))


def test_a_row_has_rates_and_dollars_of_all_its_gpus():
    assert ROW.gpus == 2 * 4 * 8 * 4
    assert ROW.tokens_per_s == 16 * 8192
    assert ROW.tokens_per_s_per_gpu == 512
    assert ROW.dollars_per_step == pytest.approx(256 * 2.25 * 4 / 3600)  # 64 cents
    assert ROW.dollars_per_million_tokens == pytest.approx(0.64 / 0.524288)
    assert (ROW.bound_by, ROW.share("communication")) == ("compute", 0.25)
    assert (TIGHT.gpus, TIGHT.dollars_per_step, TIGHT.dollars_per_million_tokens) == (32, None, None)
    assert ROW.passes == "4 x 2 sequences a rank, full recomputation, interleaved 1F1B of 3 stages a rank"
    assert TIGHT.passes == "4 x 1 sequences a rank, nothing recomputed, gathers each step"


def test_the_table_has_each_figure_below_its_heading():
    text = plan_of(ROW).render("text")
    heading = next(line for line in text.splitlines() if line.startswith("split"))
    cells = text.splitlines()[text.splitlines().index(heading) + 2].split("  ")
    found = [cell.strip() for cell in cells if cell.strip()]
    assert found[1:] == [
        "4 x 2", "full", "1F1B ×3", "each microbatch", "4", "512", "42.5", "compute", "25", "8", "50", "60", "80",
        "0.64", "1.22", "composed",
    ]  # fmt: skip
    assert "delays %" not in heading  # there are none
    assert f"fastest of what fits: {ROW.split.name}, {ROW.passes}" in text
    assert "1,200 splits divide the work evenly, 300 of them may fit; put together from layers of 7 shapes" in text
    none = plan_of(replace(ROW, fits=False))
    assert none.best is None
    assert "none of the splits fits in memory; these need the least" in none.render("text")
    assert plan_of(replace(ROW, fits=False), TIGHT).best is TIGHT


def test_the_record_has_all_facts_of_the_split_and_the_seconds_of_each_bound():
    held = json.loads(plan_of(ROW).render("json"))
    assert (held["kind"], held["considered"], held["may_fit"]) == ("plan", 1200, 300)
    (record,) = held["rows"]
    expected = {
        "dp": 2, "fsdp": 4, "tp": 8, "cp": 1, "pp": 4, "ep": 1, "microbatch": 2, "microbatches": 4,
        "recompute": "full", "schedule": "interleaved", "chunks": 3, "gather": "microbatch", "how": "composed",
        "seconds": 4.0, "composed_seconds": 4.0, "mfu": 0.425, "bound_by": "compute", "fits": True,
        "peak_memory_bytes": 5e10, "reserved_memory_bytes": 6e10, "usable_memory_bytes": 8e10, "compute_seconds": 2.2,
        "memory_seconds": 0.4, "communication_seconds": 1.0, "overhead_seconds": 0.1, "bubble_seconds": 0.3,
        "tokens_per_s": 131072.0, "tokens_per_s_per_gpu": 512.0, "name": SPLIT.name,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
