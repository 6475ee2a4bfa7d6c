"""The change that is told of attention, kernel by kernel: it runs what torch runs for the program that is mended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter
from flopmeter.report.advice.attention import materialised_attention
from flopmeter.report.advice.math_attention import attention_that_no_kernel_takes
from flopmeter.report.advice.remedies import trace_of

H100 = "h100-sxm5-80gb"


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=trained)


def written_out(q, k, v, *masks, dropout: float = 0.0) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = q @ k.transpose(-2, -1)
    for mask in masks:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def by_sdpa(q, k, v, *masks, dropout: float = 0.0, is_causal: bool = False) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mask = None
    for each in masks:
        mask = each if mask is None else mask + each
    mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=1.0)
    return mixed.transpose(1, 2).flatten(2)


def metered(program: Callable[[], torch.Tensor], *, trains: bool):
    for each in LEAVES:
        each.requires_grad_(trains).grad = None
    with FlopMeter(H100) as meter, torch.set_grad_enabled(trains):
        out = program()
        if trains:
            out.backward(torch.empty_like(out))
    return meter.report()


def kernels_in(report) -> list[tuple]:
    """Without the 16 bytes of a seed, which the fused kernels write too, and without copies of gradients into the
    layout of leaves."""
    costs = [(kernel.cost, kernel.op.phase) for kernel in report.kernels if kernel.cost.name != "copy_"]
    return sorted((c.name, phase, c.flops, c.bytes_read // 64, c.bytes_written // 64) for c, phase in costs)


def seconds_in(report) -> float:
    pairs = zip(report.kernels, report.timings, strict=True)
    return sum(timing.seconds for kernel, timing in pairs if kernel.cost.name != "copy_")


def told_of(report):
    (told,) = materialised_attention(report, trace_of(report))
    return told


# [batch, tokens, heads, width of a head], as linear layers give them.
QKV = [tensor(2, 256, 4, 64) for _ in range(3)]
SQUARE = [tensor(2, 64, 4, 64) for _ in range(3)]  # as many tokens as a head is wide
CROSS = [tensor(2, 256, 4, 64), tensor(2, 384, 4, 64), tensor(2, 384, 4, 128)]
ONE = [tensor(2, 1, 4, 64), tensor(2, 256, 4, 64), tensor(2, 256, 4, 64)]
BIAS = tensor(1, 4, 256, 256)
BIASES = [tensor(*shape, trained=False) for shape in [(1, 4, 256, 256), (2, 1, 1, 256), (2, 1, 256, 256)]]
OF_KEYS = tensor(256, trained=False)
OUT = tensor(256, 256)
LEAVES = [*QKV, *SQUARE, *CROSS, *ONE, BIAS, OUT]


def again(attend, *args):
    """What takes the result of the attention is computed again too."""
    return checkpoint(lambda *inner: attend(*inner) @ OUT, *args, use_reentrant=False)


def hidden_ones(made: str, length: int) -> torch.Tensor:
    """Where a key comes after the query."""
    if made == "outside":
        return HIDDEN
    if made == "as a triangle":
        return torch.ones(length, length, dtype=torch.bool, device="meta").triu(1)
    places = torch.arange(length, device="meta")
    return places[None, :] > places[:, None]


def causal(made: str, q, k, v, *, reads_mask: bool = False) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    hidden = hidden_ones(made, q.shape[-2])
    weights = (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    return mixed + hidden.sum() if reads_mask else mixed


def causal_by_sdpa(made: str, *qkv) -> torch.Tensor:
    """The mask is read by others too."""
    hidden = hidden_ones(made, qkv[0].shape[1])
    return by_sdpa(*qkv, is_causal=True) + hidden.sum()


def packed(q, k, v) -> torch.Tensor:
    """Heads among the sequences, as of [batch * heads, tokens, width]."""
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
    return mixed.unflatten(0, (2, 4)).transpose(1, 2).flatten(2)


def windows(q, k, v, mask) -> torch.Tensor:
    """The mask of each of 2 windows, for all sequences and heads alike: the windows lie beside one another."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).unflatten(0, (-1, 2)) + mask
    return (scores.flatten(0, 1).softmax(-1) @ v).transpose(1, 2).flatten(2)


def padded_in_place(q, k, v) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    weights = (q @ k.transpose(-2, -1)).masked_fill_(PADDED, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def hidden_and_padded(q, k, v, *, biases=()) -> torch.Tensor:
    """Both masks fill the scores, one after the other."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = q @ k.transpose(-2, -1)
    for bias in biases:
        scores = scores + bias
    for mask in (HIDDEN, PADDED):
        scores = scores.masked_fill(mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def hidden_and_padded_by_sdpa(*qkv, biases=()) -> torch.Tensor:
    """(Whether a truth says to hide or to show costs the same.)"""
    mask = HIDDEN & PADDED
    for bias in biases:
        mask = bias.masked_fill(mask, float("-inf"))
    q, k, v = (each.transpose(1, 2) for each in qkv)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=1.0).transpose(1, 2).flatten(2)


def bias_of_all(attend, x, q, k, v) -> torch.Tensor:
    """A bias that is as large as the scores, made in the step."""
    return attend(q, k, v, torch.outer(x, x).expand(2, 4, 256, 256).clone())


PADDED = tensor(2, 1, 1, 256, dtype=torch.bool, trained=False)
HIDDEN = tensor(256, 256, dtype=torch.bool, trained=False)
WINDOWS = [tensor(8, 64, 4, 64) for _ in range(3)]
OF_WINDOWS = tensor(1, 2, 1, 64, 64, trained=False)
LEAVES += WINDOWS


def of_one_layer(attend, x, *masks) -> torch.Tensor:
    """q, k and v lie beside one another, and so do their gradients."""
    return attend(*x.unflatten(2, (3, 4, 64)).unbind(2), *masks)


LAYER = tensor(2, 256, 768)
LEAVES.append(LAYER)

CASES = {
    "of one layer": (lambda: of_one_layer(written_out, LAYER), lambda: of_one_layer(by_sdpa, LAYER)),
    "causal by a triangle": (lambda: causal("as a triangle", *QKV), lambda: by_sdpa(*QKV, is_causal=True)),
    "causal by places": (lambda: causal("by places", *QKV), lambda: by_sdpa(*QKV, is_causal=True)),
    "a causal mask that is given": (lambda: causal("outside", *QKV), lambda: by_sdpa(*QKV, is_causal=True)),
    "a causal mask that others read": (
        lambda: causal("by places", *QKV, reads_mask=True),
        lambda: causal_by_sdpa("by places", *QKV),
    ),
    "packed": (lambda: packed(*QKV), lambda: by_sdpa(*QKV)),
    "windows": (
        lambda: windows(*WINDOWS, OF_WINDOWS),
        lambda: by_sdpa(*WINDOWS, OF_WINDOWS.expand(4, 2, 1, 64, 64).reshape(8, 1, 64, 64)),
    ),
    "padding that is filled in place": (lambda: padded_in_place(*QKV), lambda: by_sdpa(*QKV, PADDED)),
    "a causal mask and one of padding": (
        lambda: hidden_and_padded(*QKV),
        lambda: hidden_and_padded_by_sdpa(*QKV),
    ),
    "a causal mask and one of padding beside a bias": (
        lambda: hidden_and_padded(*QKV, biases=BIASES[:1]),
        lambda: hidden_and_padded_by_sdpa(*QKV, biases=BIASES[:1]),
    ),
    "a bias as large as the scores": (
        lambda: bias_of_all(written_out, OF_KEYS, *QKV),
        lambda: bias_of_all(by_sdpa, OF_KEYS, *QKV),
    ),
    "plain": (lambda: written_out(*QKV), lambda: by_sdpa(*QKV)),
    "as many tokens as wide": (lambda: written_out(*SQUARE), lambda: by_sdpa(*SQUARE)),
    "other keys": (lambda: written_out(*CROSS), lambda: by_sdpa(*CROSS)),
    "one query": (lambda: written_out(*ONE), lambda: by_sdpa(*ONE)),
    "dropout": (lambda: written_out(*QKV, dropout=0.1), lambda: by_sdpa(*QKV, dropout=0.1)),
    "a bias that is trained": (lambda: written_out(*QKV, BIAS), lambda: by_sdpa(*QKV, BIAS)),
    "a mask of keys alone": (lambda: written_out(*QKV, OF_KEYS), lambda: by_sdpa(*QKV, OF_KEYS[None, None, None])),
    "three masks": (lambda: written_out(*QKV, *BIASES), lambda: by_sdpa(*QKV, *BIASES)),
    "checkpointed": (lambda: again(written_out, *QKV), lambda: again(by_sdpa, *QKV)),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_attention_that_is_told_to_be_fused_runs_the_kernels_of_the_program_that_is_mended(case, trains):
    before, mended = CASES[case]
    then, after = told_of(metered(before, trains=trains)).then, metered(mended, trains=trains)
    assert kernels_in(then) == kernels_in(after)
    assert seconds_in(then) == pytest.approx(
        seconds_in(after), rel=0.01
    )  # other orders leave other tensors in the cache


def on_math_path(q, k, v, *, factor: float = 1.0) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return of_scaled_queries(q, k, v, factor=factor)


def of_scaled_queries(q, k, v, *, factor: float = 1.0) -> torch.Tensor:
    """The program multiplies by itself what SDPA's math path multiplies once more."""
    return by_sdpa(q if factor == 1.0 else q * factor, k, v)


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("trains", [False, True])
def test_a_call_that_leaves_the_math_path_runs_the_kernels_that_it_runs_outside(trains, factor):
    report = metered(lambda: on_math_path(*QKV, factor=factor), trains=trains)
    (told,) = attention_that_no_kernel_takes(report, trace_of(report))
    mended = metered(lambda: of_scaled_queries(*QKV, factor=factor), trains=trains)
    assert kernels_in(told.then) == kernels_in(mended)


@pytest.mark.parametrize("of", ["places", "data"])
def test_a_mask_for_each_sequence_is_causal_where_only_places_are_compared(of):
    """What depends on data says of each sequence something else."""
    lengths = tensor(2, 1, dtype=torch.long, trained=False)

    def program() -> torch.Tensor:
        places = torch.arange(256, device="meta")
        after = places[None, :] > places[:, None]
        hidden = after & torch.ones(2, 1, 1, 1, dtype=torch.bool, device="meta")
        if of == "data":
            hidden = hidden & (lengths > places)[:, None, None, :]
        q, k, v = (each.transpose(1, 2) for each in QKV)
        return (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    (kernel,) = [each for each in told_of(metered(program, trains=False)).then.kernels if "attention" in each.cost.name]
    assert kernel.op.call.argument("is_causal") == (of == "places")
