"""What a program may know of a collective's result: certain, by a law that the report states, or nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from flopmeter import DataDependentError, FlopMeter, Hardware, load_hardware, on_meta
from flopmeter.costs import kernels_of
from flopmeter.device.cluster import cluster_of, load_cluster, price_collective
from flopmeter.device.hardware import HardwareError
from flopmeter.distributed import WorldError, world
from flopmeter.distributed.ranks import run_ranks
from flopmeter.records import Collective

pytestmark = pytest.mark.filterwarnings("ignore")

EQUAL = "all ranks hold the same values"
BALANCED = 'routing="balanced": received equals sent'


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device="meta")


def room(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def answer(program: Any, size: int = 4, rank: int = 1, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """What a program on one rank reads, and the rules that it assumed."""
    with world(size, rank=rank), FlopMeter("h100-sxm5-80gb", **options) as meter:
        result = program()
    return result, tuple(text.partition(" for ")[0] for text in meter.report().assumptions)


def after(collective: Any) -> Any:
    """A program that reads a tensor of 1 to 4 after a collective wrote to it."""

    def program() -> list[int]:
        tensor = ints(1, 2, 3, 4)
        collective(tensor)
        return tensor.tolist()

    return program


def into(place: Any, collective: Any) -> Any:
    """A program that reads the tensors that a collective filled from a tensor of 1 to 4."""

    def program() -> Any:
        target = place()
        collective(target, ints(1, 2, 3, 4))
        return [part.tolist() for part in target] if isinstance(target, list) else target.tolist()

    return program


def sum_of_100() -> float:
    count = torch.full((1,), 100, device="meta")
    dist.all_reduce(count)
    return count.item()


def test_a_sum_of_100_on_8_ranks_is_800_and_the_report_says_what_was_assumed():
    assert answer(sum_of_100, size=8) == (800, (EQUAL,))


def test_what_the_only_other_rank_has_is_assumed_too():
    assert answer(sum_of_100, size=2) == (200, (EQUAL,))


def test_a_group_of_one_rank_needs_no_assumption():
    def program() -> list[int]:
        alone = dist.new_group([1])
        return after(lambda x: dist.all_reduce(x, group=alone))()

    assert answer(program) == ([1, 2, 3, 4], ())


# Four ranks with 1, 2, 3, 4 each; this one is number 1. By hand.
EQUAL_RANKS = {
    "sum": (after(lambda x: dist.all_reduce(x)), [4, 8, 12, 16]),
    "max": (after(lambda x: dist.all_reduce(x, ReduceOp.MAX)), [1, 2, 3, 4]),
    "min": (after(lambda x: dist.all_reduce(x, ReduceOp.MIN)), [1, 2, 3, 4]),
    "product": (after(lambda x: dist.all_reduce(x, ReduceOp.PRODUCT)), [1, 16, 81, 256]),
    "sum of a view": (after(lambda x: dist.all_reduce(x[2:])), [1, 2, 12, 16]),
    "sum at the root": (after(lambda x: dist.reduce(x, 1)), [4, 8, 12, 16]),
    "broadcast": (after(lambda x: dist.broadcast(x, 0)), [1, 2, 3, 4]),
    "gather into one": (into(lambda: room(16), lambda t, x: dist.all_gather_into_tensor(t, x)), [1, 2, 3, 4] * 4),
    "gather": (into(lambda: [room(4) for _ in range(4)], lambda t, x: dist.all_gather(t, x)), [[1, 2, 3, 4]] * 4),
    "gather at the root": (
        into(lambda: [room(4) for _ in range(4)], lambda t, x: dist.gather(x, t, dst=1)),
        [[1, 2, 3, 4]] * 4,
    ),
    "scatter a sum": (into(lambda: room(1), lambda t, x: dist.reduce_scatter_tensor(t, x)), [8]),
    "scatter a sum of a list": (into(lambda: room(1), lambda t, x: dist.reduce_scatter(t, list(x.split(1)))), [8]),
    "exchange": (into(lambda: room(4), lambda t, x: dist.all_to_all_single(t, x)), [2, 2, 2, 2]),
    "exchange of a list": (
        into(lambda: [room(1) for _ in range(4)], lambda t, x: dist.all_to_all(t, list(x.split(1)))),
        [[2]] * 4,
    ),
    "exchange in unequal parts": (
        into(lambda: room(4), lambda t, x: dist.all_to_all_single(t, x, [1, 1, 1, 1], [2, 1, 1, 0])),
        [3, 3, 3, 3],
    ),
    "functional sum": (lambda: funcol.all_reduce(ints(1, 2, 3, 4), "sum", dist.group.WORLD).tolist(), [4, 8, 12, 16]),
    "functional gather": (
        lambda: funcol.all_gather_tensor(ints(1, 2), 0, dist.group.WORLD).tolist(),
        [1, 2, 1, 2, 1, 2, 1, 2],
    ),
    "functional scatter of a sum": (
        lambda: funcol.reduce_scatter_tensor(ints(1, 2, 3, 4), "sum", 0, dist.group.WORLD).tolist(),
        [8],
    ),
    "functional exchange": (
        lambda: funcol.all_to_all_single(ints(1, 2, 3, 4), None, None, dist.group.WORLD).tolist(),
        [2, 2, 2, 2],
    ),
    "functional exchange in unequal parts": (  # each sends 1 and 2 here, to number 2 the 3, to number 3 the 4
        lambda: funcol.all_to_all_single(ints(1, 2, 3, 4), [2] * 4, [0, 2, 1, 1], dist.group.WORLD).tolist(),
        [1, 2, 1, 2, 1, 2, 1, 2],
    ),
    "functional sums of several": (
        lambda: [t.item() for t in funcol.all_reduce_coalesced([ints(3), ints(5)], "sum", dist.group.WORLD)],
        [12, 20],
    ),
    "functional gathers of several": (
        lambda: [t.tolist() for t in funcol.all_gather_into_tensor_coalesced([ints(3), ints(5, 6)], dist.group.WORLD)],
        [[3, 3, 3, 3], [5, 6, 5, 6, 5, 6, 5, 6]],
    ),
    "CPU tensors": (lambda: (x := torch.tensor([100]), dist.all_reduce(x), x.tolist())[2], [400]),
}


@pytest.mark.parametrize("name", EQUAL_RANKS)
def test_equal_ranks_give_what_four_of_them_would(name: str):
    program, expected = EQUAL_RANKS[name]
    assert answer(program) == (expected, (EQUAL,))


CERTAIN = {
    "broadcast from here": (after(lambda x: dist.broadcast(x, 1)), [1, 2, 3, 4]),
    "scatter from here": (
        into(lambda: room(4), lambda t, x: dist.scatter(t, [x * n for n in range(4)], src=1)),
        [1, 2, 3, 4],
    ),
    "send": (after(lambda x: dist.send(x, 0)), [1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_what_this_rank_decides_is_certain(name: str):
    program, expected = CERTAIN[name]
    assert answer(program) == (expected, ())


UNKNOWN = {
    "recv": after(lambda x: dist.recv(x, 0)),
    "irecv": after(lambda x: dist.irecv(x, 0)),
    "scatter from elsewhere": into(lambda: room(4), lambda t, x: dist.scatter(t, None, src=0)),
    "a sum that another rank gets": after(lambda x: dist.reduce(x, 0)),
    "bits": after(lambda x: dist.all_reduce(x, ReduceOp.BXOR)),
    "broadcast into a tensor that nobody filled": into(lambda: room(4), lambda t, x: dist.broadcast(t, 0)),
    "exchange of features": into(
        lambda: torch.zeros(4, device="meta"), lambda t, x: dist.all_to_all_single(t, torch.rand(4, device="meta"))
    ),
    "exchange in parts that do not fit": into(
        lambda: room(4), lambda t, x: dist.all_to_all_single(t, x, [2, 1, 1, 0], [2, 1, 1, 0])
    ),
    "exchange in equal parts of what has none": into(
        lambda: room(3), lambda t, x: dist.all_to_all_single(t, x[:3].clone())
    ),
    "exchange of a single number": into(room, lambda t, x: dist.all_to_all_single(t, x[0].clone())),
    "gather of features": into(
        lambda: torch.zeros(16, device="meta"),
        lambda t, x: dist.all_gather_into_tensor(t, torch.rand(4, device="meta")),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_other_ranks_decide_is_unknown(name: str):
    with pytest.raises(DataDependentError):
        answer(UNKNOWN[name])


def test_parts_whose_sizes_the_program_lists_are_not_counts_to_be_balanced():
    """Four equal ranks send each the second of four numbers here; counts of tokens come back as they are sent."""
    even = into(lambda: room(4), lambda t, x: dist.all_to_all_single(t, x))
    listed = into(lambda: room(4), lambda t, x: dist.all_to_all_single(t, x, [1] * 4, [1] * 4))
    assert answer(even, routing="balanced") == ([1, 2, 3, 4], (BALANCED,))
    assert answer(listed, routing="balanced") == ([2] * 4, (EQUAL,))


def test_a_part_of_a_tensor_that_a_collective_fills_tells_nothing_of_the_rest():
    def program(place: int) -> list[int]:
        whole = torch.randint(9, (10,), device="meta")
        dist.all_gather_into_tensor(whole[2:], ints(7, 8))
        return whole[place : place + 1].tolist()

    for place in (0, 9):
        with pytest.raises(DataDependentError):
            answer(lambda place=place: program(place))


# --- experts on many ranks


class Experts(nn.Module):
    """Tokens go to the ranks that hold their experts: counts first, then features (DeepSeek's inference code)."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.here = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts // dist.get_world_size()))

    def forward(self, tokens: Tensor, chosen: int) -> Tensor:
        picked = self.router(tokens).topk(chosen).indices.flatten()
        order = picked.argsort()
        sent = torch.bincount(picked, minlength=self.router.out_features)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent_of, received_of = (counts.view(dist.get_world_size(), -1).sum(1).tolist() for counts in (sent, received))
        features = tokens.new_empty(sum(received_of), tokens.shape[1])
        dist.all_to_all_single(features, tokens[order // chosen], received_of, sent_of)
        owner = torch.arange(len(self.here), device="meta").repeat(dist.get_world_size()).repeat_interleave(received)
        for number, expert in enumerate(self.here):
            expert(features[owner == number])
        return features


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("tokens", [128, 4])  # a prompt; a step of decoding, with fewer tokens than experts
def test_experts_on_8_ranks_compute_as_many_tokens_as_this_rank_sends(rank: int, tokens: int):
    width, experts, chosen = 64, 32, 2
    with world(8, rank=rank), FlopMeter("h100-sxm5-80gb", routing="balanced") as meter, torch.no_grad():
        with torch.device("meta"):
            layer = Experts(width, experts)
            features = layer(torch.empty(tokens, width), chosen)
    report = meter.report()
    assert features.shape == (tokens * chosen, width)
    assert report.macs == tokens * width * experts + tokens * chosen * width * width  # the router, and each token twice
    assert any(text.startswith(BALANCED) for text in report.assumptions)


# --- objects


@pytest.mark.parametrize("rank", [0, 3])
def test_objects_that_all_ranks_have_are_broadcast(rank: int):
    def program() -> list[Any]:
        objects = [{"lr": 0.1}, "run 7"]
        dist.broadcast_object_list(objects, src=0)
        room(1)  # (a receiver that runs no op has no report)
        return objects

    assert answer(program, rank=rank) == ([{"lr": 0.1}, "run 7"], (EQUAL,) if rank else ())


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("how", ["src", "group_src"])
def test_objects_that_the_metered_rank_sends_need_nobodys_word(rank: int, how: str):
    def program() -> list[Any]:
        objects = ["run 7"]
        dist.broadcast_object_list(object_list=objects, **{how: rank})
        return objects

    assert answer(program, rank=rank) == (["run 7"], ())


def test_objects_go_to_the_ranks_of_their_group():
    """Its ranks are 2 and 3 of four, and the sender is rank 0 of the group."""

    def program(rank: int) -> list[Any]:
        with world(4, rank=rank):
            group, objects = dist.new_group([2, 3]), ["run 7" if rank == 2 else None]
            dist.broadcast_object_list(objects, group_src=0, group=group)
        return objects

    assert run_ranks([3, 2], program) == {2: ["run 7"], 3: ["run 7"]}


@pytest.mark.parametrize(
    "receive",
    [
        lambda: dist.broadcast_object_list([None], src=0),
        lambda: dist.broadcast_object_list([None], group_src=0),
        lambda: dist.scatter_object_list([None], None, src=0),
        lambda: dist.recv_object_list([None], 0),
    ],
)
def test_objects_that_only_another_rank_has_are_one_clear_error(receive: Any):
    with world(4, rank=3), pytest.raises(WorldError, match="those of another rank, which does not run"):
        receive()


# --- DDP


@pytest.mark.parametrize("rank", [0, 2])
def test_ddp_takes_any_number_of_steps_before_the_meter(rank: int):
    with world(4, rank=rank) as mesh:
        model = DistributedDataParallel(nn.Linear(4, 4, device="meta"), device_mesh=mesh)
        for _ in range(3):
            model(torch.empty(2, 4, device="meta")).sum().backward()
        with FlopMeter() as meter:
            model(torch.empty(2, 4, device="meta")).sum().backward()
    assert [kernel.cost.collective for kernel in kernels_of(meter.trace) if kernel.cost.collective] == [
        Collective("all_reduce", (4 * 4 + 4) * 4, (0, 1, 2, 3))
    ]


# --- prices


def sent_and_received(output_rows: list[int], input_rows: list[int]) -> set[int]:
    """Bytes of the whole of three ways to exchange rows of 4 B with 3 other ranks."""
    with world(4) as mesh, FlopMeter() as meter:
        into, out_of = (torch.empty(sum(rows), device="meta") for rows in (output_rows, input_rows))
        dist.all_to_all_single(into, out_of, output_rows, input_rows)
        dist.all_to_all(list(into.split(output_rows)), list(out_of.split(input_rows)))
        funcol.all_to_all_single(out_of, output_rows, input_rows, mesh.get_group())
    return {kernel.cost.collective.nbytes for kernel in kernels_of(meter.trace) if kernel.cost.collective}


def test_an_uneven_exchange_takes_as_long_as_the_larger_of_what_is_sent_and_received():
    assert sent_and_received([7, 7, 7, 7], [1, 2, 3, 4]) == {4 * 28}
    assert sent_and_received([1, 2, 3, 4], [7, 7, 7, 7]) == {4 * 28}
    whole = 4 * 28 * 4 // 3  # as if equal parts of it went to three others
    assert sent_and_received([0, 0, 0, 28], [0, 5, 0, 0]) == sent_and_received([0, 0, 0, 5], [0, 28, 0, 0]) == {whole}


def test_a_ring_that_hands_all_to_its_neighbour_takes_one_port_and_not_that_of_all_ranks():
    """28 rows of 4 B to the next of 4 ranks: as much as an exchange of equal parts sends to three others."""
    whole = 4 * 28 * 4 // 3
    assert sent_and_received([0, 0, 0, 28], [0, 28, 0, 0]) == {whole}
    price = price_collective(Collective("all_to_all", whole, tuple(range(4))), load_cluster("dgx-h100"))
    assert price.wire_bytes == pytest.approx(4 * 28, abs=1)


def test_what_stays_on_a_rank_in_an_exchange_goes_over_no_link():
    assert sent_and_received([28, 1, 2, 0], [28, 0, 2, 1]) == {4 * 3 * 4 // 3}


def gather_seconds(gpus_per_node: int | None, size: int = 8, **options: Any) -> float:
    with world(size, gpus_per_node=gpus_per_node), FlopMeter("h100-sxm5-80gb", **options) as meter:
        dist.all_gather_into_tensor(torch.empty(size * 2**26, device="meta"), torch.empty(2**26, device="meta"))
    return meter.report().communication_seconds


def test_ranks_on_two_nodes_gather_over_the_network():
    """dgx-h100: NVLink 450 GB/s within a node, 50 GB/s of network a GPU; 4 ports on a node share what passes."""
    cluster = load_cluster("dgx-h100")
    whole = 8 * 2**26 * 4
    through_a_port = whole * 7 / 8 / 4 / cluster.inter.sustained_bytes_per_s
    assert gather_seconds(None) == gather_seconds(8)
    assert gather_seconds(4) > gather_seconds(8)
    assert gather_seconds(4) == pytest.approx(through_a_port, rel=0.02)
    assert gather_seconds(1) == pytest.approx(4 * through_a_port, rel=0.02)


@pytest.mark.parametrize(
    ("hardware", "gpus_per_node", "message"),
    [
        ("h100-sxm5-80gb", 16, "the world has 16 GPUs on a node, cluster dgx-h100 has 8: name a cluster of such nodes"),
        ("rtx-4090", 4, r"has 8 GPUs \(1 x 8\), too few for a world of 8 with 4 on a node"),
    ],
)
def test_a_cluster_without_room_for_such_nodes_says_so(hardware: str, gpus_per_node: int, message: str):
    with world(8, gpus_per_node=gpus_per_node), FlopMeter(hardware) as meter:
        dist.barrier()
    with pytest.raises(HardwareError, match=message):
        _ = meter.report().seconds


def extended(folder: Path, base: str, name: str = "mine", more: str = "") -> Hardware:
    (folder / f"{name}.yaml").write_text(f"extends: {base}\ntitle: {name}\n{more}")
    return load_hardware(folder / f"{name}.yaml")


def test_a_profile_that_extends_another_keeps_its_cluster(tmp_path: Path):
    capped = extended(tmp_path, "h100-sxm5-80gb", more="tdp_w: 500\n")
    again = extended(tmp_path, "mine.yaml", "again")
    renamed = load_hardware("h100-sxm5-80gb").replace(name="other")
    for device in (capped, again, renamed):
        assert cluster_of(device).name == "dgx-h100"
    whole = Collective("all_reduce", 2**28, (0, 8))  # two nodes: the assumed cluster has one
    assert price_collective(whole, cluster_of(capped)).link == "NDR InfiniBand"


def test_a_profile_on_other_links_has_no_cluster_of_its_base(tmp_path: Path):
    bridged = extended(tmp_path, "h100-sxm5-80gb", more="interconnect: {name: NVLink bridge (pairs)}\n")
    superchip = extended(tmp_path, "gh200-96gb", "superchip")  # extends an H100, and comes in no DGX
    assert [cluster_of(device).title.partition(":")[0] for device in (bridged, superchip)] == ["assumed"] * 2


REAL = """
import os, sys, torch, torch.distributed as dist
from flopmeter import FlopMeter
dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2, init_method="file://" + sys.argv[2])
with FlopMeter() as meter:
    x = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(x)
    told = torch.tensor([7 * dist.get_rank()])
    dist.recv(told, 1) if dist.get_rank() == 0 else dist.send(told, 0)
assert (x.item(), told.item()) == (3, 7), (x, told)
assert not meter.report().assumptions
"""


def test_true_ranks_exchange_true_values(tmp_path: Path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", REAL, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said.decode()


def test_known_ids_brought_in_stay_known_after_a_broadcast_from_here():
    ids = on_meta(torch.tensor([5, 6]))
    assert answer(lambda: (dist.broadcast(ids, 0), ids.tolist())[1], rank=0) == ([5, 6], ())


def test_objects_that_one_rank_has_reach_the_ranks_that_run_with_it():
    """Rank 2 runs first, and starts again each time that it needs what rank 0 has not sent yet."""
    runs = list[int]()

    def program(rank: int) -> list[Any]:
        runs.append(rank)
        with world(3, rank=rank):
            first, second, own, part = ([each if rank == 0 else None] for each in ("config", {"lr": 0.1}, 1, None))
            dist.broadcast_object_list(first, src=0)
            dist.broadcast_object_list(own if rank == 0 else [7], group_src=0)  # who has some already needs none
            dist.broadcast_object_list(second, src=0)
            dist.scatter_object_list(part, [10, 11, 12] if rank == 0 else None, src=0)
        return [*first, *second, *part]

    everywhere = ["config", {"lr": 0.1}]
    assert run_ranks([2, 0, 1], program) == {rank: [*everywhere, 10 + rank] for rank in range(3)}
    assert runs == [2, 0, 1, 2]


def test_tensors_and_objects_on_the_cpu_reach_the_root_without_a_meter():
    """A part of rank 1, which is the root, and what it has itself from each rank."""
    with world(3, rank=1):
        part, parts = torch.zeros(2), [torch.zeros(2) for _ in range(3)]
        dist.scatter(part, [torch.full((2,), float(rank)) for rank in range(3)], src=1)
        dist.gather(torch.full((2,), 7.0), parts, dst=1)
        objects: list[Any] = [None] * 3
        dist.gather_object({"lr": 0.1}, objects, dst=1)
    assert part.tolist() == [1.0, 1.0]
    assert [each.tolist() for each in parts] == [[7.0, 7.0]] * 3
    assert objects == [{"lr": 0.1}] * 3
