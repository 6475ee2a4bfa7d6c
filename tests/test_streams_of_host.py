"""torch's own stream on the CPU, forward and backward, is that of a meter, but where CUDA has ops of its own.

The inputs are those that torch's own tests give its operators. What Python's bindings and the formulas of autograd do
is the same for both devices, so a difference is a fault of the emulation, or stands here with its reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_samples import inputs_of
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter import FlopMeter

NOTHING = {"lift_fresh", "detach", "alias", "to"}  # ops that launch nothing
# A formula adds to zeros of its own; under a dispatch mode torch copies them first (flopmeter/trace/gradients.py).
IN_PLACE = {"scatter_": "scatter", "scatter_add_": "scatter_add", "index_add_": "index_add"}
IN_PLACE |= {"_index_put_impl_": "index_put"}

OWN_OPS_OF_CUDA = {
    "allclose": "a composite there",
    "masked_select": "an index with a mask there",
    "combinations": "calls masked_select",
    "index_put": "finds the places of a mask by nonzero",
    "nn.functional.batch_norm": "cuDNN's",
    "nn.functional.instance_norm": "calls batch_norm",
    "nn.functional.rms_norm": "one kernel",
    "nn.functional.dropout": "one kernel",
    "nn.functional.multi_head_attention_forward": "calls dropout",
    "nn.functional.scaled_dot_product_attention": "calls dropout",
    "nn.functional.ctc_loss": "lengths that go to the host",
    "quantile": "asks whether its places are from 0 to 1 only on the host (until torch 2.12)",
    "nanquantile": "calls quantile",
    "nn.functional.embedding_bag": "a mode of its own for the largest",
}
REFUSED = {
    "histogram": "has no kernel for CUDA",
    "histogramdd": "has no kernel for CUDA",
    "sparse.mm": "reduce has no kernel for CUDA",
    "sparse.sampled_addmm": "has no kernel for meta",
    "geqrf": "has no kernel for meta",
    "cov": "asks whether there are enough values, and then writes to what autograd keeps",
    "tensor_split": "refuses places on the device",
    "linalg.lstsq": "has one driver on CUDA",
}


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(each.is_meta for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)):
            self.names.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def run(entry: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    outputs = [each for each in tree_leaves(entry.op(*inputs, **options)) if isinstance(each, Tensor)]
    learns = [each for each in outputs if each.requires_grad]
    if learns:
        torch.autograd.backward(learns, [torch.ones_like(each) for each in learns])


def anew(tree: Any, device: str) -> Any:
    """The same tensors on that device, each once, without gradients."""
    there: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return device if leaf == "cpu" else torch.device(device) if leaf == torch.device("cpu") else leaf
        if id(leaf) not in there:
            there[id(leaf)] = leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)
        return there[id(leaf)]

    return tree_map(copy, tree)


def counted(names: Iterator[str]) -> Counter[str]:
    return Counter(IN_PLACE.get(name, name) for name in names if name not in NOTHING)


def difference(entry: Any, sample: Any) -> str:
    """What only one of the two runs; '' if nothing. A sample that torch refuses on the CPU is none."""
    inputs, options = (sample.input, *sample.args), sample.kwargs
    on_host = anew((inputs, options), "cpu")
    try:
        with Names() as host:
            run(entry, *on_host)
    except Exception:
        return ""
    with FlopMeter(unknown="stand-in", checks="hold", mask_fraction=0.5) as meter:
        on_meta = anew((inputs, options), "meta")
        before = len(meter.trace.ops)
        try:
            run(entry, *on_meta)
        except (NotImplementedError, RuntimeError) as error:
            return f"meter: {error}"
    ours, theirs = (
        counted(str(op.packet).removeprefix("aten.") for op in meter.trace.ops[before:]),
        counted(iter(host.names)),
    )
    # torch.tensor(..., device=...) sends numbers to a device, but not to the host.
    ours["_to_copy"] = min(ours["_to_copy"], theirs["_to_copy"])
    return f"host: {dict(theirs - ours)}, meter: {dict(ours - theirs)}" if ours != theirs else ""


def difference_of_any(entry: Any, count: int) -> str:
    samples = inputs_of(entry, requires_grad=entry.supports_autograd)
    return next(filter(None, (difference(entry, sample) for sample in itertools.islice(samples, count))), "")


ENTRIES = [entry for entry in op_db if torch.float32 in entry.dtypes and entry.name not in REFUSED]


def differing(count: int) -> dict[str, str]:
    found = {entry.name: difference_of_any(entry, count) for entry in ENTRIES}
    return {name: text for name, text in found.items() if text and name not in OWN_OPS_OF_CUDA}


def test_each_operator_of_torch_runs_the_ops_that_it_runs_on_the_host() -> None:
    assert differing(count=1) == {}


@pytest.mark.slow
def test_further_inputs_do_too() -> None:
    assert differing(count=8) == {}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.soft_margin_loss]
)
def test_a_loss_and_its_gradient_lie_in_memory_as_they_do_on_the_host(loss: Any, reduction: str) -> None:
    """A loss keeps the memory of what it is the sum of; huber_loss does not."""

    def lie(device: str) -> list[tuple[Any, ...]]:
        tensor = torch.rand(2, 46, 8, device=device).mT.requires_grad_()
        result = loss(tensor, torch.rand(2, 8, 46, device=device), reduction=reduction)
        (gradient,) = torch.autograd.grad(result, tensor, torch.ones_like(result))
        return [(each.stride(), each.untyped_storage().nbytes()) for each in (result, gradient)]

    with FlopMeter():
        assert lie("meta") == lie("cpu")


GRADIENTS_OF_OTHER_LAYOUT = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    **{kind.__name__: kind for kind in (F.elu, F.hardswish, F.mish, F.softplus, F.silu, F.gelu, F.hardtanh)},
    **{
        kind.__name__: kind
        for kind in (F.leaky_relu, F.hardsigmoid, F.relu6, F.selu, F.celu, F.relu, F.softshrink, F.hardshrink)
    },
    **{kind.__name__: kind for kind in (torch.tanh, torch.sigmoid, F.glu)},
}


@pytest.mark.parametrize("name", GRADIENTS_OF_OTHER_LAYOUT)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_that_lies_otherwise_than_the_input_becomes_what_it_does_on_the_host(
    name: str, is_transposed: bool
) -> None:
    def lie(device: str) -> list[tuple[int, ...]]:
        x = torch.rand(2, 4, 6, device=device).mT if is_transposed else torch.rand(2, 6, 4, device=device)
        result = GRADIENTS_OF_OTHER_LAYOUT[name](x.requires_grad_())
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result.mT).contiguous().mT)
        return [result.stride(), gradient.stride()]

    with FlopMeter():
        assert lie("meta") == lie("cpu")


def test_the_gradient_of_a_frozen_batch_norm_lies_as_its_input_does_on_the_host_whatever_comes_back() -> None:
    def lie(device: str) -> tuple[int, ...]:
        norm = torch.nn.BatchNorm2d(3, device=device).eval()
        x = torch.rand(2, 3, 4, 4, device=device, requires_grad=True)
        comes_back = torch.rand(2, 3, 4, 4, device=device).contiguous(memory_format=torch.channels_last)
        return torch.autograd.grad(norm(x), x, comes_back)[0].stride()

    with FlopMeter():
        assert lie("meta") == lie("cpu") == (48, 16, 4, 1)


FORWARD_MODE = {
    "a gradient of zeros and another one": lambda x: (x - 2) * x / 3 + x.sum() - x,
    "a linear layer": lambda x: F.linear(x, x.detach() * 2, x.detach()[0]).tanh(),
    "a norm": lambda x: F.layer_norm(x, (4,), x.detach()[0], x.detach()[1]),
    "attention": lambda x: (x @ x.mT).softmax(-1) @ x,
    "a gradient of it": torch.func.grad(lambda x: F.linear(x, x.detach(), x.detach()[0]).square().sum()),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_gradients_run_the_ops_that_they_run_on_the_host(name: str) -> None:
    """On the host torch learns shapes on the device meta; none of these ops launches anything."""

    def run(device: str) -> None:
        torch.func.jvp(FORWARD_MODE[name], (torch.ones(4, 4, device=device),), (torch.ones(4, 4, device=device),))

    with Names() as host:
        run("cpu")
    with FlopMeter() as meter:
        run("meta")
    assert counted(str(op.packet).removeprefix("aten.") for op in meter.trace.ops) == counted(iter(host.names))
