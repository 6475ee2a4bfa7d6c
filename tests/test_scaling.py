"""One program in many layouts."""

import csv
import io
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flopmeter import Delays, FlopMeter
from flopmeter.ask.scaling import scale
from flopmeter.device.hardware import HardwareError
from flopmeter.distributed import world

WIDTH, BATCH, LAYERS = 1024, 4096, 4
A100 = "a100-sxm4-80gb"


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False), nn.ReLU())


def program(mesh):
    """Blocks of two products, sharded by whatever dimensions the mesh has; the same batch on every data rank."""
    with torch.device("meta"):
        model = nn.Sequential(*(Mlp() for _ in range(LAYERS))).bfloat16()
        x = torch.empty(BATCH, WIDTH, dtype=torch.bfloat16)
    for block in model:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if "dp" in mesh.mesh_dim_names:
            fully_shard(block, mesh=mesh["dp"])
    if "dp" in mesh.mesh_dim_names:
        fully_shard(model, mesh=mesh["dp"])  # the root: blocks that are roots stay gathered
    return lambda: model(x).sum().backward()


def samples(layout):
    return BATCH * layout.get("dp", 1)


def rows(layouts, **options):
    return scale(program, layouts, A100, **options).rows


def test_more_data_ranks_do_the_same_work_each_with_less_memory_for_parameters():
    two, eight = rows([{"dp": 2}, {"dp": 8}], items=samples)
    shard = LAYERS * 8 * WIDTH**2 * 2 * (1 / 2 - 1 / 8)  # bf16; as much again where the gradients are there at the peak
    assert shard <= two.peak_memory_bytes - eight.peak_memory_bytes <= 2 * shard
    assert eight.items_per_s == pytest.approx(4 * two.items_per_s * two.seconds / eight.seconds)


def test_delays_stretch_the_step_of_each_layout_and_are_said():
    """A batch every 2 s, and a save of 10 s every 100 steps, beside steps of milliseconds."""
    plain, slow = (
        scale(program, [{"dp": 2}, {"dp": 8}], A100, items=samples, delays=delays)
        for delays in (Delays(), Delays(data_seconds=2.0, checkpoint_seconds=10.0, checkpoint_every=100))
    )
    for without, row in zip(plain.rows, slow.rows, strict=True):
        assert row.seconds == row.seconds_low == row.seconds_high == pytest.approx(2.1)
        assert row.items_per_s == pytest.approx(samples(row.layout) / 2.1)
        assert row.mfu == pytest.approx(without.mfu * without.seconds / 2.1)
    assert "each step also waits: a batch every 2 s, a checkpoint of 10 s every 100 steps" in str(slow)
    assert "also waits" not in str(plain)


def test_parameters_that_an_earlier_step_gathered_count_from_when_they_are_gathered_again():
    """At no time are more than two of four blocks gathered, in any step."""
    with world(8, {"dp": 8}) as mesh:
        step = program(mesh)
        step()
        with FlopMeter(A100) as meter:
            step()
        gathered = meter.report().memory.timeline["parameters"]
    block, shards = 8 * WIDTH**2 * 2, LAYERS * 8 * WIDTH**2 * 2 // 8  # bf16
    assert gathered[0] <= shards
    assert block <= max(gathered) <= shards + 2 * block


def test_no_more_communication_is_exposed_than_there_is():
    for row in rows([{"dp": 8}, {"tp": 8}, {"dp": 64, "tp": 8}]):
        assert 0 <= row.exposed_seconds <= row.communication_seconds * (1 + 1e-12)  # sums are rounded
        assert row.communication_seconds > 0
        assert row.exposed_seconds < row.seconds


def test_a_slower_network_exposes_more():
    layout = [{"dp": 64}]
    fast, slow = (scale(program, layout, A100, name).rows[0] for name in ("dgx-h100", "dgx-a100"))
    assert slow.communication_seconds > fast.communication_seconds
    assert slow.exposed_seconds > fast.exposed_seconds


def test_the_price_is_that_of_every_gpu_for_as_long_as_the_step_takes():
    (row,) = rows([{"dp": 8}], items=samples, dollars_per_gpu_hour=3.6)
    assert row.dollars_per_step == pytest.approx(8 * row.seconds * 3.6 / 3600)
    assert row.dollars_per_million_items == pytest.approx(row.dollars_per_step / (8 * BATCH) * 1e6)
    assert row.items_per_s_per_gpu == pytest.approx(BATCH / row.seconds)


def test_what_a_layout_cannot_do_is_said_beside_those_that_can():
    result = scale(program, [{"dp": 8}, {"dp": 16}], A100, "pcie4-box")
    assert [row.name for row in result.rows] == ["dp 8"]
    assert "too few for a world of 16" in result.unable["dp 16"]
    assert "left out: dp 16: HardwareError: cluster pcie4-box has 8 GPUs" in str(result)


def test_where_no_layout_can_run_that_is_an_error():
    with pytest.raises(ValueError, match=r"no layout can run: dp 9: .*too few for a world of 9"):
        scale(program, [{"dp": 9}], A100, "pcie4-box")


def test_the_world_is_gone_after_every_layout():
    scale(program, [{"dp": 2}, {"dp": 16}], A100, "pcie4-box")
    assert not dist.is_initialized()


def test_processes_side_by_side_find_the_same():
    layouts = [{"dp": 4}, {"dp": 2, "tp": 2}]
    assert scale(program, layouts, A100, workers=2) == scale(program, layouts, A100)


def test_the_best_layout_fits_and_takes_the_least_gpu_time_for_an_item():
    result = scale(program, [{"dp": 8}, {"dp": 2, "tp": 4}, {"tp": 8}], A100, items=samples)
    assert result.best.items_per_s_per_gpu == max(row.items_per_s_per_gpu for row in result.rows)
    assert f"of what fits: {result.best.name} on 8 GPUs" in str(result)


def test_a_table_shows_only_columns_that_say_something():
    result = scale(program, [{"dp": 8}], A100)
    assert "$" not in result.render()
    assert "items/s" not in result.render()
    priced = scale(program, [{"dp": 8}], A100, items=samples, unit="samples", dollars_per_gpu_hour=2)
    assert all(heading in priced.render() for heading in ("samples/s/GPU", "$/step", "$/M samples"))


def test_every_format_holds_the_rows():
    result = scale(program, [{"dp": 2, "tp": 4}], A100, items=samples)
    (row,) = json.loads(result.render("json"))["rows"]
    (line,) = csv.DictReader(io.StringIO(result.render("csv")))
    assert (row["layout"], row["gpus"]) == (line["layout"], int(line["gpus"])) == ("dp 2 x tp 4", 8)
    assert row["seconds"] == float(line["seconds"]) == result.rows[0].seconds
    assert "| dp 2 x tp 4 " in result.render("markdown")
    with pytest.raises(ValueError, match="unknown format 'pdf'"):
        result.render("pdf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": []}, "scale needs at least one layout"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"items": -1}, "items must be a positive number, not -1"),
        ({"dollars_per_gpu_hour": float("nan")}, "dollars_per_gpu_hour must be a positive number"),
        ({"cluster": "dgx"}, "no cluster is named 'dgx'"),
        ({"hardware": "a101"}, "no hardware is named 'a101'"),
    ],
)
def test_options_that_make_no_sense_are_an_error(options, message):
    with pytest.raises((ValueError, HardwareError), match=message):
        scale(program, **({"layouts": [{"dp": 2}], "hardware": A100} | options))
