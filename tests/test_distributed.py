"""Worlds: what fits, what does not, and that nothing of one is left behind; what each collective costs."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._C import _dispatch_get_all_op_names as all_op_names
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from flopmeter import FlopMeter
from flopmeter.costs import RULES, kernels_of
from flopmeter.distributed import WorldError, world
from flopmeter.distributed.ranks import run_ranks
from flopmeter.records import COMMUNICATION, Collective
from flopmeter.torch_names import distributed as private
from flopmeter.trace import streams

pytestmark = pytest.mark.filterwarnings("ignore")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    def patched() -> list[object]:
        meshes = [getattr(dist.DeviceMesh, name) for name in ("__init__", "__eq__", private.CONCATENATE)]
        return [private.FakeWork.wait, private.Work.wait, torch.UntypedStorage.resize_, *meshes]

    before = patched()
    yield
    assert not dist.is_initialized()
    assert not hasattr(torch, "meta")
    assert patched() == before
    assert streams.current() == streams.DEFAULT_STREAM
    assert streams.listeners == []


def test_a_world_gives_the_mesh_that_was_asked_for():
    with world(32, {"dp": 4, "tp": 8}, rank=11) as mesh:
        assert dist.get_world_size() == 32
        assert dist.get_rank() == 11
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh["tp"].size() == 8
        assert tuple(mesh.get_coordinate()) == (1, 3)
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [3, 11, 19, 27]


def test_a_program_may_make_the_mesh_of_the_gpus_that_it_asks_for():
    with world(8):
        mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        layer = fully_shard(nn.Linear(4, 8, bias=False, device="meta"), mesh=mesh["dp"])
        with FlopMeter() as meter:
            layer(on_meta(2, 4))
    assert [kernel.cost.collective for kernel in kernels_of(meter.trace) if kernel.cost.collective] == [
        Collective("all_gather", 4 * 8 * 4, (0, 4))
    ]


def test_a_mesh_takes_its_arguments_by_their_names():
    with world(4):
        mesh = dist.DeviceMesh(device_type="cuda", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    assert (mesh.mesh.tolist(), mesh.mesh_dim_names) == ([[0, 1], [2, 3]], ("outer", "inner"))


def test_two_meshes_are_equal_where_torch_says_so():
    with world(8, {"dp": 4, "tp": 2}) as mesh:
        same = dist.init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        renamed = dist.init_device_mesh("cuda", (4, 2), mesh_dim_names=("tp", "dp"))
        meshes = [mesh, same, renamed, mesh["dp"], mesh["tp"], same["tp"], "no mesh"]
        kinds = [0, 0, 1, 2, 3, 3, 4]
        for _ in range(2):
            assert [[one == other for other in meshes] for one in meshes] == [[a == b for b in kinds] for a in kinds]
        assert len(set(meshes)) == 5


@pytest.mark.parametrize("layers", [1, 5])
def test_fsdp_joins_its_mesh_with_that_of_tensor_parallelism_once_however_many_layers_there_are(layers, monkeypatch):
    joined = []
    plain = dist.DeviceMesh._concatenate
    monkeypatch.setattr(dist.DeviceMesh, "_concatenate", staticmethod(lambda meshes: joined.append(1) or plain(meshes)))
    with world(8, {"dp": 4, "tp": 2}) as mesh:
        dp, tp = mesh["dp"], mesh["tp"]
        model = nn.Sequential(*(nn.Linear(4, 8, device="meta") for _ in range(layers)))
        parallelize_module(model, tp, {str(place): ColwiseParallel() for place in range(layers)})
        fully_shard(model, mesh=dp)
        assert {weight.device_mesh.mesh_dim_names for weight in model.parameters()} == {("dp", "tp")}
    assert len(joined) == 1


def test_a_world_without_a_mesh_has_one_dimension():
    with world(6) as mesh:
        assert mesh.shape == (6,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, {"dp": 2, "tp": 2}), r"2 x 2 = 4 ranks, the world 8"),
        ((8, {"dp": 16}), r"16 = 16 ranks, the world 8"),
        ((0,), r"size is 0: it has to be a whole number from 1 on"),
        ((2.0,), r"size is 2\.0: it has to be a whole number"),
        ((4, {"dp": 4, "tp": 0}), r"mesh\['tp'\] is 0"),
        ((4, {}), r"needs names for its dimensions"),
        ((4, {"": 4}), r"needs names for its dimensions"),
        ((4, {0: 4}), r"needs names for its dimensions"),
        ((4, {"dp": 4}, 4), r"rank 4 is not in a world of 4: name one from 0 to 3"),
        ((4, {"dp": 4}, -1), r"rank -1 is not in a world"),
    ],
)
def test_a_world_that_cannot_be_is_one_error_that_says_why(arguments, message):
    with pytest.raises(WorldError, match=message), world(*arguments):
        pass


def test_worlds_do_not_nest_and_the_outer_one_goes_on():
    with world(4):
        with pytest.raises(WorldError, match="initialized already, with 4 ranks"), world(2):
            pass
        assert dist.get_world_size() == 4


def test_a_world_ends_with_an_error_in_it_also_with_one_on_entry(monkeypatch):
    with pytest.raises(RuntimeError, match="in the program"), world(4):
        raise RuntimeError("in the program")
    monkeypatch.setattr("flopmeter.distributed.init_device_mesh", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError), world(4):
        pass


def test_a_program_may_end_its_world_itself():
    with world(4):
        dist.destroy_process_group()


def test_worlds_follow_one_another():
    for size in (2, 4):
        with world(size), FlopMeter() as meter:
            dist.all_reduce(on_meta(8))
        (kernel,) = kernels_of(meter.trace)
        assert kernel.cost.collective == Collective("all_reduce", 32, tuple(range(size)))


def test_what_torch_refuses_on_many_ranks_is_refused_by_torch():
    with world(4) as mesh:
        with pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
            fully_shard(nn.Linear(6, 10, device="meta"), mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
        with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size 4"):
            dist.init_device_mesh("meta", (8,))


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (lambda: dist.all_gather_into_tensor(on_meta(10), on_meta(3)), r"\[10\] is not 4 times \[3\]"),
        (lambda: dist.reduce_scatter_tensor(on_meta(3), on_meta(10)), r"\[10\] is not 4 times \[3\]"),
        (lambda: dist.all_gather_into_tensor(on_meta(8).half(), on_meta(2)), "float16 is not torch.float32"),
    ],
)
def test_parts_that_do_not_make_the_whole_are_refused_as_nccl_does(run, error):
    with world(4), pytest.raises((ValueError, TypeError), match=error):
        run()


def collectives_of(program) -> list[tuple[str, int, int, int, tuple[int, ...]]]:
    """Kind, bytes of the whole, bytes read and written by rank 1 of 4, and ranks, of each collective."""
    with world(4, rank=1) as mesh, FlopMeter(strict=True) as meter:
        program(mesh.get_group())
    costs = [kernel.cost for kernel in kernels_of(meter.trace) if kernel.cost.collective]
    assert {cost.op_class for cost in costs} == {COMMUNICATION}
    return [
        (cost.collective.kind, cost.collective.nbytes, cost.bytes_read, cost.bytes_written, cost.collective.ranks)
        for cost in costs
    ]


EVERYONE = (0, 1, 2, 3)
PART, WHOLE = 40, 160  # bytes of 10 and of 40 numbers


def parts() -> list[torch.Tensor]:
    return [on_meta(10) for _ in range(4)]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: dist.all_reduce(on_meta(10)), ("all_reduce", PART, PART, PART, EVERYONE)),
        (lambda: dist.broadcast(on_meta(10), 0), ("broadcast", PART, PART, PART, EVERYONE)),
        (lambda: dist.reduce(on_meta(10), 0), ("reduce", PART, PART, PART, EVERYONE)),
        (lambda: dist.all_gather_into_tensor(on_meta(40), on_meta(10)), ("all_gather", WHOLE, PART, WHOLE, EVERYONE)),
        (lambda: dist.all_gather(parts(), on_meta(10)), ("all_gather", WHOLE, PART, WHOLE, EVERYONE)),
        (
            lambda: dist.reduce_scatter_tensor(on_meta(10), on_meta(40)),
            ("reduce_scatter", WHOLE, WHOLE, PART, EVERYONE),
        ),
        (lambda: dist.reduce_scatter(on_meta(10), parts()), ("reduce_scatter", WHOLE, WHOLE, PART, EVERYONE)),
        (lambda: dist.all_to_all_single(on_meta(40), on_meta(40)), ("all_to_all", WHOLE, WHOLE, WHOLE, EVERYONE)),
        (lambda: dist.all_to_all(parts(), parts()), ("all_to_all", WHOLE, WHOLE, WHOLE, EVERYONE)),
        (lambda: dist.gather(on_meta(10), None, dst=0), ("gather", WHOLE, PART, 0, EVERYONE)),
        (lambda: dist.gather(on_meta(10), parts(), dst=1), ("gather", WHOLE, PART, WHOLE, EVERYONE)),
        (lambda: dist.scatter(on_meta(10), None, src=0), ("scatter", WHOLE, 0, PART, EVERYONE)),
        (lambda: dist.scatter(on_meta(10), parts(), src=1), ("scatter", WHOLE, WHOLE, PART, EVERYONE)),
        (lambda: dist.send(on_meta(10), 3), ("send", PART, PART, 0, (1, 3))),
        (lambda: dist.recv(on_meta(10), 0), ("recv", PART, 0, PART, (0, 1))),
    ],
)
def test_a_collective_says_what_goes_around_and_what_this_rank_touches(run, expected):
    assert collectives_of(lambda group: run()) == [expected]


@pytest.mark.skipif(not hasattr(torch.ops._c10d_functional, "batch_p2p_ops"), reason="this torch has no such op")
def test_each_message_of_a_batch_touches_its_own_tensor():
    def batch(group):
        messages = ["isend", "irecv"], [3, 0], [0, 0], [on_meta(10), on_meta(40)]
        torch.ops._c10d_functional.batch_p2p_ops(*messages, group.group_name)
        torch.ops._c10d_functional.isend(on_meta(10), 3, 0, group.group_name)

    sent = ("send", PART, PART, 0, (1, 3))
    assert collectives_of(batch) == [sent, ("recv", WHOLE, 0, WHOLE, (0, 1)), sent]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda group: funcol.all_reduce(on_meta(10), "sum", group), ("all_reduce", PART, PART, PART)),
        (lambda group: funcol.all_gather_tensor(on_meta(10), 0, group), ("all_gather", WHOLE, PART, WHOLE)),
        (
            lambda group: funcol.reduce_scatter_tensor(on_meta(40), "sum", 0, group),
            ("reduce_scatter", WHOLE, WHOLE, PART),
        ),
        (
            lambda group: funcol.all_to_all_single(on_meta(40), None, None, group),
            ("all_to_all", WHOLE, WHOLE, WHOLE),
        ),
        (lambda group: funcol.broadcast(on_meta(10), 0, group), ("broadcast", PART, PART, PART)),
        (lambda group: funcol.all_reduce_coalesced(parts(), "sum", group), ("all_reduce", WHOLE, WHOLE, WHOLE)),
        (
            lambda group: funcol.all_gather_into_tensor_coalesced(parts(), group),
            ("all_gather", 4 * WHOLE, WHOLE, 4 * WHOLE),
        ),
        (
            lambda group: funcol.reduce_scatter_tensor_coalesced([on_meta(40)], "sum", [0], group),
            ("reduce_scatter", WHOLE, WHOLE, PART),
        ),
    ],
)
def test_functional_collectives_say_the_same(run, expected):
    assert collectives_of(run) == [(*expected, EVERYONE)]


def test_a_rank_that_does_not_run_is_named_where_its_messages_are_not_waited_for():
    x = torch.empty(8, device="meta")
    with world(8, rank=2), FlopMeter("h100-sxm5-80gb") as meter:
        dist.send(x, 3)
        dist.recv(x, 1)
    (note,) = (note for note in meter.report().notes if note.startswith("messages with rank"))
    assert note.startswith("messages with rank 1, 3: ")


def test_a_barrier_holds_the_host():
    with world(2), FlopMeter() as meter:
        dist.barrier()
    (cost,) = (kernel.cost for kernel in kernels_of(meter.trace))
    assert cost.collective == Collective("barrier", 0, (0, 1))
    assert cost.blocks_host


def test_the_same_call_is_recorded_once_though_its_handles_differ():
    with world(4), FlopMeter() as meter:
        for _ in range(3):
            dist.all_reduce(on_meta(8))
    assert len({op.call for op in meter.trace.ops if op.call.func.namespace == "c10d"}) == 1


def test_every_collective_that_torch_has_is_counted():
    asks = {"c10d::check_for_nan", "_dtensor::mesh_get_process_group", "_c10d_functional::_wrap_tensor_autograd"}
    spaces = ("c10d::", "_c10d_functional::", "_dtensor::", "fsdp::")
    assert {name for name in all_op_names() if name.startswith(spaces)} - asks - {
        str(op).replace(".", "::") for op in RULES
    } == set()


def test_sums_of_gradients_are_in_no_op_and_their_copies_are_counted():
    """FSDP2 of one linear layer of 8 x 4 in fp32 on 4 ranks: 32 numbers of 4 B, a quarter of them here."""
    with world(4) as mesh:
        layer = fully_shard(nn.Linear(4, 8, bias=False, device="meta"), mesh=mesh)
        with FlopMeter(strict=True) as meter:
            layer(on_meta(2, 4)).sum().backward()
    moved = {
        kernel.cost.name: (kernel.cost.bytes_read, kernel.cost.bytes_written) for kernel in kernels_of(meter.trace)
    }
    assert moved["fsdp::all_gather_copy_in"] == (32, 32)
    assert moved["c10d::_allgather_base_"] == (32, 128)
    assert moved["fsdp::split_with_sizes_copy"] == (128, 128)
    assert moved.get("fsdp::chunk_cat", moved.get("fsdp::chunk_cat_mixed_dtype")) == (128, 128)  # since torch 2.15
    assert moved["c10d::_reduce_scatter_base_"] == (128, 32)


@pytest.mark.parametrize(("dtype", "is_added"), [(torch.bfloat16, True), (torch.float32, True), (torch.int8, False)])
def test_an_all_reduce_knows_whether_the_switch_can_add_its_numbers(dtype, is_added):
    with world(8), FlopMeter() as meter:
        dist.all_reduce(torch.empty(64, dtype=dtype, device="meta"))
    (kernel,) = kernels_of(meter.trace)
    assert kernel.cost.collective.adds_in_switch == is_added


@pytest.mark.parametrize(("per_node", "rank", "devices", "current"), [(2, 3, 2, 1), (4, 3, 4, 3), (None, 11, 8, 3)])
def test_the_module_of_the_device_answers_as_torch_cuda_does_on_a_node_of_so_many(per_node, rank, devices, current):
    with world(12, gpus_per_node=per_node, rank=rank):
        module = torch.get_device_module("meta")
        for name in vars(module).keys() - {"gpus_per_node"}:
            names = {"MetaEvent": "Event", "MetaStream": "Stream"}
            assert hasattr(torch.cuda, names.get(name, name)), name
        assert module.is_available()
        assert module.is_initialized()
        assert (module.device_count(), module.current_device()) == (devices, current)
        module.set_device(0)
        module.synchronize()
        assert module.current_device() == current
        with module.stream(module.Stream()) as _:
            assert module.current_stream() != module.default_stream()
        assert module.current_stream() == module.default_stream()


def test_fsdp_brings_to_meta_only_what_is_not_there():
    """torch refuses to exchange a tensor that something else refers to; none that is on meta has to be."""
    with world(2):
        layer = nn.Linear(8, 8)
        layer.weight = nn.Parameter(layer.weight.to("meta"))
        held = weakref.ref(layer.weight)
        fully_shard(layer)
        assert layer.bias.is_meta
        assert held is not None


@pytest.mark.parametrize(
    ("ranks", "most", "ran"),
    [([0], 100, range(6)), ([0], 4, range(4)), ([0], 1, [0]), ([3, 1, 2], 2, [1, 2, 3]), ([4, 3], 3, [3, 4, 5])],
)
def test_ranks_with_which_one_exchanges_messages_run_too_up_to_so_many_in_all(ranks, most, ran):
    """Six in a row: each names the next two. Those that were asked for run however many may."""
    times = Counter[int]()

    def run(rank: int) -> int:
        times[rank] += 1
        return rank

    found = run_ranks(ranks, run, peers=lambda rank: [each for each in (rank + 2, rank + 1) if each < 6], most=most)
    assert list(found.items()) == [(rank, rank) for rank in ran]
    assert times == dict.fromkeys(ran, 1)


def test_a_rank_that_fails_ends_all_and_those_that_ended_before_are_told():
    assert run_ranks([2, 1, 0], abs, is_failed=lambda rank: rank == 1) == {1: 1, 2: 2}
