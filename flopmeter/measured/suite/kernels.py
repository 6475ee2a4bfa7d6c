"""The kernels of the suite: how each kind is made from its inputs, and which sizes of it are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopmeter.measured.suite.cases import Case, CaseRun, Maker

KERNELS: dict[str, Callable[..., CaseRun]] = {}
"""How a kernel is made: a function of the Maker and the case's inputs but its dtype."""


def _kernel(build: Callable[..., CaseRun]) -> Callable[..., CaseRun]:
    KERNELS[build.__name__.removeprefix("_").replace("_", "-")] = build
    return build


@_kernel
def _matmul(make: Maker, m: int, n: int, k: int) -> CaseRun:
    """[m, k] @ [k, n], the weight as [n, k]. fp8 with scales of one, int8 into int32."""
    x, weight = make.activation(m, k), make.weight(n, k).t()
    if make.dtype == torch.int8:
        return lambda: torch._int_mm(x, weight)
    if make.dtype == torch.float8_e4m3fn:
        one = torch.ones((), dtype=torch.float32, device=make.device)
        return lambda: torch.ops.aten._scaled_mm(x, weight, one, one, out_dtype=torch.bfloat16)
    return lambda: x @ weight


@_kernel
def _linear(make: Maker, m: int, n: int, k: int) -> CaseRun:
    x, weight, bias = make.activation(m, k), make.weight(n, k), make.weight(n)
    return lambda: F.linear(x, weight, bias)


@_kernel
def _bmm(make: Maker, b: int, m: int, n: int, k: int) -> CaseRun:
    x, y = make.activation(b, m, k), make.activation(b, k, n)
    return lambda: torch.bmm(x, y)


@_kernel
def _attention(
    make: Maker, batch: int, heads: int, kv_heads: int, length: int, cached: int, width: int, causal: bool
) -> CaseRun:
    """`length` new tokens over those and `cached` earlier ones, whose keys and values lie in memory."""
    kept = make.weight if cached else make.activation
    q = make.activation(batch, heads, length, width)
    k, v = (kept(batch, kv_heads, length + cached, width) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)


@_kernel
def _conv2d(
    make: Maker, batch: int, c_in: int, c_out: int, kernel: int, size: int, stride: int, groups: int, layout: str
) -> CaseRun:
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = make.activation(batch, c_in, size, size, order=order)
    weight = make.weight(c_out, c_in // groups, kernel, kernel).to(memory_format=order)
    return lambda: F.conv2d(x, weight, stride=stride, padding=kernel // 2, groups=groups)


_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "scale": lambda x, _: x * 2.0,
    "gelu": lambda x, _: F.gelu(x),
    "silu": lambda x, _: F.silu(x),
    "exp": lambda x, _: torch.exp(x),
    "where": lambda x, y: torch.where(x > y, x, y),
    "to-fp32": lambda x, _: x.to(torch.float32),
    "copy": lambda x, _: x.clone(),
}


@_kernel
def _elementwise(make: Maker, op: str, elements: int) -> CaseRun:
    x, y = make.activation(elements), make.activation(elements)
    return lambda: _ELEMENTWISE[op](x, y)


_ON_ROWS: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "softmax": lambda x, _, columns: torch.softmax(x, -1),
    "layer-norm": lambda x, weight, columns: F.layer_norm(x, (columns,), weight, weight),
    "rms-norm": lambda x, weight, columns: F.rms_norm(x, (columns,), weight, 1e-6),
    "sum": lambda x, _, columns: x.sum(-1),
    "sum-of-columns": lambda x, _, columns: x.sum(0),
    "max": lambda x, _, columns: x.max(-1),
    "cumsum": lambda x, _, columns: x.cumsum(-1),
    "topk": lambda x, _, columns: x.topk(8, -1),
    "sort": lambda x, _, columns: x.sort(-1),
    "transpose": lambda x, _, columns: x.t().contiguous(),
    "cat": lambda x, _, columns: torch.cat((x, x), -1),
}


@_kernel
def _rows(make: Maker, op: str, rows: int, columns: int) -> CaseRun:
    """An op that works along the rows of a matrix, transposes it, or joins rows."""
    x, weight = make.activation(rows, columns), make.weight(columns)
    return lambda: _ON_ROWS[op](x, weight, columns)


@_kernel
def _embedding(make: Maker, tokens: int, vocabulary: int, width: int) -> CaseRun:
    table, ids = make.weight(vocabulary, width), make.ids(tokens, below=vocabulary)
    return lambda: F.embedding(ids, table)


@_kernel
def _cross_entropy(make: Maker, tokens: int, vocabulary: int) -> CaseRun:
    logits, targets = make.activation(tokens, vocabulary), make.ids(tokens, below=vocabulary)
    return lambda: F.cross_entropy(logits, targets)


@_kernel
def _batch_norm(make: Maker, batch: int, channels: int, size: int) -> CaseRun:
    """Batch norm in inference: the statistics are given."""
    x, (mean, gain) = make.activation(batch, channels, size, size), (make.weight(channels) for _ in range(2))
    return lambda: F.batch_norm(x, mean, gain.abs(), gain, mean)


@_kernel
def _max_pool(make: Maker, batch: int, channels: int, size: int) -> CaseRun:
    x = make.activation(batch, channels, size, size)
    return lambda: F.max_pool2d(x, 3, 2, 1)


# --- which are measured --------------------------------------------------------------------------------------------

# Of language models: a hidden size, the outputs of its query, key and value, and both sides of its MLP.
_LAYERS = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336))  # n, k
_SQUARES = (512, 1024, 2048, 4096, 8192)
_OTHERS = ((1000, 1000, 1000), (3000, 4104, 2056), (16384, 64, 1024), (512, 50304, 768), (64, 64, 65536))  # m, n, k
_MATMULS = [
    *((side, side, side) for side in _SQUARES),
    *((m, n, k) for m in (1, 8, 32, 128, 512, 2048) for n, k in _LAYERS),
    *_OTHERS,
]
_IN_OTHER_TYPES = {  # sizes of matmuls in types other than that of most cases
    "fp16": [(side, side, side) for side in (1024, 4096, 8192)],
    "bf16": [(side, side, side) for side in (1024, 4096, 8192)],
    "fp32": [*((side, side, side) for side in _SQUARES[:4]), (8, 4096, 4096), (512, 4096, 4096)],
    "tf32": [*((side, side, side) for side in (1024, 4096, 8192)), (512, 4096, 4096)],
    "fp64": [(side, side, side) for side in (1024, 2048)],
    "fp8": [*((side, side, side) for side in (1024, 4096, 8192)), *((m, 14336, 4096) for m in (16, 128, 2048))],
    "int8": [(side, side, side) for side in (1024, 4096, 8192)],
}
_LONG = {  # measured in a run of seconds too
    "main": [(4096, 4096, 4096), (8192, 8192, 8192), (2048, 14336, 4096)],
    **{dtype: [(8192, 8192, 8192)] for dtype in ("fp16", "tf32", "fp8")},
    "fp32": [(4096, 4096, 4096)],
}
_BMMS = ((96, 512, 512, 64), (96, 512, 64, 512), (384, 128, 128, 64), (16, 1024, 1024, 1024))  # b, m, n, k
_ATTENTIONS = (  # batch, heads, heads of keys, new tokens, cached tokens, width, causal
    (8, 12, 12, 128, 0, 64, False),
    (8, 12, 12, 512, 0, 64, False),
    (4, 16, 16, 1024, 0, 64, True),
    (1, 32, 8, 2048, 0, 128, True),
    (1, 32, 8, 8192, 0, 128, True),
    *((batch, 32, 8, 1, cached, 128, False) for batch in (1, 8, 32) for cached in (1023, 4095)),
)
_CONVOLUTIONS = (  # batch, channels in, channels out, kernel, size, stride, groups: of ResNet-50, ConvNeXt, MobileNet
    (64, 3, 64, 7, 224, 2, 1),
    (64, 64, 64, 3, 56, 1, 1),
    (64, 256, 512, 1, 56, 1, 1),
    (64, 256, 256, 3, 14, 1, 1),
    (64, 512, 512, 3, 7, 1, 1),
    (64, 96, 96, 7, 56, 1, 96),
    (1, 64, 64, 3, 56, 1, 1),
)
_ELEMENTS = (2**16, 2**20, 2**24, 2**27)
_MATRICES = ((512, 32000), (2048, 4096), (8192, 1024), (65536, 512))  # rows, columns
_MATMUL, _ROWS = ("m", "n", "k"), ("rows", "columns")
_CONVOLUTION = ("batch", "c_in", "c_out", "kernel", "size", "stride", "groups")
_ATTENTION = ("batch", "heads", "kv_heads", "length", "cached", "width", "causal")


def kernel_cases(main_dtype: str, other_dtypes: Iterable[str]) -> list[Case]:
    """All kernels in one type, matmuls also in others."""
    return list(_in_main_type(main_dtype)) + list(_in_other_types(main_dtype, other_dtypes))


def _in_main_type(dtype: str) -> Iterator[Case]:
    def case(kind: str, names: Iterable[str], sizes: Iterable[Any], **more: Any) -> Case:
        return Case(kind, {**dict(zip(names, sizes, strict=True)), **more, "dtype": dtype})

    yield from (case("matmul", _MATMUL, sizes) for sizes in _MATMULS)
    yield from (case("linear", _MATMUL, sizes) for sizes in ((8, 4096, 1024), (512, 4096, 1024), (8192, 1024, 4096)))
    yield from (case("bmm", ("b", *_MATMUL), sizes) for sizes in _BMMS)
    yield from (case("attention", _ATTENTION, sizes) for sizes in _ATTENTIONS)
    for layout in ("nchw", "nhwc"):
        yield from (case("conv2d", _CONVOLUTION, sizes, layout=layout) for sizes in _CONVOLUTIONS)
    for op in (op for op in _ELEMENTWISE if (op, dtype) != ("to-fp32", "fp32")):
        for elements in _ELEMENTS if op in ("add", "gelu", "copy") else (2**22, 2**26):
            yield case("elementwise", ("op", "elements"), (op, elements))
    for op in _ON_ROWS:
        for rows, columns in _MATRICES if op in ("softmax", "layer-norm", "rms-norm") else _MATRICES[1:3]:
            yield case("rows", _ROWS, (rows, columns), op=op)
    for tokens in (64, 8192):
        yield case("embedding", ("tokens", "vocabulary", "width"), (tokens, 50304, 1024))
    yield case("cross-entropy", ("tokens", "vocabulary"), (2048, 50304))
    yield case("batch-norm", ("batch", "channels", "size"), (64, 256, 56))
    yield case("max-pool", ("batch", "channels", "size"), (64, 64, 112))
    for sizes in _LONG["main"]:
        yield case("matmul", _MATMUL, sizes)._replace(clocks="sustained")
    yield case("elementwise", ("op", "elements"), ("add", 2**26))._replace(clocks="sustained")


def _in_other_types(main_dtype: str, dtypes: Iterable[str]) -> Iterator[Case]:
    for dtype in dtypes:
        if dtype != main_dtype:
            for sizes in _IN_OTHER_TYPES[dtype]:
                yield Case("matmul", {**dict(zip(_MATMUL, sizes, strict=True)), "dtype": dtype})
            for sizes in _LONG.get(dtype, ()):
                yield Case("matmul", {**dict(zip(_MATMUL, sizes, strict=True)), "dtype": dtype}, "sustained")
