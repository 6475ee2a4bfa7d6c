"""What the tests of the costs share: calls made by running or by hand, and the op_db sweep."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from op_samples import inputs_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter import FlopMeter
from flopmeter.costs import costs_of, find_rule, kernels_of
from flopmeter.records import Call, Cost, Op, TensorSpec
from flopmeter.trace.recorder import Recorder

# An operand of another type than the result is cast by a kernel of its own (tests/test_dense_operands.py).
CAST_FIRST = {"sum", "nansum", "mean", "prod", "cumsum", "cumprod"}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ops_of(program: Callable[[], Any]) -> list[Op]:
    recorder = Recorder()
    with recorder:
        program()
    return recorder.trace.ops


def calls_of(program: Callable[[], Any]) -> list[Call]:
    return [op.call for op in ops_of(program)]


def costs_in(program: Callable[[], Any]) -> list[Cost]:
    """The cost of every kernel that the program launches."""
    return [cost for call in calls_of(program) for cost in costs_of(call)]


def metered(program: Callable[[], Any]) -> list[Cost]:
    """The costs of what it launches where a meter emulates an H100."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        program()
    return [kernel.cost for kernel in kernels_of(meter.trace)]


def flops(program: Callable[[], Any]) -> int:
    return sum(cost.flops for cost in costs_in(program))


def products(program: Callable[[], Any]) -> int:
    """FLOPs of matrix products alone, which is what torch's FlopCounterMode counts."""
    return sum(2 * cost.macs for cost in costs_in(program))


def call_by_hand(func: Any, args: tuple[Any, ...], outputs: tuple[Tensor, ...], **kwargs: Any) -> Call:
    """The call of an op that does not run without a GPU, with the outputs that it would return there."""
    numbers: dict[int, int] = {}
    inputs: list[TensorSpec] = []

    def spec(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(spec(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        storage = numbers.setdefault(value.untyped_storage()._cdata, len(numbers))
        found = TensorSpec(
            tuple(value.shape), value.stride(), value.dtype, storage, value.storage_offset(), value.device.type
        )
        inputs.append(found)
        return found

    frozen, frozen_kwargs = spec(args), {name: spec(value) for name, value in kwargs.items()}
    taken = tuple(inputs)
    return Call(func, frozen, frozen_kwargs, taken, tuple(spec(output) for output in outputs))


class Swept(NamedTuple):
    """One sample of one entry of op_db."""

    entry: str
    calls: tuple[Call, ...]
    error: str | None  # what torch raised: the op does not run here


def sweep(
    device: str,
    dtype: torch.dtype,
    *,
    samples: int | None,
    share: float = 1.0,
    databases: tuple[str, ...] = ("op_db",),
    without: Collection[str] = (),
) -> Iterator[Swept]:
    """Run the samples of every entry, or of a share drawn by seed: forward and, where there is one, backward.

    device: "meta", "cpu", or "fake" for FakeTensors on the CPU.
    without: names of entries to leave out.
    """
    from torch.testing._internal import common_methods_invocations

    draw = random.Random(f"{device} {dtype}")
    for database in databases:
        for entry in getattr(common_methods_invocations, database):
            if dtype in entry.dtypes and draw.random() <= share and _name_of(entry) not in without:
                yield from _samples(entry, device, dtype, samples)


def _name_of(entry: Any) -> str:
    return ".".join(filter(None, (entry.name, entry.variant_test_name)))


def _samples(entry: Any, device: str, dtype: torch.dtype, most: int | None) -> Iterator[Swept]:
    has_gradient = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    for sample in itertools.islice(inputs_of(entry, dtype, requires_grad=has_gradient), most):
        mode = FakeTensorMode() if device == "fake" else None
        with mode or nullcontext():
            yield _metered(
                _name_of(entry), sample, functools.partial(_moved, device=device, mode=mode), entry, has_gradient
            )


def _metered(name: str, sample: Any, move: Callable[[Any], Any], entry: Any, has_gradient: bool) -> Swept:
    recorder, error = Recorder(), None
    try:
        moved = sample.transform(move)
        with recorder:
            run_sample(entry, moved, has_gradient)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        if recorder.trace.ops:  # it must be torch that cannot, not the recorder
            with pytest.raises(type(raised)):
                run_sample(entry, sample.transform(move), has_gradient)
    return Swept(name, tuple(op.call for op in recorder.trace.ops), error)


def run_sample(entry: Any, sample: Any, has_gradient: bool) -> None:
    out = entry(sample.input, *sample.args, **sample.kwargs)
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if has_gradient and outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _moved(value: Any, device: str, mode: FakeTensorMode | None) -> Any:
    if not isinstance(value, Tensor) or device == "cpu":
        return value
    if value.layout is not torch.strided:
        raise NotImplementedError("sparse tensors have no meta twin")
    if mode is not None:
        return mode.from_tensor(value)
    return value.detach().to(device).requires_grad_(value.requires_grad)


@functools.cache
def meta_sweep() -> tuple[Swept, ...]:
    """The sweep of CI: fp32 on meta, the first three samples."""
    return tuple(sweep("meta", torch.float32, samples=3))


@functools.cache
def integer_sweep() -> tuple[Swept, ...]:
    return tuple(sweep("meta", torch.int64, samples=1))


def uncounted(calls: tuple[Call, ...]) -> set[str]:
    return {str(call.func) for call in calls if find_rule(call) is None}


def as_fake(value: Any, mode: Any) -> Any:
    return tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, value)


def copies_what_has_gaps(name: str) -> bool:
    """Whether the op copies operands that do not lie as its kernel, or its library, walks them."""
    walks = r"convolution|fft|softmax|(layer|group|rms)_norm|cumsum|cumprod|^(_int_|add|baddb|b)?m[mv]_?$|^_addmm_"
    return re.search(walks, name) is not None
