"""Sweeps: where time starts to grow, where throughput stops growing (claims 17, 21 and 22 of Horace He's article)."""

import csv
import io
import json

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.ask.sweep import sweep

A100 = "a100-sxm4-80gb"
DOUBLINGS = [2**power for power in range(12)]


def half(*shape):
    return torch.empty(*shape, dtype=torch.float16, device="meta")


def small_ops(batch):
    x = half(batch, 256)
    for _ in range(50):
        x = x + 1


def activation(batch):
    half(batch, 1 << 24).relu()


def square_product(batch):
    """[B, D] @ [D, D] with D = 16384: half a gigabyte of weights, read once for any batch."""
    half(batch, 16384) @ half(16384, 16384)


def test_an_overhead_bound_run_takes_no_longer_at_twice_the_batch_and_is_called_so():
    result = sweep(small_ops, [1, 2, 4, 8], A100)
    assert result.points[-1].seconds < 1.01 * result.points[0].seconds
    assert result.diagnosis() == [
        "batch 1 to 8: overhead-bound, time grows by less than 10 % per doubling: the device waits for the host"
    ]


def test_rising_intensity_over_the_same_weights_is_not_taken_for_overhead():
    result = sweep(square_product, [1, 2, 4, 8, 16], A100)
    first, *_, last = result.points
    assert last.seconds < 1.05 * first.seconds
    assert last.intensity == pytest.approx(16 * first.intensity, rel=0.01)
    (line,) = result.diagnosis()
    assert line.startswith("batch 1 to 16: memory-bound")
    assert line.endswith("not overhead")


def test_a_product_turns_from_memory_to_compute_bound_near_its_ridge_point():
    regimes = {point.size: point.regime for point in sweep(square_product, DOUBLINGS, A100).points}
    assert regimes[1] == regimes[64] == "memory"  # 64 FLOP/B, the ridge point is 153
    assert regimes[512] == regimes[2048] == "compute"


def test_a_run_that_turns_from_one_bound_to_another_is_called_by_both():
    """A chain of element-wise ops: the host's time first, its bytes then."""

    def chain(batch):
        x = half(batch, 1 << 18)
        for _ in range(20):
            x = x.relu()

    result = sweep(chain, [1, 64], A100)
    assert [point.regime for point in result.points] == ["overhead", "memory"]
    assert result.diagnosis() == ["batch 1 to 64: overhead- to memory-bound, time grows with the size"]


def test_time_that_grows_with_the_size_is_called_so():
    (line,) = sweep(activation, [4, 8, 16], A100).diagnosis()
    assert line == "batch 4 to 16: memory-bound, time grows with the size"


def test_throughput_stops_rising_at_the_knee():
    result = sweep(square_product, DOUBLINGS, A100)
    rate = {point.size: point.items_per_s for point in result.points}
    knee = result.knee
    assert rate[2 * knee] < 1.1 * rate[knee]
    assert rate[knee] >= 1.1 * rate[knee // 2]


def test_there_is_no_knee_while_throughput_still_rises():
    assert sweep(small_ops, [1, 2, 4], A100).knee is None


def test_steps_that_are_no_doublings_are_judged_per_doubling():
    """Time proportional to the size doubles per doubling, whatever the step."""
    lines = sweep(activation, [100, 110, 120], A100).render().splitlines()
    assert [line.split()[2] for line in lines[5:7]] == ["2.00x", "2.00x"]


def test_the_largest_size_that_fits_is_told():
    result = sweep(activation, [1024, 2048, 4096], A100)  # in and out: 69, 137 and 275 GB of 80
    assert [point.fits for point in result.points] == [True, False, False]
    assert result.largest_that_fits == 1024
    assert "at most batch 1024 of these fits" in str(result)
    assert "nothing of these fits" in str(sweep(activation, [4096], A100))


def test_each_point_agrees_with_a_meter_of_its_own():
    for point in sweep(square_product, [3, 5], "t4").points:
        with FlopMeter("t4") as meter:
            square_product(point.size)
        report = meter.report()
        assert (point.seconds, point.flops, point.regime) == (report.seconds, report.flops, report.regime)


def test_sizes_are_sorted_and_run_once():
    runs = []
    result = sweep(lambda size: runs.append(small_ops(size)), [4, 1, 4, 2], A100)
    assert [point.size for point in result.points] == [1, 2, 4]
    assert len(runs) == 3


def test_items_scale_the_throughput():
    (point,) = sweep(small_ops, [4], A100, items=128, unit="tokens").points
    assert point.items_per_s == pytest.approx(4 * 128 / point.seconds)


@pytest.mark.parametrize("sizes", [[], [0], [-1, 2], [1.5]])
def test_sizes_must_be_positive_whole_numbers(sizes):
    with pytest.raises(ValueError, match="positive whole numbers"):
        sweep(small_ops, sizes, A100)


def test_a_program_that_runs_nothing_is_refused():
    with pytest.raises(ValueError, match="ran no op"):
        sweep(lambda _: None, [1], A100)


def test_progress_wraps_the_sizes():
    seen = []

    def watch(sizes):
        for size in sizes:
            seen.append(size)
            yield size

    sweep(small_ops, [2, 1], A100, progress=watch)
    assert seen == [1, 2]


def test_csv_and_json_hold_the_same_unrounded_figures():
    result = sweep(small_ops, [1, 2], A100)
    document = json.loads(result.render("json"))
    assert (document["schema_version"], document["kind"], document["knee"]) == (1, "sweep", None)
    from_csv = list(csv.DictReader(io.StringIO(result.render("csv"))))
    for point, in_json, in_csv in zip(result.points, document["points"], from_csv, strict=True):
        assert point.seconds == in_json["seconds"] == float(in_csv["seconds"])
