"""Every op of torch's own database: none crashes, bytes stay within bounds, and few are uncounted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from costs_support import CAST_FIRST, Swept, integer_sweep, meta_sweep, sweep, uncounted

from flopmeter.costs import costs_of
from flopmeter.costs.traffic import regions, writes_nothing
from flopmeter.records import Call, OpsBody

pytestmark = pytest.mark.filterwarnings("ignore")  # the database uses deprecated forms on purpose

# Python loops inside one opaque op (chunks of a vocabulary), whose gradients are made in the forward pass.
UNCOUNTED_ON_CPU = {"aten.allclose.default"}
# No kernel for meta tensors, or a shape that depends on the data.
DO_NOT_RUN_ON_META = {
    "item", "allclose", "equal", "sparse.sampled_addmm", "sparse.mm.reduce", "geqrf", "masked_select", "to",
    "tensor_split", "unique", "unique_consecutive", "histogram", "histogramdd", "to_sparse", "jiterator_unary",
    "jiterator_binary", "jiterator_4inputs_with_extra_args", "jiterator_binary_return_by_ref",
    "jiterator_2inputs_2outputs", "argwhere", "linalg.lstsq", "linalg.lstsq.grad_oriented", "nonzero", "combinations",
    "corrcoef", "cov", "nn.functional.gaussian_nll_loss", "nn.functional.ctc_loss", "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss", "nn.functional.fractional_max_pool3d",
}  # fmt: skip

# What a call touches at most beside its inputs and outputs once each: copies of an input (a functional scatter, a
# product's operands side by side) and intermediates of the ops that are several kernels.
MOST_BYTES_PER_TOUCHED = 3
SEVERAL_KERNELS = {
    "aten.convolution_backward.default",  # three, and copies of what is not dense
    "aten.binary_cross_entropy_with_logits.default",
    "aten.soft_margin_loss.default",
    "aten.soft_margin_loss_backward.default",  # eight
    "aten._trilinear.default",  # three for each element of the dimension that it goes through
    "aten.logsumexp.default",
    "aten._safe_softmax.default",
    "aten.masked_scatter.default",  # which numbers what the mask holds, in 8 bytes an element
    "aten.masked_scatter_.default",
    "aten._cdist_forward.default",
    "aten._euclidean_dist.default",
    "aten.isinf.default",  # five for complex numbers
    "aten.mvlgamma.default",
    "aten.addbmm.default",  # each product adds to the result
    "aten.addbmm_.default",
    "aten.multinomial.default",  # thirteen, of which seven pass over the probabilities
    # A radix sort goes over all elements once for each digit (tests/test_timing_sorting.py counts its kernels).
    "aten.sort.default",
    "aten.sort.stable",
    "aten.topk.default",
    "aten._unique2.default",
    "aten.embedding_dense_backward.default",
    "aten._embedding_bag_backward.default",
    "aten._embedding_bag_dense_backward.default",
    "aten._unsafe_masked_index_put_accumulate.default",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
    "aten._unsafe_index_put.default",
}


def between_kernels(call: Call) -> int:
    """Bytes that a call's kernels hand on to each other and that may be many times its operands: torch.dist is
    `at::norm(self - other, p)` (aten/src/ATen/native/ReduceOps.cpp), and the difference, written and read, has the
    shape to which both are broadcast."""
    if str(call.func) != "aten.dist.default":
        return 0
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.inputs))
    return 2 * shape.numel() * max(spec.dtype.itemsize for spec in call.inputs)


def entries(samples: tuple[Swept, ...]) -> set[str]:
    return {swept.entry for swept in samples if swept.error is None}


def check_bytes(call: Call) -> None:
    """At least the outputs, at most a small multiple of everything that the call can see. Of a custom op in Python that
    holds for each op that it runs."""
    if isinstance(call.body, OpsBody):
        for op in call.body.ops:
            check_bytes(op.call)
        return
    read, written = regions(call)
    costs = costs_of(call)
    if not costs or writes_nothing(call):
        return
    outputs = {spec for spec in call.outputs if spec.storage not in {given.storage for given in call.inputs}}
    least = sum(spec.nbytes for spec in outputs)
    most = MOST_BYTES_PER_TOUCHED * sum(spec.nbytes for spec in read | written) + between_kernels(call)
    found_read, found_written = sum(c.bytes_read for c in costs), sum(c.bytes_written for c in costs)
    assert found_written >= least, call.func
    if str(call.func) not in SEVERAL_KERNELS and call.name.removesuffix("_") not in CAST_FIRST:
        assert found_read + found_written <= most, call.func
    assert all(cost.flops >= 0 and cost.bytes_read >= 0 for cost in costs), call.func


def test_every_op_that_runs_on_meta_is_priced_within_bounds():
    for swept in meta_sweep():
        for call in swept.calls:
            check_bytes(call)


def test_the_entries_that_do_not_run_on_meta_are_known():
    every = {swept.entry for swept in meta_sweep()}
    assert len(every) > 600
    assert every - entries(meta_sweep()) <= DO_NOT_RUN_ON_META


def test_nothing_that_runs_on_meta_is_uncounted():
    assert set().union(*(uncounted(swept.calls) for swept in meta_sweep())) == set()


def test_integer_work_is_no_flops():
    for swept in integer_sweep():
        for call in swept.calls:
            if not any(spec.is_floating for spec in (*call.inputs, *call.outputs)):
                assert sum(cost.flops for cost in costs_of(call)) == 0, call.func


def test_half_of_the_bits_is_the_same_work():
    """The FLOPs of bf16 are those of fp32, wherever both run the same ops."""
    work: dict[object, int] = {}
    for swept in meta_sweep():
        work[program(swept)] = sum(cost.flops for call in swept.calls for cost in costs_of(call))
    compared = 0
    for swept in sweep("meta", torch.bfloat16, samples=1, share=0.3):
        if program(swept) in work:
            compared += 1
            assert work[program(swept)] == sum(c.flops for call in swept.calls for c in costs_of(call)), swept.entry
    assert compared > 100


def program(swept: Swept) -> object:
    shapes = tuple(spec.shape for call in swept.calls for spec in (*call.inputs, *call.outputs))
    given = [argument for call in swept.calls for argument in (*call.args, *call.kwargs.values())]
    scalars = tuple(argument for argument in given if isinstance(argument, (int, float, str)))
    return swept.entry, tuple(call.func for call in swept.calls), shapes, scalars


DTYPES = dict.fromkeys(("meta", "cpu", "fake"), (torch.float32, torch.bfloat16, torch.int64, torch.complex64))
EVERY = [(device, dtype) for device, dtypes in DTYPES.items() for dtype in dtypes]
OTHERS = [pair for pair in EVERY if pair not in (("meta", torch.float32), ("meta", torch.int64))]  # tested above


@pytest.mark.parametrize(("device", "dtype"), OTHERS, ids=str)
def test_a_seeded_sample_of_the_other_dtypes_and_devices(device, dtype):
    assert Tally.of(sweep(device, dtype, samples=1, share=0.1)).failures == []


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), EVERY, ids=str)
def test_all_samples_of_every_dtype_and_device(device, dtype, record_property):
    tally = Tally.of(sweep(device, dtype, samples=None))
    for name, figure in tally.figures().items():
        record_property(name, figure)  # for scripts/sweep.py
    assert tally.failures == []
    assert len(tally.entries) > 300  # the fewest, for complex64


@dataclass
class Tally:
    """What came of a sweep."""

    entries: set[str] = field(default_factory=set)
    samples: int = 0
    refused: int = 0  # torch itself raises
    sparse: int = 0  # uncounted, since their work depends on values
    ops: set[str] = field(default_factory=set)
    calls: int = 0
    uncounted: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, samples: Iterable[Swept]) -> Tally:
        tally = cls()
        for swept in samples:
            tally.add(swept)
        return tally

    def add(self, swept: Swept) -> None:
        self.entries.add(swept.entry)
        self.samples += 1
        self.refused += swept.error is not None
        if any(is_sparse(call) for call in swept.calls):
            self.sparse += 1
            return
        self.calls += len(swept.calls)
        self.ops |= {str(call.func) for call in swept.calls}
        missing = uncounted(swept.calls)
        self.uncounted |= missing
        self.failures += [f"{swept.entry}: {op} is uncounted" for op in missing - UNCOUNTED_ON_CPU]
        for call in swept.calls:
            try:
                check_bytes(call)
            except Exception as error:
                self.failures.append(f"{swept.entry}: {call.func}: {type(error).__name__}: {error}")

    def figures(self) -> dict[str, object]:
        counts = {name: getattr(self, name) for name in ("samples", "refused", "sparse", "calls")}
        sets = {"entries": len(self.entries), "ops": len(self.ops), "uncounted": " ".join(sorted(self.uncounted))}
        return {**counts, **sets, "failures": len(self.failures)}


def is_sparse(call: Call) -> bool:
    """Uncounted, all of them: their work depends on values."""
    return any(not spec.is_strided for spec in (*call.inputs, *call.outputs))
