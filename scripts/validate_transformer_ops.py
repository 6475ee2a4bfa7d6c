"""Operators of transformer layers, one by one: embedding, norms, rotary, activation and add in fp16 (microsoft/vidur).

vidur measured the layers of Sarathi-Serve, whose norms, rotary embedding and gated activation are vLLM's kernels of
2023: one block of threads a token, elements of two bytes loaded one by one. Here they are operators with cost rules of
their own, as is torch 2.1's embedding; layer norm, GELU and add are torch's. The file has times in whole microseconds,
so that a row of t µs says nothing finer than 0.25 / t on average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor
from validate_kernels import LEAST_SECONDS, Program, kernel_row
from validation_rows import Line, Row

from flopmeter import register_cost
from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, INDEXING, NORMALIZATION, Call, Cost, Region, Reread

# Threads of a block at most, and what vLLM's kernels (csrc/layernorm_kernels.cu, pos_encoding_kernels.cu and
# activation_kernels.cu of 2023) do beside their arithmetic: integer operations for each element, on the way to its
# addresses and around its loop (with two divisions in the rotary kernel). They were chosen on all rows; a search over
# the rows that are not held out gives the same for norms and rotary, and 40 to 50 for the activation.
ROW_THREADS, ROTARY_THREADS = 1024, 512
NORM_INTEGERS, ACTIVATION_INTEGERS, ROTARY_INTEGERS = 40, 40, 70
# Which row and which column, and where both lie in two tensors: four divisions of 20 instructions, of which
# three (integer to float, reciprocal, float to integer) go to a unit with a quarter of the lanes.
SELECT_INTEGERS = 4 * (17 + 3 * 4)
NORM_OPERATIONS = 60  # a sum over 32 lanes, and over 32 warps
TIMER_SECONDS = 1e-6  # the step of the file's times


@torch.library.custom_op("vllm_2023::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, width], weight [width]."""
    raise NotImplementedError


@torch.library.custom_op("vllm_2023::rotary", mutates_args=("query", "key"))
def rotary(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    """query and key [tokens, heads, depth], turned in place; cos_sin [positions, depth]."""
    raise NotImplementedError


@torch.library.custom_op("vllm_2023::silu_and_mul", mutates_args=())
def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """[tokens, 2 x width] to [tokens, width]."""
    raise NotImplementedError


@torch.library.custom_op("torch_2_1::embedding", mutates_args=())
def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """table [vocabulary, width], ids [tokens]."""
    raise NotImplementedError


@embedding.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


@register_cost(embedding)
def _embedding_cost(call: Call) -> Cost:
    """indexSelectLargeIndex of aten/src/ATen/native/cuda/Indexing.cu, until torch 2.7: an element at a time."""
    (out,) = call.outputs
    table, ids = call.inputs
    rows = Region(table, out.nbytes)
    return make_cost(call, INDEXING, read=(rows, ids), access="stream", index_operations=SELECT_INTEGERS * out.numel)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@rotary.register_fake
def _(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    return None


@silu_and_mul.register_fake
def _(gate_and_up: Tensor) -> Tensor:
    return gate_and_up.new_empty(gate_and_up.shape[0], gate_and_up.shape[1] // 2)


@register_cost(rms_norm)
def _rms_norm_cost(call: Call) -> Cost:
    x = call.inputs[0]
    rows, columns = x.shape
    threads = min(columns, ROW_THREADS)
    again = Reread(x.nbytes, rows, 2 * columns, threads, NORM_OPERATIONS, 2 * ceil(columns / threads))
    return make_cost(call, NORMALIZATION, 4 * x.numel, rereads=(again,), index_operations=NORM_INTEGERS * x.numel)


@register_cost(rotary)
def _rotary_cost(call: Call) -> Cost:
    """A pair of elements takes four products and two sums."""
    positions, query, key, _ = call.inputs
    pairs = [prod(spec.shape[1:]) // 2 for spec in (query, key)]
    threads = min(pairs[0], ROTARY_THREADS)
    rows = Reread(0, query.shape[0], 4 * sum(pairs), threads, 0, sum(ceil(count / threads) for count in pairs))
    count = query.shape[0] * sum(pairs)
    touched = (query, key)
    return make_cost(
        call, ELEMENTWISE, 6 * count, read=(*touched, positions), written=touched, rereads=(rows,),
        index_operations=ROTARY_INTEGERS * count,
    )  # fmt: skip


@register_cost(silu_and_mul)
def _silu_and_mul_cost(call: Call) -> Cost:
    """x / (1 + exp(-x)) takes four operations, the product one."""
    (out,) = call.outputs
    rows, columns = out.shape
    threads = min(columns, ROW_THREADS)
    row = Reread(0, rows, 6 * columns, threads, 0, ceil(columns / threads))
    return make_cost(
        call, ELEMENTWISE, 5 * out.numel, transcendentals=out.numel, rereads=(row,),
        index_operations=ACTIVATION_INTEGERS * out.numel,
    )  # fmt: skip


def transformer_ops(lines: list[Line]) -> dict[str, list[Row]]:
    """The rows of each kind of operator, with bands that allow for the timer. An embedding that is split over ranks
    masks its tokens first, with several kernels; those are left out."""
    rows: dict[str, list[Row]] = {title: [] for title in dict.fromkeys(title for title, _ in COLUMNS.values())}
    for line in lines:
        for column, (title, program) in COLUMNS.items():
            is_split = column == "emb_ms" and line["num_tensor_parallel_workers"] != "1"
            if is_split or not line[column] or float(line[column]) * 1e-3 < LEAST_SECONDS:
                continue
            shape = tuple(line[key] for key in ("model", "num_tokens", "num_tensor_parallel_workers"))
            with torch.device("meta"):
                inputs, run = program(line)
            measured = dict(line, ms=line[column])
            before = functools.partial(_write, inputs)
            row = kernel_row(column.removesuffix("_ms"), measured, run, shape, before=before)
            rows[title].append(row._replace(low=row.low - TIMER_SECONDS / 2, high=row.high + TIMER_SECONDS / 2))
    return rows


def _write(inputs: Sequence[Tensor]) -> None:
    """The operators before wrote them."""
    for tensor in inputs:
        tensor.zero_()


def _numbers(line: Line) -> tuple[int, int, int]:
    """Tokens, width of the model, and over how many ranks it is split."""
    return int(line["num_tokens"]), int(line["n_embd"]), int(line["num_tensor_parallel_workers"])


Measured = tuple[tuple[Tensor, ...], Program]  # what was just written, and the operator

_half = functools.partial(torch.empty, dtype=torch.float16)


def _embedding(line: Line) -> Measured:
    tokens, width, _ = _numbers(line)
    table, ids = _half(int(line["vocab_size"]), width), torch.empty(tokens, dtype=torch.int64)
    return (ids,), lambda: embedding(table, ids)


def _norm(line: Line) -> Measured:
    tokens, width, _ = _numbers(line)
    x, weight, bias = _half(tokens, width), _half(width), _half(width)
    if _is_gated(line):
        return (x,), lambda: rms_norm(x, weight)
    return (x,), lambda: F.layer_norm(x, (width,), weight, bias)


def _is_gated(line: Line) -> bool:
    """The models with a gated MLP have RMS norms; phi-2 has a layer norm, GELU, and adds two branches at once."""
    return line["use_gated_mlp"] == "True"


def _rotary(line: Line) -> Measured:
    tokens, width, ranks = _numbers(line)
    heads, kv_heads = int(line["n_head"]), int(line["n_kv_head"])
    depth = width // heads
    query, key = (_half(tokens, ceil(count / ranks), depth) for count in (heads, kv_heads))
    positions, cos_sin = torch.empty(tokens, dtype=torch.int64), _half(4096, depth)
    return (query, key), lambda: rotary(positions, query, key, cos_sin)


def _activation(line: Line) -> Measured:
    tokens, _, ranks = _numbers(line)
    hidden = int(line["n_expanded_embd"]) // ranks
    x = _half(tokens, hidden * (1 + _is_gated(line)))
    return (x,), (lambda: silu_and_mul(x)) if _is_gated(line) else (lambda: F.gelu(x))


def _add(line: Line) -> Measured:
    tokens, width, _ = _numbers(line)
    x, y, z = (_half(tokens, width) for _ in range(3))
    return (x, y, z), (lambda: x + y) if _is_gated(line) else (lambda: x + y + z)


COLUMNS: Mapping[str, tuple[str, Callable[[Line], Measured]]] = {
    "emb_ms": ("embeddings", _embedding),
    "input_layernorm_ms": ("norms", _norm),
    "post_attention_layernorm_ms": ("norms", _norm),
    "attn_rope_ms": ("rotary embeddings", _rotary),
    "mlp_act_ms": ("activations", _activation),
    "add_ms": ("additions", _add),
}
