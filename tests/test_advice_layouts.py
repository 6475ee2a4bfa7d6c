"""What advice says of where tensors lie, against torch's own views."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopmeter import FlopMeter
from flopmeter.records import TensorSpec
from flopmeter.report.advice.copies import Whereabouts, _lies_alike
from flopmeter.report.advice.rewrite import outermost, with_tensors
from flopmeter.report.advice.widths import _resized


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, 0, tensor.storage_offset(), "cpu")


def is_possible(view: Any) -> bool:
    try:
        view()
    except RuntimeError:
        return False
    return True


# --- a view of a copy, as a view of what was copied ------------------------------------------------------------------


@st.composite
def sources(draw: st.DrawFn) -> Tensor:
    """Numbers in order, of which a program takes a part, in another order of dimensions, perhaps repeated."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = torch.arange(math.prod(shape)).view(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape)))
        tensor = tensor.unsqueeze(dim)
        tensor = tensor.expand(*(3 if place == dim else size for place, size in enumerate(tensor.shape)))
    return tensor


@st.composite
def views(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Views on views of the tensor."""
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["narrow", "step", "turn", "split", "join", "flat"]))
        if kind == "flat":
            tensor = tensor.reshape(-1) if is_possible(lambda: tensor.view(-1)) else tensor  # noqa: B023
            continue
        if not tensor.dim():
            continue
        dim = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "turn":
            tensor = tensor.transpose(dim, 0)
        elif kind == "split":
            inner = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
            tensor = tensor.unflatten(dim, (size // inner, inner))
        elif dim and is_possible(lambda: tensor.view(*tensor.shape[: dim - 1], -1, *tensor.shape[dim + 1 :])):  # noqa: B023
            tensor = tensor.flatten(dim - 1, dim)
    return tensor


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_view_of_a_copy_is_the_view_that_reads_the_same_of_what_was_copied(data):
    source = data.draw(sources())
    copy = source.clone(memory_format=torch.contiguous_format)
    view = data.draw(views(copy))
    found = Whereabouts(tuple(copy.shape), copy.stride(), spec_of(source), 0).of(spec_of(view))
    if found is not None:
        assert torch.equal(source.as_strided(found.shape, found.stride, found.offset), view)


def test_a_part_of_a_flat_copy_that_begins_in_one_row_and_ends_in_the_next_is_no_view_of_rows_that_lie_apart():
    rows = torch.arange(24).view(4, 6)[:, :5]
    copy = rows.contiguous()
    place = Whereabouts(tuple(copy.shape), copy.stride(), spec_of(rows), 0)
    found = {start: place.of(spec_of(copy.view(-1)[start : start + 3])) for start in (0, 2, 3, 4, 5)}
    assert {start: each and each.offset for start, each in found.items()} == {0: 0, 2: 2, 3: None, 4: None, 5: 6}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_where_torch_can_view_what_was_copied_there_is_such_a_view(data):
    source = data.draw(sources())
    copy = source.clone(memory_format=torch.contiguous_format)
    sizes = data.draw(st.sampled_from([(-1,), (copy.shape[0], -1), (-1, copy.shape[-1]), (*copy.shape, 1)]))
    place = Whereabouts(tuple(copy.shape), copy.stride(), spec_of(source), 0)
    assert is_possible(lambda: source.view(sizes)) == (place.of(spec_of(copy.view(sizes))) is not None)


def test_tensors_lie_alike_whatever_the_steps_over_dimensions_of_one():
    tensor, apart = torch.empty(1, 3, 4), torch.empty_strided((1, 3, 4), (99, 4, 1))
    others = {"apart": apart, "turned": torch.empty(1, 4, 3).mT, "fewer": torch.empty(1, 2, 4)}
    found = {name: _lies_alike(spec_of(tensor), spec_of(other)) for name, other in others.items()}
    assert found == {"apart": True, "turned": False, "fewer": False}


# --- larger tensors --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 5, 7]), min_size=1, max_size=4), st.data())
def test_padded_sizes_have_the_strides_of_a_tensor_that_is_made_with_them(shape, data):
    """Sizes of 5 become 8, and those of 7 become 16, in whatever order the dimensions lie in memory."""
    order, to = data.draw(st.permutations(range(len(shape)))), {5: 8, 7: 16}
    made, padded = (torch.empty(sizes).permute(order) for sizes in (shape, [to.get(size, size) for size in shape]))
    found = _resized(spec_of(made), to)
    assert found.shape == padded.shape
    for size, stride, expected in zip(padded.shape, found.stride, padded.stride(), strict=True):
        assert size == 1 or stride == expected


def test_the_batch_is_the_dimension_that_lies_outermost_in_memory_or_the_first_of_several():
    batch_first, batch_second = torch.empty(4, 3, 2), torch.empty(3, 4, 2).transpose(0, 1)
    repeated = torch.empty(3, 1, 2).expand(3, 5, 2).transpose(0, 1)
    few = torch.empty(1, 1, 2)  # as far apart
    nobody = torch.empty(1).expand(7)
    tensors = (batch_first, batch_second, repeated, few, nobody, torch.empty(()))
    assert [outermost(spec_of(tensor)) for tensor in tensors] == [0, 1, 1, 0, None, None]


def test_a_change_of_types_leaves_the_arguments_that_name_others():
    """What a program asks for in fp32 is asked for in bf16 then, and of fp64 nothing is changed."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        x = torch.empty(8, 8, device="meta")
        x.double(), x.half().float()
    changed = with_tensors(meter.trace, lambda spec, _: spec, dtypes={torch.float32: torch.bfloat16})
    casts = [op.call.argument("dtype") for op in changed.ops if op.call.name == "_to_copy"]
    assert casts == [torch.float64, torch.float16, torch.bfloat16]
