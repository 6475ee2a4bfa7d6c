"""What a plan says below its table, of splits, layers and models that are made up; and what an optimizer takes."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest
import torch

from flopmeter import Delays, load_hardware
from flopmeter.ask.plan.notes import cautions, compared, notes_of, nothing_divides, shared_unevenly
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.splits import Shape
from flopmeter.device.cluster import load_cluster


def row(reserved: float, usable: float = 80e9, fits: bool = True):
    return Made(reserved_memory_bytes=reserved, usable_memory_bytes=usable, fits=fits)


def test_rooms_that_are_fuller_than_the_memory_of_runs_is_known_are_counted():
    """A twentieth of 80 GB is 4. What does not fit anyway is none of them, nor what nobody knows the room of."""
    full, none = row(79e9), row(100e9, 0.0)
    (said,) = cautions([row(75e9), full, row(77e9), row(90e9, fits=False), none], False, Delays())
    assert "up to 5 % off; so much room is not left in 2 of these splits: memory=" in said
    assert list(cautions([row(75e9)], False, Delays())) == []
    gives_back, tight = cautions([row(75e9), row(81e9)], False, Delays())
    assert "gives unused segments back first" in gives_back
    assert "in 1 of these splits" in tight


def test_what_else_a_step_waits_for_and_what_hides_is_said_first_and_last():
    first, last = cautions([], True, Delays(data_seconds=2.0, checkpoint_seconds=30.0, checkpoint_every=500))
    assert first.startswith("async tensor parallelism: ")
    assert last == "each step also waits: a batch every 2 s, a checkpoint of 30 s every 500 steps"


def costs(**flops: float):
    return Made(layers={int(kind.removeprefix("of_")): Made(model_flops=each) for kind, each in flops.items()})


def test_layers_of_which_ranks_run_more_than_their_part_are_told_with_the_worst_of_them():
    """Of four ranks each runs a quarter of the first kind, a half of the second and three quarters of the third."""
    subject = Made(layers="model.layers", kinds=[0, 0, 0, 1, 1, 2])
    of_each = {
        Shape(1, 1, 1, 1, "none"): costs(of_0=100, of_1=100, of_2=200),
        Shape(4, 1, 1, 2, "none"): costs(of_0=51, of_1=100, of_2=300),
        Shape(4, 1, 1, 1, "none"): costs(of_0=25, of_1=50, of_2=150),
        Shape(2, 1, 1, 1, "full"): costs(of_0=100, of_1=100, of_2=200),
        Shape(2, 1, 1, 1, "none"): costs(of_0=52, of_1=52, of_2=104),  # 4 % beyond a half
    }
    (said,) = shared_unevenly(subject, of_each)
    assert said.startswith(
        "tp 4: each rank runs 0.75 of the FLOPs of layers such as model.layers.2 (3 of 6), not 0.25:"
    )
    of_each[Shape(2, 1, 1, 1, "none")] = costs(of_0=53, of_1=52, of_2=104)  # 6 %
    assert [each[:42] for each in shared_unevenly(subject, of_each)] == [
        "tp 4: each rank runs 0.75 of the FLOPs of ", "tp 2: each rank runs 0.53 of the FLOPs of ",
    ]  # fmt: skip


BOUNDS = Made(world=1024, work="2,048 sequences", layers=80, heads=64, batch=1024, length=4096)
PLAIN = Made(heads=64, experts=None, has_experts=False, trained=7_000, parameters=7_000, fp8=False)


def made(**changes):
    return Made(**{**PLAIN.__dict__, **changes})


@pytest.mark.parametrize(
    ("subject", "wishes", "said"),
    [
        (PLAIN, {}, "no split of 1,024 GPUs divides 2,048 sequences, 80 layers and 64 heads evenly: another batch="),
        (PLAIN, {"ep": (2,)}, "ep is 1 here with only={'ep': (2,)}: the model has no experts"),
        (PLAIN, {"ep": (1, 2)}, "no split of 1,024 GPUs divides 2,048 sequences, 80 layers and 64 heads evenly with "),
        (
            made(heads=None),
            {"tp": (2,)},
            "tp is 1 here with only={'tp': (2,)}: no tensor parallelism: the model has no",
        ),
        (made(has_experts=True), {"ep": (2,)}, "ep is 1 here with only={'ep': (2,)}: experts are not split over ranks"),
        (made(experts=8, has_experts=True), {"ep": (3,)}, "no split of 1,024 GPUs divides 2,048 sequences, 80 layers"),
    ],
)
def test_where_nothing_divides_it_is_said_what_stands_in_the_way(subject, wishes, said):
    assert nothing_divides(subject, BOUNDS, wishes).startswith(said)


def test_a_plan_says_what_it_took_for_granted():
    def notes(subject=PLAIN, batch: int | None = 1024, length: int | None = 4096, causal="full"):
        return "\n".join(filter(None, notes_of(subject, "dgx-h100", batch, length, BOUNDS, causal)))

    plain = notes()
    assert plain.startswith("cluster: dgx-h100\nproducts run in bf16, gradients are summed in fp32")
    for absent in ("assumed", "trained:", "experts", "no tensor parallelism"):
        assert absent not in plain
    assert "--causal exact" in plain
    assert "--causal exact" not in notes(causal="exact")
    assert "assumed: 1,024 sequences a step, one for each GPU" in notes(batch=None)
    assert "assumed: 4,096 tokens a sequence" in notes(length=None)
    assert "trained: 0.5 B parameters, the others are kept in bf16" in notes(made(trained=5e8, parameters=7e9))
    assert "no tensor parallelism: the model has no plan" in notes(made(heads=None))
    mixture = notes(made(has_experts=True, experts=8))
    assert "each rank routes its part of the tokens" in mixture
    assert "experts are not split" not in mixture
    assert "experts are not split over ranks (ep 1)" in notes(made(has_experts=True))
    assert "fp8 in the linear layers of each layer" in notes(made(fp8=True))


def test_a_split_that_was_metered_whole_is_set_beside_its_composition():
    split = Made(name="tp 4")
    assert compared(Made(how="composed")) == ""
    whole = Made(how="whole", split=split, passes="1f1b", seconds=2.0, composed_seconds=1.9)
    assert compared(whole) == "tp 4, 1f1b: 2 s whole; composed it was -5.0 % off"


@pytest.mark.parametrize("layers", [2, 3])
def test_the_host_steps_several_layers_in_the_time_of_one_and_that_of_each_tensor_more(layers):
    """Three tensors a layer. What the kernels take grows with the numbers, and what they take for themselves too."""
    shapes = [torch.Size(each) for each in ((512, 512), (512,), (2048, 512))]
    optimizer = OptimizerCosts(Where(64, load_hardware("h100-sxm5-80gb"), load_cluster("dgx-h100"), "eager", {}))
    one, several = optimizer.cost(shapes), optimizer.cost(shapes * layers)
    of_one = one.host_seconds + layers * 3 * one.host_seconds_per_tensor
    assert several.host_seconds + layers * 3 * several.host_seconds_per_tensor == pytest.approx(of_one, rel=0.02)
    assert one.host_seconds_per_tensor > 0
    assert several.bytes_per_parameter == pytest.approx(one.bytes_per_parameter, rel=0.05)
    assert 0 < several.seconds_per_parameter < one.seconds_per_parameter
