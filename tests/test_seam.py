"""What one stage leaves out the next cannot know: every field of every record says something in some real program.

A field of `Cost` that no rule sets is read as its default by the time model, and nobody notices. So each field must
take another value than its default (without one: two values) somewhere in a small catalogue of programs, and each word
that a field may hold (which attention kernel, which collective) must occur.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from costs_support import meta
from test_custom_ops import by_value, mm_gelu
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import flopmeter
from flopmeter import FlopMeter, load_hardware, on_meta, records
from flopmeter.ask.serve.engine import with_newest_attention
from flopmeter.ask.serve.formats import in_formats
from flopmeter.distributed import world
from flopmeter.report.report import Report

pytestmark = pytest.mark.filterwarnings("ignore")
BF16, F16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """A convolution, a norm, attention twice (once checkpointed), a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 101)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q = self.first(x).unflatten(-1, (2, 32)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.stem(images)), 2).flatten(2).transpose(1, 2)
        return self.head(checkpoint(self.attend, x, use_reentrant=False)).softmax(-1)


def train() -> None:
    with torch.device("meta"):
        net = Net().to(BF16)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.empty(4, 3, 64, 64, dtype=BF16)).sum().backward()
        optimizer.step()


def attend(backend: SDPBackend) -> None:
    q = meta(2, 4, 128, 64, dtype=F16)
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, q, q)


def attend_with_a_mask_and_dropout() -> None:
    q = meta(2, 4, 128, 64, dtype=F16)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, attn_mask=meta(2, 1, 128, 128, dtype=F16))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


def odds_and_ends() -> None:
    """What single ops have: steps that wait, lists of indices, host links, sparse tensors, groups."""
    images = meta(2, 4, 64, 64)
    F.interpolate(images, scale_factor=2, mode="bilinear")
    F.interpolate(meta(2, 4, 8, 8, dtype=BF16).requires_grad_(), scale_factor=2, mode="bilinear").sum().backward()
    nn.BatchNorm2d(4, device="meta").eval()(images.to(memory_format=torch.channels_last))
    meta(64, 8192).softmax(-1)
    F.layer_norm(meta(8, 64), [64])
    nn.LayerNorm(64, device="meta")(meta(512, 64)).sum().backward()
    F.rms_norm(meta(8, 64), [64])
    meta(16, 8).index_add_(0, on_meta(torch.arange(4)), meta(4, 8))
    meta(64, 32)[on_meta(torch.arange(20))]
    meta(64, 32).t().contiguous()
    meta(4096, 4096)[1:] + 1
    meta(2048, 2048) @ meta(2048, 2048)
    on_meta(torch.arange(4)).cpu()
    torch.ones(8).to("meta", non_blocking=True)
    for rows in (1, 4):
        torch._weight_int4pack_mm(
            meta(rows, 128, dtype=BF16), meta(2, 1, 32, 4, dtype=torch.int32), 32, meta(4, 16, 2, dtype=BF16)
        )
    torch._weight_int8pack_mm(meta(2, 32, dtype=BF16), meta(16, 32, dtype=torch.int8), meta(16, dtype=BF16))
    torch.addcmul(meta(8), meta(8), meta(8)[None, :2].expand(4, 2).flatten())
    torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,)).to("meta")
    ends = on_meta(torch.tensor([1, 4], dtype=torch.int32))
    F.grouped_mm(meta(4, 64, dtype=BF16), meta(2, 64, 32, dtype=BF16), offs=ends)
    F.grouped_mm(meta(6, 32, dtype=BF16), meta(2, 32, 32, dtype=BF16), offs=ends)
    torch.bmm(meta(3, 16, 8), meta(3, 8, 24))
    torch.conv_tbc(meta(9, 2, 4), meta(3, 4, 5), meta(5))
    nn.GroupNorm(2, 4, device="meta")(images)
    meta(64, 512).cumsum(-1)
    meta(1 << 22).cumsum(0)
    meta(1 << 20).sum()
    meta(64, 512).sort()
    torch.cat([meta(64, 30), meta(64, 30)], 1)  # rows of no whole loads
    torch.cat([meta(64, 512)[:, :300]] * 3, 1)  # with gaps
    nn.Conv2d(4, 8, 3, device="meta")(meta(2, 4, 16, 16).requires_grad_()).sum().backward()


def attend_in_a_window() -> None:
    q = meta(2, 128, 4, 64, dtype=F16)
    torch.ops.aten._flash_attention_forward(q, q, q, None, None, 128, 128, 0.0, False, False, window_size_left=16)


def attend_with_scores_changed() -> None:
    flex_attention(*(meta(1, 2, 128, 64) for _ in range(3)), score_mod=lambda score, b, h, q, k: score.tanh() * 2)


def attend_with_few_queries() -> Any:
    return flex_attention(meta(1, 2, 1, 64), meta(1, 2, 4096, 64), meta(1, 2, 4096, 64))


def counted_by_formulas() -> Report:
    """Of two ops that only torch's counter knows."""
    with torch.library._scoped_library("seam", "FRAGMENT") as library, pytest.MonkeyPatch.context() as patch:
        with FlopMeter() as meter:
            for flops in (100, 200):
                library.define(f"formula{flops}(Tensor x) -> Tensor")
                library.impl(f"formula{flops}", torch.empty_like, "Meta")
                op = getattr(torch.ops.seam, f"formula{flops}")
                patch.setitem(flop_registry, op, lambda *_, flops=flops, **__: flops)
                op(meta(8))
        return meter.report()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Parameter(meta(2, 64, 32, dtype=BF16)), nn.Linear(32, 8, dtype=BF16, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.grouped_mm(x, self.up, offs=torch.tensor([3, 4], dtype=torch.int32)))


def in_four_bits() -> list[records.Kernel]:
    """Kernels of a server whose weights are in fewer bits than it multiplies."""
    net = Experts()
    meter = metered(lambda: net(meta(4, 64, dtype=BF16)), "h100-sxm5-80gb")
    return in_formats(meter.report().kernels, meter.trace, load_hardware("h100-sxm5-80gb"), "int4", "bf16")


def in_pages() -> list[records.Kernel]:
    """Kernels of servers whose cache lies in pages."""
    kernels = metered(attend_in_a_window).report().kernels
    devices = load_hardware("a100-sxm4-80gb"), load_hardware("h100-sxm5-80gb")
    return [kernel for device in devices for kernel in with_newest_attention(kernels, device)]


def recur() -> None:
    nn.LSTM(16, 32, num_layers=2, device="meta")(meta(5, 2, 16))
    nn.GRU(16, 25, device="meta")(meta(7, 2, 16))
    nn.LSTM(16, 200, device="meta")(meta(5, 2, 16))[0].sum().backward()
    nn.LSTM(256, 256, device="meta", dtype=F16)(meta(5, 8, 256, dtype=F16))


def convolve() -> None:
    nn.Conv1d(4, 8, 5, dilation=2, device="meta")(meta(2, 4, 40))
    net = nn.Conv2d(8, 16, 3, device="meta").to(memory_format=torch.channels_last)
    net(meta(2, 8, 20, 20).to(memory_format=torch.channels_last))


def attend_on_the_cpu() -> None:
    q = torch.ones(1, 2, 16, 8)
    F.scaled_dot_product_attention(q, q, q)


def communicate() -> None:
    x, whole, pair = meta(8), meta(32), dist.new_group([1, 3])
    dist.all_reduce(meta(4), group=pair)
    dist.all_reduce(meta(4, dtype=torch.int8))
    large = meta(1 << 22)
    work = dist.all_reduce(large, async_op=True)
    meta(64, 64) @ meta(64, 64)
    work.wait()
    large + 1
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.all_to_all_single(x, meta(8))
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.gather(x, [meta(8) for _ in range(4)], dst=1)
    dist.scatter(x, [meta(8) for _ in range(4)], src=1)
    dist.send(x, 2)
    dist.recv(x, 2)
    dist.barrier()


def metered(program: Callable[[], Any], hardware: str = "a100-sxm4-80gb", **options: Any) -> FlopMeter:
    with FlopMeter(hardware, **options) as meter:
        program()
    return meter


@contextmanager
def switched() -> Iterator[None]:
    """torch's switches the other way round."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    names = ("allow_tf32", "allow_fp16_accumulation")
    before = [getattr(matmul, name) for name in names]
    try:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, not value)
        with cudnn.flags(enabled=True, allow_tf32=not cudnn.allow_tf32):  # torch's own tests freeze these outside of it
            yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def attend_to_sequences_of_two_lengths() -> None:
    q = meta(8, 4, 64, dtype=BF16)
    starts = on_meta(torch.tensor([0, 3, 8], dtype=torch.int32))
    torch.ops.aten._flash_attention_forward(q, q, q, starts, starts, 5, 5, 0.0, False, False)


def pinned() -> Report:
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        torch.zeros(4).pin_memory().to(device, non_blocking=True)
    return device.report().step


@functools.cache
def catalogue() -> tuple[Report, ...]:
    trained = metered(train, source=True)
    meters = [
        trained,
        metered(lambda: attend(SDPBackend.FLASH_ATTENTION)),
        metered(lambda: attend(SDPBackend.EFFICIENT_ATTENTION)),
        metered(lambda: attend(SDPBackend.CUDNN_ATTENTION), "h100-sxm5-80gb"),
        metered(attend_with_a_mask_and_dropout, "h100-sxm5-80gb"),
        metered(attend_on_the_cpu, as_cuda=False),
        metered(attend_in_a_window),
        metered(lambda: torch._foreach_neg_([meta(1) for _ in range(800)])),  # more than a launch has room for
        metered(attend_to_sequences_of_two_lengths),
        metered(odds_and_ends, "h100-sxm5-80gb"),
        metered(recur),
        metered(lambda: by_value(mm_gelu(meta(4, 8), meta(8, 4)))),
        metered(torch.compile(lambda: (meta(33, 77) @ meta(77, 55)).relu().exp())),
        metered(torch.compile(lambda: (meta(33, 77) @ meta(77, 55)).relu().exp()), compile="rules"),
        metered(torch.compile(lambda: F.gelu(meta(33, 77)))),
        metered(torch.compile(lambda: meta(64, 64) @ meta(64))),
        metered(torch.compile(attend_with_scores_changed), compile="rules"),
        metered(torch.compile(attend_with_few_queries)),
        metered(lambda: torch.compile(lambda narrow: narrow.to(BF16) * 2)(meta(8, 16, dtype=torch.int8))),
    ]
    with world(4, rank=1) as mesh:
        meters.append(metered(communicate))
        meters.append(metered(lambda: DTensor.from_local(meta(8), mesh, [Shard(0)]).sin()))
    with world(4, gpus_per_node=2):
        meters.append(metered(lambda: dist.all_reduce(meta(4))))
    with switched():
        meters.append(metered(convolve))
    return (*(meter.report() for meter in meters), trained.report(mode="compiled"), counted_by_formulas(), pinned())


def is_record(value: Any) -> bool:
    return type(value) in RECORDS


def fields_of(record: type) -> dict[str, Any]:
    """Each field and its default; MISSING where there is none."""
    if dataclasses.is_dataclass(record):
        return {each.name: each.default for each in dataclasses.fields(record)}
    return {name: record._field_defaults.get(name, dataclasses.MISSING) for name in record._fields}  # type: ignore[attr-defined]


# The records that kernels and timings are made of. Those of a program (Trace) and of a mode have tests of their own.
FILES = [f"{records.__name__}.{name}" for name in ("costs", "ops", "tensors", "work")]
RECORDS = {
    value: fields_of(value)
    for value in vars(records).values()
    if isinstance(value, type) and (value.__module__ in FILES or value in (records.Kernel, records.Timing))
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields")
}


def walk(value: Any, seen: set[int]) -> Iterator[Any]:
    """All records inside a value, each once."""
    if is_record(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield value
        for name in RECORDS[type(value)]:
            yield from walk(getattr(value, name), seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from walk(item, seen)


@functools.cache
def said() -> dict[tuple[str, str], set[str]]:
    """What each field held, as it prints."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    seen: set[int] = set()
    found = [(report.kernels, report.timings, report.switches) for report in catalogue()]
    for record in walk([*found, in_four_bits(), in_pages()], seen):
        for name in RECORDS[type(record)]:
            values[type(record).__name__, name].add(_print(getattr(record, name)))
    return values


def _print(value: Any) -> str:
    return str(id(value)) if is_record(value) and not isinstance(value, tuple) else repr(value)


FIELDS = [(record, name) for record, fields in RECORDS.items() for name in fields]


@pytest.mark.parametrize(("record", "name"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_that_a_later_stage_reads_says_something_in_some_program(record, name):
    default = RECORDS[record][name]
    held = said()[record.__name__, name]
    if default is dataclasses.MISSING:
        assert len(held) > 1, f"it is {held} in all programs"
    else:
        assert held - {repr(default)}, f"it is {default!r} in all programs"


def words_of(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {repr(word) for word in get_args(annotation)}
    return {word for part in get_args(annotation) for word in words_of(part)}


WORDS = {
    (record.__name__, name): words_of(hint)
    for record in RECORDS
    for name, hint in get_type_hints(record).items()
    if words_of(hint)
}
OF_THE_OP_CLASS = {"'gather'", "'sort'", "'reduce'", "'normalize'"}  # ways to walk memory that need no saying


@pytest.mark.parametrize("field", WORDS, ids=".".join)
def test_each_word_that_a_field_may_hold_is_said_by_some_program(field):
    assert WORDS[field] - said()[field] - OF_THE_OP_CLASS == set()


def test_each_regime_is_that_of_some_kernel():
    found = {timing.regime for report in catalogue() for timing in report.timings}
    assert found == set(get_args(records.Regime))


def test_a_cost_of_fused_attention_that_does_not_say_whose_kernel_it_is_is_refused():
    with pytest.raises(ValueError, match="one of flash, flash_3, efficient, cudnn, flex, flex_decoding, paged, other"):
        records.Cost("mine", records.ATTENTION, ((records.ATTENTION, 0),), (), (), "bf16", records.VectorWork())
