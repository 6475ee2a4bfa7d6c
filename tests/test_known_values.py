"""Known values, against real CPU execution of the same program."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from work import instructions

from flopmeter import FlopMeter
from flopmeter.known_values import Assumption, DataDependentError, KnownValues, on_meta

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


class Mode(TorchDispatchMode):
    """The least that a tracer does: decompose composites, collect the tensors, let KnownValues run the op."""

    def __init__(self, known: KnownValues):
        super().__init__()
        self.known = known
        self.ops: list[str] = []

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return tuple(self.known.assume.uses_in(None))

    @classmethod
    def ignore_compile_internals(cls):  # else two threads leave it set for what is compiled later in this process
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        is_composite = func is not torch.ops.aten.item.default and has_kernel(name, "CompositeImplicitAutograd")
        if is_composite and not (has_kernel(name, "CPU") or has_kernel(name, "Meta")):
            with self:
                return func.decompose(*args, **kwargs)
        self.ops.append(str(func))
        return self.known.run(func, args, kwargs, tensors_of((args, tuple(kwargs.values()))))


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(tensor for item in value for tensor in tensors_of(item))
    return ()


@contextmanager
def metered(**options: Any) -> Iterator[Mode]:
    with KnownValues(**options) as known, Mode(known) as mode:
        yield mode


def value(tensor: Tensor) -> list[Any] | None:
    """What is known of a meta tensor, without asking through torch."""
    (known,) = _open()
    return known.values.read(tensor).tolist() if known.values.knows(tensor) else None


def _open() -> list[KnownValues]:
    from flopmeter.known_values import entry_points

    return entry_points.open_ones()


def real(result: Any) -> Any:
    """A result that can be compared: tensors as lists."""
    if isinstance(result, Tensor):
        return (result.tolist(), result.dtype)
    if isinstance(result, (list, tuple)):
        return [real(item) for item in result]
    return result


# Programs that read data. Each takes ids [2, 6], a bool mask [2, 6] and the device, and answers with plain values.
PROGRAMS: dict[str, Callable[[Tensor, Tensor, str], Any]] = {
    "item": lambda ids, mask, device: ids.sum().item(),
    "bool": lambda ids, mask, device: [bool(mask.all()), bool(mask.any()), not mask[0, 0]],
    "int and float": lambda ids, mask, device: [int(ids[0, 1]), float(ids[0, 1]), complex(ids[0, 1])],
    "if": lambda ids, mask, device: "masked" if (mask == 0).any() else "full",
    "tolist": lambda ids, mask, device: [ids.tolist(), ids[1, 2].tolist()],
    "cpu": lambda ids, mask, device: ids.cpu()[0],
    "to cpu with a dtype": lambda ids, mask, device: ids.to("cpu", torch.float32),
    "numpy": lambda ids, mask, device: ids.numpy().tolist(),
    "f-string": lambda ids, mask, device: f"expert_{ids[0, 1]} {ids[0, 2]:3d}",
    "in": lambda ids, mask, device: [9 in ids, 12345 in ids],
    "an index list": lambda ids, mask, device: ids[:, [-1, 0]],
    "a named index list": lambda ids, mask, device: [ids[:, picked] for picked in ([0, 2, 4], [1])],
    "two index lists": lambda ids, mask, device: ids[[0, 1], [2, 3]],
    "an index tensor": lambda ids, mask, device: ids[:, torch.tensor([1, 4], device=device)],
    "python index": lambda ids, mask, device: [10, 20, 30][(ids[0, 0] - ids[0, 0] + 2)],
    "slice to a tensor": lambda ids, mask, device: ids[:, : ids[0, 2]].shape,
    "range of a tensor": lambda ids, mask, device: list(range(ids[0, 2])),
    "arange to a tensor": lambda ids, mask, device: torch.arange(ids[0, 2], device=device),
    "full of a tensor": lambda ids, mask, device: torch.full((2,), ids[0, 2], device=device),
    "nonzero": lambda ids, mask, device: mask.nonzero(),
    "nonzero as a tuple": lambda ids, mask, device: torch.where(mask),
    "argwhere": lambda ids, mask, device: torch.argwhere(ids > 3),
    "a bool mask": lambda ids, mask, device: [ids[mask], ids[mask[:, 0]]],
    "a bool mask and an integer": lambda ids, mask, device: ids[mask[:, 0], 1],
    "masked_select": lambda ids, mask, device: torch.masked_select(ids, mask),
    "unique": lambda ids, mask, device: torch.unique(ids, return_inverse=True, return_counts=True),
    "unique rows": lambda ids, mask, device: torch.unique(ids, dim=0),
    "unique_consecutive": lambda ids, mask, device: torch.unique_consecutive(ids, return_counts=True),
    "bincount": lambda ids, mask, device: torch.bincount(ids.flatten(), minlength=4),
    "repeat_interleave": lambda ids, mask, device: torch.repeat_interleave(ids[0], ids[1], dim=0),
    "equal": lambda ids, mask, device: [torch.equal(ids, ids.clone()), torch.equal(ids, ids + 1)],
    "allclose": lambda ids, mask, device: torch.allclose(ids, ids + 1),
    "combinations": lambda ids, mask, device: torch.combinations(ids[0]),
    "one_hot": lambda ids, mask, device: nn.functional.one_hot(ids).shape,
    "histc": lambda ids, mask, device: torch.histc(ids.float(), bins=4, min=0, max=8),
    "is_nonzero": lambda ids, mask, device: torch.is_nonzero(ids[0, 2]),
    "iteration": lambda ids, mask, device: [int(row.sum()) for row in ids],
    "python max": lambda ids, mask, device: int(max(ids[0])),
    "assert": lambda ids, mask, device: torch._assert(mask.any(), "all masked"),
    "where": lambda ids, mask, device: torch.where(mask, ids, -1),
    "cumsum of a mask": lambda ids, mask, device: (mask.cumsum(-1) - 1).masked_fill(~mask, 1),
    "masked_fill by a tensor": lambda ids, mask, device: ids.masked_fill(mask, ids[0, 0]),
    "masked_fill by a 0-dim CPU tensor": lambda ids, mask, device: ids.masked_fill(mask, torch.tensor(7)),
    "argmax and topk": lambda ids, mask, device: [ids.argmax(-1), ids.topk(1)],
    "lengths": lambda ids, mask, device: torch.split(ids, mask.sum(0)[:1].tolist()),
    "cumulative lengths": lambda ids, mask, device: nn.functional.pad(mask.sum(-1).cumsum(0), (1, 0)),
    "tensor of tensors": lambda ids, mask, device: torch.tensor([ids[0, 0], ids[0, 1]], device=device),
    "numbers and a vector of one": lambda ids, mask, device: torch.tensor([7, ids[0, :1], 9], device=device),
    "nested constants": lambda ids, mask, device: torch.tensor([[1, 2], [3, 4]], device=device)[1],
    "as_tensor": lambda ids, mask, device: torch.as_tensor([1, 2], device=device),
    "asarray": lambda ids, mask, device: torch.asarray([1, 2], device=device),
    "new_tensor": lambda ids, mask, device: ids.new_tensor([1, 2]),
    "a float constant": lambda ids, mask, device: torch.tensor([0.5, 2.5], device=device),
    "bool constants": lambda ids, mask, device: torch.tensor([True, False], device=device),
    "factories": lambda ids, mask, device: [
        torch.zeros(2, dtype=torch.long, device=device), ids.new_full((2,), 3), torch.ones_like(mask),
        torch.full_like(ids, 4), ids.new_zeros(2), ids.new_ones(1), torch.eye(2, device=device, dtype=torch.int),
        torch.tril(torch.ones(3, 3, dtype=torch.bool, device=device)), torch.linspace(0, 1, 3, device=device),
    ],
    "of the type of what nobody knows": lambda ids, mask, device: [
        getattr(torch.rand(3, device=device), name)(2, dtype=torch.long) for name in ("new_zeros", "new_ones")
    ],
    "empty, then written": lambda ids, mask, device: torch.empty(3, dtype=torch.long, device=device).copy_(ids[0, :3]),
    "rows written one by one": lambda ids, mask, device: written_by_rows(ids),
    "masked write": lambda ids, mask, device: masked_write(ids, mask),
    "floor of a quotient": lambda ids, mask, device: torch.ceil((ids - 3) / 2 + 1).to(torch.int64),
    "to meta inside": lambda ids, mask, device: torch.tensor([3, 1]).to(device),
    "numpy to meta inside": lambda ids, mask, device: torch.from_numpy(torch.tensor([3, 1]).numpy()).to(device),
    "deepcopy": lambda ids, mask, device: __import__("copy").deepcopy(ids),
    "dtype view": lambda ids, mask, device: ids.view(torch.int32)[0],
    "parity": lambda ids, mask, device: ids.remainder(2).bool().logical_not().sum(),
}  # fmt: skip


def written_by_rows(ids: Tensor) -> Tensor:
    out = ids.new_empty(2, 3)
    for row in range(2):
        out[row] = ids[row, 1:4]
    return out


def masked_write(ids: Tensor, mask: Tensor) -> Tensor:
    ids = ids.clone()
    ids[mask] = 100
    ids[0, 1:3] += 5
    return ids


IDS = torch.tensor([[5, 3, 4, 1, 0, 0], [2, 9, 1, 7, 7, 2]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_known_values_answers_as_on_the_cpu(name: str):
    program = PROGRAMS[name]
    ids, mask = on_meta((IDS, MASK))
    with metered():
        answer = real(program(ids, mask, "meta"))
    assert answer == real(program(IDS, MASK, "cpu"))


@pytest.mark.parametrize("name", ["item", "bool", "tolist", "nonzero as a tuple", "repeat_interleave", "a bool mask"])
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "autocast"])
def test_programs_answer_the_same_under(mode: str, name: str):
    contexts = {
        "inference_mode": torch.inference_mode, "no_grad": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }  # fmt: skip
    ids, mask = on_meta((IDS, MASK))
    with contexts[mode](), metered():
        answer = real(PROGRAMS[name](ids, mask, "meta"))
    assert answer == real(PROGRAMS[name](IDS, MASK, "cpu"))


def test_values_are_known_inside_of_functional_transforms():
    ids = on_meta(IDS)

    def loss(weight: Tensor, device: str, ids: Tensor) -> Tensor:
        steps = torch.arange(3, device=device)
        return (weight * int(steps[2] + ids[0, 0])).sum() * torch.tensor([2, 3], device=device)[0]

    def picked(weight: Tensor) -> Tensor:
        return weight[int(torch.tensor([1, 0], device="meta")[0])]

    with metered():
        assert torch.func.grad(picked)(torch.ones(2, device="meta")).shape == (2,)
        grad = torch.func.grad(loss)(torch.ones(2, device="meta"), "meta", ids)
        batched = torch.func.vmap(lambda x: x * int(ids[0, 0]))(torch.ones(3, 2, device="meta"))
    assert grad.shape == (2,)
    assert batched.shape == (3, 2)


def test_the_default_device_of_a_with_block_applies():
    with metered(), torch.device("meta"):
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        assert torch.arange(4).sum().item() == 6


# Ops that need data that nobody has. Features are random, so no value of theirs is known.
UNKNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "aten._local_scalar_dense.default": lambda x, n: x.sum().item(),
    "aten._to_copy.default": lambda x, n: x.tolist(),
    "aten.nonzero.default": lambda x, n: (x > 0).nonzero(),
    "aten.index.Tensor": lambda x, n: x[x > 0],
    "aten.masked_select.default": lambda x, n: x.masked_select(x > 0),
    "aten._unique2.default": lambda x, n: x.unique(),
    "aten.unique_dim.default": lambda x, n: x.unique(dim=0),
    "aten.unique_consecutive.default": lambda x, n: x.unique_consecutive(),
    "aten.bincount.default": lambda x, n: torch.bincount(n),
    "aten.equal.default": lambda x, n: torch.equal(x, x),
    "aten.allclose.default": lambda x, n: torch.allclose(x, x),
    "aten.repeat_interleave.Tensor": lambda x, n: torch.repeat_interleave(x[0], n, dim=0),
    "aten.copy_.default": lambda x, n: torch.empty(3, 4).copy_(x),
}


@pytest.mark.parametrize("op", UNKNOWN)
def test_what_nobody_can_know_fails_with_the_op_and_the_line(op: str):
    with metered():
        features, counts = torch.rand(3, 4, device="meta"), torch.randint(5, (4,), device="meta")
        with pytest.raises(DataDependentError) as raised:
            UNKNOWN[op](features, counts)
    line = UNKNOWN[op].__code__.co_firstlineno
    assert raised.value.op == op
    assert raised.value.where == f"{__file__}:{line}"
    assert f"{op} at {__file__}:{line}" in str(raised.value)
    assert "on_meta" in str(raised.value)


def test_backward_of_ctc_loss_is_refused_by_name():
    with metered():
        scores = torch.rand(8, 2, 5, device="meta").log_softmax(-1).requires_grad_()
        loss = nn.functional.ctc_loss(scores, torch.tensor([[1, 2], [2, 3]]).to("meta"), (8, 8), (2, 2))
        with pytest.raises(DataDependentError, match="_ctc_loss_backward"):
            loss.backward()


def test_a_tensor_of_one_number_has_it_everywhere_whatever_part_is_read():
    with metered():
        sevens = torch.full((300, 400), 7, device="meta")
        assert sevens.sum().item() == 7 * 300 * 400
        assert sevens[298:, 398:].tolist() == [[7, 7], [7, 7]]
        assert sevens.t()[399].unique().tolist() == [7]


@pytest.mark.parametrize("ask", [bool, int, float, lambda t: [0][t], lambda t: torch.arange(t), lambda t: 1 in t])
def test_every_way_to_ask_for_one_number_fails_alike(ask: Callable[[Tensor], Any]):
    with metered(), pytest.raises(DataDependentError):
        ask(torch.randint(5, (), device="meta"))


def test_ops_that_meta_can_run_without_values_still_run():
    with metered():
        x = torch.rand(3, 4, device="meta")
        x[x > 0] = 0
        assert torch.repeat_interleave(x, torch.randint(3, (3,), device="meta"), 0, output_size=7).shape == (7, 4)
        assert x.masked_scatter(x > 0, x).shape == (3, 4)
        assert nn.functional.one_hot(torch.randint(3, (2,), device="meta"), 3).shape == (2, 3)


def test_what_cannot_be_read_on_cuda_either_fails_as_there():
    with metered():
        with pytest.raises(RuntimeError, match="to be on cpu"):
            torch.tensor_split(torch.rand(4, device="meta"), torch.tensor([1, 2], device="meta"))
        with pytest.raises(TypeError, match="numpy"):
            torch.rand(4, device="meta").numpy()


# --- which tensors are known


def test_weights_are_never_known():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("positions", torch.arange(2))

    outside, real_net = on_meta(Net()), Net()
    with metered():
        moved = real_net.to("meta")
        with torch.device("meta"):
            built = Net()
        for net in (outside, moved, built):
            assert [value(net.weight), value(net.codes)] == [None, None]
            assert value(net.positions) == [0, 1]
            with pytest.raises(DataDependentError):
                net.weight.detach().sum().item()
            with pytest.raises(DataDependentError):
                net.weight.data.sum().item()
            assert value(net.mean) == [0, 0]
        assert value(torch.rand(3, requires_grad=True).to("meta")) is None
        assert value(torch.zeros(3, device="meta").requires_grad_()) is None
        assert value(torch.empty(3, device="meta").copy_(torch.ones(3, requires_grad=True))) is None


def test_forgotten_tensors_are_data():
    with metered() as mode:
        x = torch.arange(3, device="meta")
        mode.known.forget([x])
        with pytest.raises(DataDependentError):
            x.tolist()


def test_a_balanced_routing_among_hundreds_of_experts_stays_known():
    """LongCat-Flash: a one-hot mask [tokens, choices, experts] of 2^22 elements tells the experts that were hit."""
    tokens, choices, experts = 512, 12, 768
    with metered(routing="balanced") as mode:
        scores = torch.empty(tokens, experts, device="meta")
        mask = torch.nn.functional.one_hot(scores.topk(choices, sorted=False)[1], experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        assert hit.flatten().tolist() == list(range(experts))
        picked = [len(torch.where(mask[expert])[1]) for expert in (0, 767)]
    assert picked == [tokens * choices // experts] * 2 == [8, 8]
    assert mode.assumptions[0].rule == 'routing="balanced"'


@pytest.mark.parametrize(("size", "is_known"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_values_are_kept_up_to_a_size(size: int, is_known: bool):
    outside = on_meta(torch.ones(size, dtype=torch.bool))
    with metered():
        assert (value(outside) is not None) == is_known
        assert (value(torch.ones(size, dtype=torch.bool, device="meta")) is not None) == is_known


def test_a_write_of_unknown_values_makes_every_view_unknown():
    with metered():
        base = torch.zeros(4, 4, dtype=torch.long, device="meta")
        row, column = base[1], base[:, 2]
        row.add_(3)
        assert value(column) == [0, 3, 0, 0]
        column.copy_(torch.randint(9, (4,), device="meta"))
        assert [value(base), value(row)] == [None, None]
        base.fill_(7)
        assert value(row) == [7, 7, 7, 7]


def test_random_numbers_are_unknown():
    with metered():
        for made in (
            torch.randint(5, (3,), device="meta"),
            torch.zeros(3, dtype=torch.long, device="meta").random_(5),
            torch.bernoulli(torch.full((3,), 0.5, device="meta")),
        ):
            assert value(made) is None


def test_a_permutation_hangs_on_no_data_so_any_stands_for_a_gpus():
    torch.manual_seed(1)
    here = torch.rand(3)
    torch.manual_seed(1)
    with metered():
        first, second = (value(torch.randperm(50, device="meta")) for _ in range(2))
        edges = torch.arange(50, device="meta")[torch.randperm(50, device="meta")]
        kept = edges[edges < 20]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert len(kept) == 20
    assert torch.equal(torch.rand(3), here), "the program's own draws go on as on a machine with a GPU"


def test_values_end_with_the_context():
    with metered() as mode:
        x = torch.arange(3, device="meta")
        assert value(x) == [0, 1, 2]
    assert not mode.known.values.cells
    with metered(), pytest.raises(DataDependentError):
        x.tolist()


# --- on_meta


@dataclass
class Batch:
    ids: Tensor
    size: int


Pair = namedtuple("Pair", "ids mask")


def test_on_meta_keeps_the_form_of_the_tree():
    ids = torch.tensor([1, 2])
    tree = {
        "list": [ids, 3, None, "text"],
        "pair": Pair(ids, ids.bool()),
        "encoding": UserDict(ids=ids),
        "output": OrderedDict(ids=ids),
        "batch": Batch(ids, 2),
        "features": torch.rand(2, 3).t(),
    }
    twin = on_meta(tree)
    assert [twin["list"][1:], type(twin["pair"]), type(twin["encoding"])] == [[3, None, "text"], Pair, UserDict]
    assert [type(twin["output"]), type(twin["batch"]), twin["batch"].size] == [OrderedDict, Batch, 2]
    assert twin["features"].is_meta
    assert [twin["features"].shape, twin["features"].stride()] == [(3, 2), (1, 3)]
    with metered():
        places = (twin["list"][0], twin["pair"].ids, twin["encoding"]["ids"], twin["output"]["ids"], twin["batch"].ids)
        assert [value(place) for place in places] == [[1, 2]] * 5
        assert value(twin["pair"].mask) == [True, True]
    assert all(place is places[0] for place in places)
    assert tree["batch"].ids is ids
    assert not ids.is_meta


def test_on_meta_takes_a_module_with_tied_weights():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[1].weight = net[0].weight
    twin = on_meta(net)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert twin[1].weight is twin[0].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.requires_grad
    assert not net[0].weight.is_meta
    with metered():
        assert value(twin[2].num_batches_tracked) == 0


def test_on_meta_works_inside_of_the_context_and_is_no_op_of_the_program():
    with metered() as mode:
        assert on_meta({"ids": IDS})["ids"].tolist() == IDS.tolist()
        assert mode.ops == ["aten._to_copy.default"]  # tolist


def test_a_twin_that_was_written_to_outside_is_not_trusted():
    ids, kept = on_meta((IDS, IDS.clone()))
    ids[0] = 3
    with metered():
        assert value(ids) is None
        kept[0, 0] = 77
        assert value(kept)[0][0] == 77
    with metered():  # and what the first context wrote is not undone for the second
        assert value(kept) is None


def test_a_twin_is_known_in_one_context_after_the_other():
    ids = on_meta(IDS)
    for _ in range(2):
        with metered():
            assert ids.tolist() == IDS.tolist()


def test_a_result_of_its_own_does_not_share_its_value_with_what_the_cpu_hands_back():
    """A kernel for the CPU that returns its argument, beside one for the device that makes a tensor."""
    library = torch.library.Library("flopmeter_known_values", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CPU")
    library.impl("same", torch.empty_like, "Meta")
    try:
        with metered():
            ids = on_meta(IDS)
            result = torch.ops.flopmeter_known_values.same(ids)
            result.add_(1)
            assert ids.tolist() == IDS.tolist()
            assert value(result) in ((IDS + 1).tolist(), None)  # torch 2.15 refuses the kernel for the CPU
    finally:
        library._destroy()


# --- nothing left behind, nothing changed


def _state() -> list[Any]:
    owners = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor"),
              (Tensor, "__format__"), (Tensor, "numpy"), (Tensor, "__getitem__"))  # fmt: skip
    is_sequence = ctypes.pythonapi.PySequence_Check
    is_sequence.argtypes = [ctypes.py_object]
    return [
        *(getattr(owner, name) for owner, name in owners),
        *sorted(vars(Tensor)),
        is_sequence(torch.ones(())),
        has_kernel("aten::item", "AutogradMeta"),
    ]


def test_while_a_graph_is_traced_torch_has_its_own_functions_again():
    """Dynamo knows these by identity, and would trace into a wrapper."""
    from flopmeter.known_values import entry_points

    before = _state()
    with metered():
        patched = _state()
        with entry_points.as_torch_has_them():
            assert _state()[:6] == before[:6]
        assert _state() == patched
    assert patched[:6] != before[:6]


@pytest.mark.parametrize("error", [None, ValueError])
def test_entering_and_leaving_leaves_nothing_behind(error: type[Exception] | None):
    before = _state()
    with pytest.raises(error) if error else nullcontext():
        with metered(), metered():
            torch.tensor([1], device="meta").item()
            if error:
                raise error
    assert _state() == before
    with pytest.raises(RuntimeError, match="cannot be called on meta"):
        torch.ones((), device="meta").item()
    with torch.device("meta"):
        assert torch.tensor(1).is_meta


def test_cpu_tensors_compute_as_ever_inside():
    def program() -> list[Any]:
        torch.manual_seed(0)
        x = torch.rand(4, 4)
        picked = [x[[0, 2]], x[x > 0.5], x.unique(), x.nonzero(), torch.tensor([x[0, 0], x[1, 1]])]
        return real([*picked, f"{x[0, 0]:.3f}", x.numpy().tolist(), x.sum().item(), torch.equal(x, x), x @ x])

    expected = program()
    with metered():
        assert program() == expected


def test_the_stream_of_autograd_is_not_changed():
    class Plain(Mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    def train(mode: Mode) -> list[str]:
        with torch.device("meta"):
            net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
            ids = torch.zeros(2, 3, dtype=torch.long)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with mode:
            for _ in range(2):
                nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return mode.ops

    with KnownValues() as known:
        assert train(Mode(known)) == train(Plain(known))


def test_values_die_with_their_storages():
    ids = on_meta(torch.arange(5))
    with metered() as mode:
        cells = mode.known.values.cells
        before = len(cells)
        x = torch.arange(4, device="meta")
        view = x[1:]
        del x
        assert value(view) == [1, 2, 3]
        for _ in range(50):
            view = view + 1
        assert len(cells) == before + 1
        del view, ids
        gc.collect()
        assert len(cells) == before - 1


def test_another_thread_is_not_touched():
    seen: list[Any] = []

    def other() -> None:
        try:
            torch.tensor(3, device="meta").item()
        except RuntimeError as error:
            seen.append(str(error))
        seen.append(torch.tensor([1, 2]).tolist())

    with metered():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == ["Tensor.item() cannot be called on meta tensors", [1, 2]]


def test_two_threads_know_their_own_values():
    answers: dict[int, list[int]] = {}

    def run(number: int) -> None:
        with metered():
            answers[number] = [(torch.arange(number, device="meta") + step).sum().item() for step in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [n * (n - 1) // 2 + n * step for step in range(20)] for n in (3, 4)}


# --- rewritten calls


def test_a_known_bool_mask_over_features_is_reported_as_the_gather_that_it_is():
    mask = on_meta(torch.tensor([True, False, True]))
    with metered() as mode:
        features = torch.rand(3, 4, device="meta")
        assert features[mask].shape == (2, 4)
        func, (ran_on, (positions,)), _ = mode.known.ran
        assert [func, ran_on.shape, value(positions)] == [torch.ops.aten.index.Tensor, (3, 4), [0, 2]]
        features[mask] = torch.ones(2, 4, device="meta")
        assert value(mode.known.ran[1][1][0]) == [0, 2]
        features + 1
        assert (mode.known.ran, mode.known.before) == (None, [])


def test_gradients_flow_through_a_known_mask():
    mask = on_meta(torch.tensor([True, False, True]))
    with metered():
        features = torch.rand(3, 4, device="meta", requires_grad=True)
        (features[mask].sum() + features.masked_select(mask[:, None]).sum()).backward()
        assert features.grad.shape == (3, 4)


# --- assumptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": "even"}, r"routing must be None, 'balanced', 'independent' or .*, not 'even'"),
        ({"checks": True}, "checks must be None or 'hold', not True"),
        ({"mask_fraction": 1.5}, "mask_fraction must be None or a number from 0 to 1, not 1.5"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        KnownValues(**options)


def _here(offset: int = 0) -> str:

    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_balanced_routing_gives_each_expert_its_share():
    with metered(routing="balanced") as mode:
        scores = torch.rand(6, 4, device="meta").softmax(-1)
        for _ in range(2):
            _, chosen = scores.topk(2)
            line, picked = _here(-1), value(chosen)
        assert picked == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]
        assert torch.bincount(chosen.flatten()).tolist() == [3, 3, 3, 3]
        assert value(scores.argmax(-1)) == [0, 1, 2, 3, 0, 1]
        assert value(scores.max(-1, keepdim=True).indices) == [[0], [1], [2], [3], [0], [1]]
        assert value(torch.multinomial(scores, 2))[1] == [2, 3]
        assert value(scores.t().topk(2, dim=0).indices)[0] == [0, 2, 0, 2, 0, 2]
        assert value(torch.tensor([3, 9, 1], device="meta").argmax()) == 1  # known, so not assumed
    assert mode.assumptions[0] == Assumption('routing="balanced"', "aten.topk.default", line, 2)
    assert len(mode.assumptions) == 5


def test_checks_hold_where_they_cannot_be_made():
    with metered(checks="hold") as mode:
        x = torch.rand(3, device="meta")
        assert (x >= 0).all()
        assert torch.equal(x, x)
        assert torch.allclose(x, x + 1)
        torch._check_tensor_all(x > 0)
        assert not torch.zeros(2, dtype=torch.bool, device="meta").all()  # known to be false
        with pytest.raises(DataDependentError):
            bool((x > 0).any())
    assert [use.op for use in mode.assumptions] == [
        "aten.all.default", "aten.equal.default", "aten.allclose.default", "aten._is_all_true.default",
    ]  # fmt: skip
    assert all(use.rule == 'checks="hold"' and __file__ in use.where for use in mode.assumptions)


def test_checks_hold_lets_gradients_be_finite():
    with metered(checks="hold") as mode:
        found = torch.zeros(1, device="meta")
        scale = torch.ones(1, device="meta")
        torch._amp_foreach_non_finite_check_and_unscale_([torch.rand(3, device="meta")], found, scale)
        assert found.item() == 0
    assert len(mode.assumptions) == 1


def test_a_sample_through_which_gradients_go_straight_is_the_sample():
    """As policies over actions in one-hot form are sampled; their programs read which action it is."""
    with metered(routing="balanced", checks="hold") as mode, torch.no_grad():
        chances = torch.rand(2, 5, device="meta").softmax(-1)
        sample = torch.nn.functional.one_hot(torch.multinomial(chances, 1)[:, 0], 5).float()
        sample += chances - chances.detach()
        for action in sample.cpu():
            assert sorted(action.tolist()) == [0, 0, 0, 0, 1]
        other = torch.rand(2, 5, device="meta")
        for unknown in (chances - other, chances - chances.flatten()[:5], torch.sub(chances, chances, alpha=2)):
            with pytest.raises(DataDependentError):
                unknown.cpu()
    assert {use.rule for use in mode.assumptions} == {'checks="hold"', 'routing="balanced"'}


@pytest.mark.parametrize(("fraction", "kept"), [(0.0, 0), (0.25, 3), (0.5, 6), (1.0, 12)])
def test_a_share_of_an_unknown_mask_is_true(fraction: float, kept: int):
    with metered(mask_fraction=fraction) as mode:
        x = torch.rand(3, 4, device="meta")
        mask = x > 0.5
        assert x[mask].shape == (kept,)
        assert mask.sum().item() == kept  # the same mask has the same share from then on
        assert (x > 0.1).nonzero().shape == (kept, 2)
        assert x.masked_select(x > 0.2).shape == (kept,)
    assert [use.count for use in mode.assumptions] == [1, 1, 1]
    assert mode.assumptions[0].rule == f"mask_fraction={fraction:g} (of a mask holds)"


def test_a_mask_that_is_written_into_another_picks_as_many_there():
    """A detector narrows the mask of its anchors by the matched ones, and reads features by both."""
    with metered(mask_fraction=0.25):
        features = torch.rand(16, 4, device="meta")
        mask = features[:, 0] > 0.5
        matched = features[mask][:, 1] > 0.5
        mask[mask.clone()] = matched
        assert len(features[mask]) == len(torch.rand(4, device="meta")[matched]) == 1


def test_nothing_is_assumed_unasked():
    with metered() as mode:
        scores = torch.rand(6, 4, device="meta")
        with pytest.raises(DataDependentError, match="routing="):
            scores.topk(2).indices.tolist()
        with pytest.raises(DataDependentError, match="checks="):
            bool((scores > 0).all())
        with pytest.raises(DataDependentError, match="mask_fraction="):
            scores[scores > 0]
    assert mode.assumptions == ()


# --- writes that torch leaves open


@pytest.mark.parametrize(
    ("write", "is_open"),
    [
        (lambda x, i: x.scatter_(0, i, torch.arange(3).to(i.device)), True),
        (lambda x, i: x.index_copy_(0, i, torch.arange(3).to(i.device)), True),
        (lambda x, i: x.__setitem__(i, torch.arange(3).to(i.device)), True),
        (lambda x, i: x.__setitem__(i, 7), False),
        (lambda x, i: x.scatter_(0, i, 7), False),
        (lambda x, i: x.index_put_((i,), torch.arange(3).to(i.device), accumulate=True), False),
        (lambda x, i: x.index_add_(0, i, torch.arange(3).to(i.device)), False),
    ],
)
@pytest.mark.parametrize("places", [[1, 1, 0], [0, 1, 2]])
def test_of_two_elements_written_to_one_place_it_is_open_which_stays(write, is_open, places):
    on_cpu, i = torch.zeros(4, dtype=torch.long), torch.tensor(places)
    write(on_cpu, i)
    with metered() as mode:
        twin = torch.zeros(4, dtype=torch.long, device="meta")
        write(twin, i.to("meta"))
        knows = mode.known.values.knows(twin)
        assert knows == (not is_open or places == [0, 1, 2])
        assert not knows or torch.equal(mode.known.values.read(twin), on_cpu)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i, y: x.scatter_(0, torch.stack([i, i], 1), torch.stack([y, y + 1], 1)),
        lambda x, i, y: x.scatter_(1, torch.stack([i, i]), torch.stack([y, y + 1])),
        lambda x, i, y: x.index_copy_(1, i, torch.stack([y] * 4)),
        lambda x, i, y: x.__setitem__(i, torch.stack([y] * 4, 1)),
        lambda x, i, y: x.__setitem__((i, i), y),
        lambda x, i, y: x.__setitem__((0, i), y),
    ],
)
@pytest.mark.parametrize("written", [[7, 7, 5], [7, 6, 5]])
def test_equal_numbers_that_are_written_to_one_place_stay_whichever_comes_last(write, written):
    """So does a scatter that sends what it does not need to one spare place."""
    on_cpu, i, y = torch.zeros(4, 4, dtype=torch.long), torch.tensor([1, 1, 0]), torch.tensor(written)
    write(on_cpu, i, y)
    with metered() as mode:
        twin = torch.zeros(4, 4, dtype=torch.long, device="meta")
        write(twin, i.to("meta"), y.to("meta"))
        assert mode.known.values.knows(twin) == (written == [7, 7, 5])
        assert written != [7, 7, 5] or torch.equal(mode.known.values.read(twin), on_cpu)


def test_a_place_counted_from_the_end_is_the_same_place():
    with metered() as mode:
        x = torch.zeros(4, dtype=torch.long, device="meta")
        x[torch.tensor([-1, 2])] = torch.tensor([5, 6], device="meta")
        assert mode.known.values.read(x).tolist() == [0, 0, 6, 5]
        x[torch.tensor([-1, 3])] = torch.tensor([5, 6], device="meta")
        assert not mode.known.values.knows(x)


def test_a_fill_of_overlapping_windows_does_not_know_the_rest():
    """Two windows of two cover three of four elements: as many elements, but not the whole storage."""
    with metered() as mode:
        x = torch.empty(4, dtype=torch.long, device="meta")
        mode.known.forget([x])
        x.unfold(0, 2, 1)[:2].fill_(3)
        assert not mode.known.values.knows(x)


# --- random programs of views and writes, on known and unknown tensors


def _random_dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(x.dim())


VIEWS = [
    lambda rng, x: x.transpose(_random_dim(rng, x), _random_dim(rng, x)),
    lambda rng, x: x.select(dim := _random_dim(rng, x), rng.randrange(x.shape[dim])),
    lambda rng, x: x.narrow(dim := _random_dim(rng, x), rng.randrange(x.shape[dim]), 1),
    lambda rng, x: x[..., :: rng.choice((1, 2))],
    lambda rng, x: x.flatten(),
    lambda rng, x: x.view(-1, 2),
    lambda rng, x: x.unsqueeze(0).expand(2, *x.shape),
    lambda rng, x: x.diagonal(),
    lambda rng, x: x.detach(),
    lambda rng, x: x.view(torch.int32),
    lambda rng, x: x.unbind(0)[-1],
    lambda rng, x: x.as_strided((2,), (1,)),
    lambda rng, x: x.unfold(0, 2, 1),
]
WRITES = [
    lambda rng, x, y: x.add_(rng.randrange(5)),
    lambda rng, x, y: x.add_(y),
    lambda rng, x, y: x.copy_(y),
    lambda rng, x, y: x.fill_(rng.randrange(5)),
    lambda rng, x, y: x.zero_(),
    lambda rng, x, y: x.masked_fill_(y > 2, 9),
    lambda rng, x, y: x.__setitem__(x > 3, 1),
    lambda rng, x, y: x.__setitem__(y > 3, 1),
    lambda rng, x, y: x.__setitem__(0, y),
    lambda rng, x, y: x.index_fill_(0, y.flatten()[:1].clamp(0, 0), 4),
    lambda rng, x, y: x.index_add_(0, torch.zeros(1, dtype=torch.long, device=x.device), y[:1]),
    lambda rng, x, y: x.clamp_(max=y),
    lambda rng, x, y: x.scatter_(0, torch.zeros_like(y), y),
    lambda rng, x, y: torch.add(x, y, out=x),
    lambda rng, x, y: x.swapaxes_(0, -1),
    lambda rng, x, y: torch._foreach_add_([x, x], 1),
    lambda rng, x, y: x.random_(5),
]
MAKES = [
    lambda rng, x, y: x + y,
    lambda rng, x, y: torch.cat([x, x]),
    lambda rng, x, y: torch.where(x > y, x, y),
    lambda rng, x, y: x.clone(),
    lambda rng, x, y: x.to(torch.float32) / 2,
    lambda rng, x, y: x.cumsum(0).to(x.dtype),
    lambda rng, x, y: x.sort(stable=True).values,
    lambda rng, x, y: x.nonzero(),
    lambda rng, x, y: x[x > 1],
    lambda rng, x, y: x[y > 1],
    lambda rng, x, y: x.contiguous(),
    lambda rng, x, y: x.reshape(-1),
    lambda rng, x, y: x.sum(-1),
    lambda rng, x, y: x.new_full((2, 2), 3),
    lambda rng, x, y: torch.zeros_like(x),
    lambda rng, x, y: x.gather(0, y.clamp(0, 0)),
]


def _step(rng: random.Random, pool: list[Tensor]) -> tuple[Callable[..., Any], tuple[int, ...], int]:
    kind = rng.choice((VIEWS, VIEWS, WRITES, MAKES))
    arguments = tuple(rng.randrange(len(pool)) for _ in range(1 if kind is VIEWS else 2))
    return rng.choice(kind), arguments, rng.randrange(1 << 30)


def _run_random_program(seed: int, steps: int) -> tuple[int, int]:
    """How many values were known in the end, of how many; every known one is checked against the CPU."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    on_cpu = [torch.randint(6, (3, 4)), torch.randint(6, (4, 2)), torch.randint(6, (3, 4)), torch.arange(4)]
    with metered() as mode:
        twins = [tensor.to("meta") for tensor in on_cpu]
        mode.known.forget(twins[2:3])
        for _ in range(steps):
            func, picked, draw = _step(rng, on_cpu)
            storage = on_cpu[picked[0]].untyped_storage()
            before = storage.clone()
            try:
                result = func(random.Random(draw), *(on_cpu[i] for i in picked))
            except (RuntimeError, IndexError, ValueError):
                continue
            try:
                twin = func(random.Random(draw), *(twins[i] for i in picked))
            except DataDependentError:  # nothing was written on meta
                storage.copy_(before)
                continue
            if isinstance(result, Tensor) and 0 < result.numel() < 500:
                on_cpu.append(result)
                twins.append(twin)
            for tensor, meta in zip(on_cpu, twins, strict=True):
                assert tensor.shape == meta.shape
                assert mode.known.values.knows(meta) is False or torch.equal(tensor, mode.known.values.read(meta)), seed
        return sum(map(mode.known.values.knows, twins)), len(twins)


def test_random_programs_know_only_what_is_true():
    known, total = map(sum, zip(*(_run_random_program(seed, 24) for seed in range(150)), strict=True))
    assert known > total / 3  # the fuzz is of use only while a good part is known


@pytest.mark.slow
def test_many_random_programs_know_only_what_is_true():
    for seed in range(1000, 4000):
        _run_random_program(seed, 40)


# --- cost


def test_an_op_on_unknown_tensors_costs_about_nothing_extra():
    aten = torch.ops.aten
    with KnownValues() as known:
        x, twin = torch.rand(2, 2), torch.arange(3, device="meta")
        known.values.write(twin, torch.arange(3))
        args, addresses = (x, x), [x.untyped_storage()._cdata] * 2

        def through() -> None:
            known.run(aten.add.Tensor, args, {}, args, addresses)

        through()
        assert instructions(through) < 100  # it is 46 or so: a look-up


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        module.index.copy_(torch.arange(4))

    def forward(self) -> int:
        return int(self.index[3])


def test_buffers_are_recalled_under_inference_mode_too():
    with torch.device("meta"):
        model = Positions()
    with FlopMeter("a100-sxm4-80gb"), torch.inference_mode():
        assert model() == 3


def test_a_buffer_whose_initializer_fails_stays_unknown():
    class Failing(Positions):
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            raise AttributeError("what a copy of the module does not have")

    with torch.device("meta"):
        model = Failing()
    with FlopMeter("h100-sxm5-80gb"), pytest.raises(DataDependentError):
        model()


def test_a_buffer_that_a_checkpoint_holds_is_not_recalled_from_the_initializer():
    """Its file may hold other numbers."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lost", torch.zeros(4, dtype=torch.long), persistent=False)
            self.register_buffer("kept", torch.zeros(4, dtype=torch.long))

        def _init_weights(self, module: nn.Module) -> None:
            module.lost.copy_(torch.arange(4))
            module.kept.copy_(torch.arange(4))

        def forward(self, name: str) -> int:
            return int(getattr(self, name)[3])

    with torch.device("meta"):
        model = Steps()
    with FlopMeter("a100-sxm4-80gb"):
        assert model("lost") == 3
        with pytest.raises(DataDependentError):
            model("kept")


def test_a_choice_that_nobody_looks_at_is_no_assumption():
    """A softmax subtracts a maximum: which element it was decides nothing, in the backward pass neither."""
    with metered(routing="balanced") as mode:
        scores = torch.rand(6, 4, device="meta", requires_grad=True)
        (scores - scores.max(-1, keepdim=True).values).exp().sum().backward()
        torch.rand(4, 8, device="meta")[scores.topk(1).indices]
        assert mode.assumptions == ()
        for expert in scores.topk(2).indices.unique().tolist():
            assert expert in range(4)
        assert [(use.op, use.count) for use in mode.assumptions] == [("aten.topk.default", 1)]


@pytest.mark.parametrize(
    ("ask", "way_out"),
    [
        (lambda scores: scores.cpu(), "put a stand-in"),
        (lambda scores: scores.cpu(), "activations that wait there"),
        (lambda scores: scores.sum().item(), "keep logging and convergence tests"),
        (lambda scores: scores[scores > 0], "FlopMeter(mask_fraction=0.5)"),
        (lambda scores: torch.nonzero(scores), "FlopMeter(mask_fraction=0.5)"),
    ],
)
def test_the_error_says_what_to_do_about_the_op_that_asked(ask, way_out):
    scores = torch.empty(64, device="meta")
    with metered(), pytest.raises(DataDependentError) as raised:
        ask(scores)
    assert way_out in str(raised.value)


def test_a_list_of_indices_may_stand_on_lines_of_its_own():
    with FlopMeter():
        ids = on_meta(torch.tensor([5, 6, 7]))
        # fmt: off
        picked = ids[
            [0,
             2]
        ]
        # fmt: on
        assert picked.tolist() == [5, 7]


def test_a_text_of_a_tensor_on_meta_is_torchs_own_unless_it_is_one_known_number():
    some = torch.ones(3, device="meta")
    plain = f"{some}"
    with metered():
        assert f"{some}" == plain
        with pytest.raises(TypeError, match="format string"):
            format(some, ".2f")
        assert f"{torch.tensor(2.5, device='meta'):.2f}" == "2.50"


def test_two_writes_to_one_place_that_are_counted_from_both_ends_leave_it_unknown():
    """torch does not say which one stays. Of five places, 1 is also -4."""
    with metered():
        x = torch.zeros(5, dtype=torch.long, device="meta")
        x[torch.tensor([1, -4], device="meta")] = torch.tensor([10, 20], device="meta")
        assert value(x) is None
        y = torch.zeros(5, dtype=torch.long, device="meta")
        y[torch.tensor([1, -1], device="meta")] = torch.tensor([10, 20], device="meta")
        assert value(y) == [0, 10, 0, 0, 20]


@pytest.mark.parametrize("unique", [torch.unique, torch.unique_consecutive])
def test_a_stated_share_of_unknown_numbers_are_different_ones(unique):
    codes = torch.empty(8, 125, dtype=torch.int32, device="meta")
    with FlopMeter(mask_fraction=0.1) as meter:
        found, places, counts = unique(codes, return_inverse=True, return_counts=True)
    assert (found.shape, found.dtype) == ((100,), torch.int32)
    assert (places.shape, counts.shape) == ((8, 125), (100,))
    assert "mask_fraction=0.1 (of the numbers differ)" in meter.report().assumptions[0]


def test_without_a_share_the_different_ones_of_unknown_numbers_are_an_error_that_says_so():
    with FlopMeter(), pytest.raises(DataDependentError, match="what share of such numbers differ"):
        torch.empty(8, device="meta").unique()


def test_stand_ins_are_all_alike_where_a_metric_counts_the_classes_of_predictions():
    with FlopMeter(unknown="stand-in") as meter:
        found, counts = torch.empty(100, 8, device="meta").argmax(1).unique(return_counts=True)
    assert (len(found), counts.shape) == (1, (1,))
    assert "unknown numbers are alike" in meter.report().assumptions[0]


def test_a_confusion_matrix_of_predictions_has_as_many_counts_as_the_script_asks_for():
    predicted = torch.empty(100, dtype=torch.int64, device="meta")
    with FlopMeter(unknown="stand-in") as meter:
        matrix = torch.bincount(predicted, minlength=9).reshape(3, 3)
        weighted = torch.bincount(predicted, torch.empty(100, device="meta"), minlength=9)
    assert (matrix.dtype, weighted.dtype, weighted.shape) == (torch.int64, torch.float32, (9,))
    assert "no number reaches minlength=9" in meter.report().assumptions[0]
    with FlopMeter(unknown="stand-in"), pytest.raises(DataDependentError):
        torch.bincount(predicted)
