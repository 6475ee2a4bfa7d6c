"""nn.MultiheadAttention and nn.TransformerEncoderLayer in inference: one op each, several kernels inside.

The dispatcher shows a single op whose kernel calls others below it (aten/src/ATen/native/transformers), so
the cost is a tuple: the same kernels in the same order as on CUDA, without padding mask.
"""

from __future__ import annotations

from typing import NamedTuple

from flopmeter.costs.rules import make_attention, make_contraction, make_cost, rule
from flopmeter.records import ELEMENTWISE, NORMALIZATION, AttentionShape, Call, Cost, Matmul
from flopmeter.torch_names.operators import aten


class _Layer(NamedTuple):
    """A layer's sizes: [batch, queries, width] against [batch, keys, width], in a type of `itemsize` bytes."""

    call: Call
    batch: int
    queries: int
    keys: int
    width: int
    heads: int
    itemsize: int

    def linear(self, rows: int, columns: int, depth: int, *, gelu: bool = False) -> Cost:
        """addmm: rows x depth @ depth x columns, the bias, and GELU (tanh, 9) in the epilogue."""
        outputs = rows * columns
        return make_contraction(
            self.call,
            [Matmul(1, rows, columns, depth)],
            extra=((ELEMENTWISE, outputs * (10 if gelu else 1)),),
            transcendentals=outputs * gelu,
            read=(rows * depth + depth * columns + columns) * self.itemsize,
            written=outputs * self.itemsize,
        )

    def pointwise(self, op_class: str, flops: int, elements: int, *, operands: int = 1, functions: int = 0) -> Cost:
        nbytes = elements * self.itemsize
        return make_cost(
            self.call,
            op_class,
            flops * elements,
            transcendentals=functions * elements,
            read=operands * nbytes,
            written=nbytes,
        )

    def products(self) -> tuple[Matmul, Matmul]:
        batch, depth = self.batch * self.heads, self.width // self.heads
        return Matmul(batch, self.queries, self.keys, depth), Matmul(batch, self.queries, depth, self.keys)


@rule(aten._native_multi_head_attention)
def multi_head_attention(call: Call) -> tuple[Cost, ...]:
    """One matmul for q, k and v, the attention, and the output's matmul."""
    query, key = call.argument("query"), call.argument("key")
    same = query == key == call.argument("value")
    batch, queries, width = query.shape
    layer = _Layer(call, batch, queries, key.shape[1], width, call.argument("num_head"), query.dtype.itemsize)
    fuses = same and not call.argument("need_weights") and call.argument("mask") is None
    return _attend(layer, fuses=fuses, same=same)


@rule(aten._transformer_encoder_layer_fwd)
def transformer_encoder_layer(call: Call) -> tuple[Cost, ...]:
    """Attention, residual, norm, two matmuls with the activation in the first one's epilogue, residual, norm
    (norms first where `norm_first`: the same kernels)."""
    x, hidden = call.argument("src"), call.argument("ffn_weight_1").shape[0]
    if len(x.shape) == 2:  # unbatched
        x = x._replace(shape=(1, *x.shape))
    layer = _Layer(call, x.shape[0], x.shape[1], x.shape[1], x.shape[2], call.argument("num_heads"), x.dtype.itemsize)
    rows, elements = x.shape[0] * x.shape[1], x.numel
    norm = layer.pointwise(NORMALIZATION, 7, elements)
    residual = layer.pointwise(ELEMENTWISE, 1, elements, operands=2)
    first = layer.linear(rows, hidden, layer.width, gelu=call.argument("use_gelu"))
    second = layer.linear(rows, layer.width, hidden)
    attended = _attend(layer, fuses=call.argument("mask") is None, same=True)
    if call.argument("norm_first"):
        return (norm, *attended, residual, norm, first, second, residual)
    return (*attended, residual, norm, first, second, residual, norm)


@rule(aten._masked_softmax)
def masked_softmax(call: Call) -> Cost:
    """Softmax (4) of the elements that the mask leaves."""
    n = call.argument("self").numel
    return make_cost(call, NORMALIZATION, 4 * n, transcendentals=n)


def _attend(layer: _Layer, *, fuses: bool, same: bool) -> tuple[Cost, ...]:
    """Self-attention of heads that are multiples of 8 fuses. Else the scores are kept: bias and scale of q, k
    and v, matmul, softmax, matmul, then the output's matmul."""
    rows, width = layer.batch * layer.queries, layer.width
    projected = layer.linear(rows, width, width)
    if fuses and width // layer.heads % 8 == 0:
        return layer.linear(rows, 3 * width, width), _fused(layer), projected
    key_rows = layer.batch * layer.keys
    inputs = (
        [layer.linear(rows, 3 * width, width)]
        if same
        else [
            layer.linear(rows, width, width),
            layer.linear(key_rows, width, width),
            layer.linear(key_rows, width, width),
        ]
    )
    scores, values = layer.products()
    softmax = layer.pointwise(NORMALIZATION, 4, scores.batch * scores.m * scores.n, functions=1)
    scale = layer.pointwise(ELEMENTWISE, 1, rows * width)
    return (*inputs, scale, _bmm(layer, scores), softmax, _bmm(layer, values), projected)


def _fused(layer: _Layer) -> Cost:
    """Flash attention takes 16-bit types only, and from compute capability 8.0 on; the efficient kernels the rest."""
    touched, head_dim = layer.batch * layer.width * layer.itemsize, layer.width // layer.heads
    return make_attention(
        layer.call,
        layer.products(),
        "flash" if layer.itemsize == 2 else "efficient",
        AttentionShape(layer.batch, layer.heads, layer.heads, layer.queries, layer.keys, head_dim, head_dim),
        read=touched * (layer.queries + 2 * layer.keys),
    )


def _bmm(layer: _Layer, product: Matmul) -> Cost:
    batch, m, n, k = product
    return make_contraction(
        layer.call, [product], read=batch * (m * k + k * n) * layer.itemsize, written=batch * m * n * layer.itemsize
    )
