"""Tensors whose storage is not their own, and tensors that have none."""

from __future__ import annotations

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.distributed import world
from flopmeter.trace.tensor_specs import unstrided_spec


def test_a_function_under_vmap_holds_as_much_memory_as_the_same_without():
    """A wrapper of functorch has no storage to ask for; the tensor that it wraps has."""

    def program(x):
        return (x * 2 + 1).exp()

    peaks = []
    for run in (program, torch.vmap(program)):
        x = torch.empty(1000, 1000, device="meta")
        with FlopMeter("a100-sxm4-80gb") as meter:
            y = run(x)
        peaks.append(meter.report().memory.peak_bytes)
        assert y.shape == (1000, 1000)
    assert peaks[0] == peaks[1] >= 3 * 4_000_000 - 4_000_000


def test_the_values_of_a_sparse_tensor_are_held_in_memory():
    places, values = torch.arange(100_000)[None], torch.ones(100_000)
    sparse = torch.sparse_coo_tensor(places, values, (200_000,), is_coalesced=True)
    with FlopMeter(as_cuda=False) as meter:
        doubled = sparse * 2
    assert meter.report().memory.peak_bytes >= 2 * 400_000
    assert doubled.to_dense().sum() == 200_000


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
def test_opaque_tensors_have_no_storage_and_break_nothing():
    x = torch.full((3, 3), -1.0)
    with FlopMeter(as_cuda=False) as meter:
        y = x.to_mkldnn().relu().to_dense()
    assert y.tolist() == [[0.0] * 3] * 3
    assert meter.report().memory.peak_bytes < 1000


def test_a_storage_that_is_freed_and_filled_time_and_again_changes_its_size_each_time():
    """As FSDP's flat parameters are. A size that it has already is no change."""
    x = torch.empty(1000, device="meta")
    with world(2), FlopMeter("a100-sxm4-80gb") as meter:
        x.sin()
        for nbytes in (0, 0, 4000, 0, 4000, 4000):
            x.untyped_storage().resize_(nbytes)
    assert [each.nbytes for each in meter.trace.resizes] == [0, 4000, 0, 4000]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_a_sparse_tensor_has_the_strides_of_a_dense_one(shape):
    x = torch.zeros(shape).to_sparse()
    assert unstrided_spec(x, 0).stride == torch.zeros(shape).stride()
