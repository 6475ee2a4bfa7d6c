"""What steps of a long run wait for besides the program, against hand arithmetic and tables of order statistics."""

from __future__ import annotations

import math

import pytest

from flopmeter import Delays, ParallelPlan, plan
from flopmeter.ask.delays import expected_maximum
from flopmeter.cli import main


def test_hosts_that_are_slower_than_the_gpus_set_the_pace() -> None:
    assert Delays(data_seconds=3.0).step_seconds(2.0, 8) == 3.0
    assert Delays(data_seconds=1.0).step_seconds(2.0, 8) == 2.0


def test_a_checkpoint_is_shared_by_the_steps_between_two() -> None:
    assert Delays(checkpoint_seconds=30.0, checkpoint_every=500).step_seconds(2.0, 8) == pytest.approx(2.06)


@pytest.mark.parametrize(
    ("count", "expected", "within"),
    [(2, 1 / math.sqrt(math.pi), 0.05), (3, 1.5 / math.sqrt(math.pi), 0.03), (10, 1.53875, 0.01), (100, 2.50759, 0.01)],
)
def test_the_slowest_of_many_ranks_is_that_of_the_tables(count: int, expected: float, within: float) -> None:
    """The expected largest of normal numbers (Harter, 'Expected Values of Normal Order Statistics', 1961)."""
    assert expected_maximum(count) == pytest.approx(expected, rel=within)


def test_one_rank_waits_for_nobody_and_more_ranks_wait_longer() -> None:
    steps = [Delays(straggling=0.02).step_seconds(1.0, ranks) for ranks in (1, 8, 64, 512, 4096)]
    assert steps[0] == 1.0
    assert steps == sorted(set(steps))


def small(**options: object) -> ParallelPlan:
    return plan("gpt2-124m", 8, batch=8, length=1024, only={"tp": 1, "cp": 1, "pp": 1}, rows=2, **options)  # type: ignore[arg-type]


def test_a_plan_without_delays_says_nothing_of_them_and_one_with_says_each() -> None:
    without, slow = small(), small(delays=Delays(data_seconds=1000.0, checkpoint_seconds=500.0, checkpoint_every=10))
    assert "delays" not in str(without)
    assert "each step also waits: a batch every 1e+03 s, a checkpoint of 500 s every 10 steps" in str(slow)
    assert str(Delays(straggling=0.025)) == "ranks that differ by 2.5 %"
    for plain, row in zip(without.rows, slow.rows, strict=True):
        assert row.split == plain.split
        assert row.seconds == 1050.0
        assert row.tokens_per_s == 8 * 1024 / 1050.0
        assert row.bound_by == "delays"
        assert sum(row.seconds_by_bound.values()) == pytest.approx(1050.0, rel=1e-3)
        assert row.mfu == pytest.approx(plain.mfu * plain.seconds / 1050.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "30"], "expected SECONDS/STEPS, such as 30/500, not '30'"),
        (["--checkpoint", "30/0"], "expected a positive whole number"),
        (["--data", "-1"], "expected seconds, from 0 on"),
        (["--straggling", "2"], "expected a share from 0 to 1"),
    ],
)
def test_a_delay_that_makes_no_sense_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2-124m", "--gpus", "8", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"data_seconds": -1.0}, {"straggling": math.nan}, {"checkpoint_every": 0}])
def test_delays_are_checked_when_they_are_made(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Delays(**wrong)  # type: ignore[arg-type]
