"""Layers that keep a state of fixed size (state spaces, linear attention), with the kernels that engines run there.

Works around: transformers' models call a few functions in such a layer, which are slow Python where no package brings
kernels for them. Here each is an operator with the cost of these kernels.
Until: transformers can be given other kernels for them, as it can for attention.

The kernels are those of causal_conv1d, mamba_ssm and flash-linear-attention, which vLLM and SGLang run too. None of
them was measured:

- a convolution over time, by one kernel;
- one token of each sequence, by one kernel that reads and writes each state once;
- a chunk of a prompt, by one kernel (Mamba), or by products on the matrix units within and between blocks of tokens
  (Mamba-2: 'ssd_combined.py' of mamba_ssm; delta rules: 'chunk.py' of flash-linear-attention), which write the states
  between blocks.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flopmeter.costs import make_contraction, make_cost
from flopmeter.costs.custom import CustomRule, operator_with_cost
from flopmeter.records import Call, Cost, Matmul

STATE_OPERATIONS = 7  # for an element: decayed, read, updated and asked (a product, or a product and a sum, each)
SILU_OPERATIONS = 4
MOST_STEPPED_TOKENS = 16  # of a sequence, one after another in one kernel: a draft's; more go in blocks
HALF, SINGLE = 2, 4  # bytes


def _operator(name: str, cost: CustomRule, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    return operator_with_cost(f"flopmeter_serve::{name}", cost, mutates)


def _convolution_cost(call: Call) -> Cost:
    tokens, width = call.outputs[0].numel, call.argument("weight").shape[-1]
    each = 2 * width - 1 + (call.argument("bias") is not None) + SILU_OPERATIONS
    return make_cost(call, "element-wise", each * tokens, transcendentals=tokens)


@_operator("convolution", _convolution_cost)
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@_operator("convolution_step", _convolution_cost, ["state"])
def _convolution_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x)


def _step_cost(call: Call) -> Cost:
    updates = call.argument("state").numel * call.argument("tokens")
    return make_cost(call, "element-wise", STATE_OPERATIONS * updates, transcendentals=call.argument("decays"))


@_operator("state_step", _step_cost, ["state"])
def _state_step(state: Tensor, values: Tensor, others: list[Tensor], tokens: int, decays: int) -> Tensor:
    """`values` and the result are of the same shape; `decays`: exponentials."""
    return torch.empty_like(values)


def _scan_cost(call: Call) -> Cost:
    values, states = call.argument("values").numel, call.argument("states")
    return make_cost(call, "element-wise", STATE_OPERATIONS * values * states, transcendentals=values * states)


@_operator("scan", _scan_cost)
def _scan(values: Tensor, others: list[Tensor], states: int) -> tuple[Tensor, Tensor]:
    """`values` [batch, channels, tokens]; gives the same and the last state."""
    return torch.empty_like(values), values.new_empty(*values.shape[:2], states, dtype=torch.float32)


def _blocks(call: Call, heads: int) -> tuple[int, int]:
    """Blocks of all heads and sequences, and the tokens of one."""
    batch, tokens = call.argument("values").shape[:2]
    size = min(call.argument("block"), tokens)
    return batch * heads * math.ceil(tokens / size), size


def _mamba2_cost(call: Call) -> tuple[Cost, ...]:
    """States of each block, what passes from block to block, scores of each group of heads, results of both."""
    x, b = call.argument("values"), call.argument("keys")
    (batch, tokens, heads, width), (groups, state) = x.shape, b.shape[2:]
    count, size = _blocks(call, heads)
    score_count = count // heads * groups
    states, scores = SINGLE * count * state * width, SINGLE * score_count * size * size
    steps = SINGLE * batch * tokens * heads
    into, across = Matmul(count, width, state, size), Matmul(score_count, size, size, state)
    out = Matmul(count, size, width, state), Matmul(count, size, width, size)
    return (
        make_contraction(call, [into], read=x.nbytes + b.nbytes + steps, written=states),
        make_cost(call, "element-wise", 2 * states // SINGLE, read=states, written=states),
        make_contraction(call, [across], read=2 * b.nbytes, written=scores),
        make_contraction(call, out, read=x.nbytes + b.nbytes + states + scores + steps, written=x.nbytes),
    )


def _delta_cost(call: Call) -> tuple[Cost, ...]:
    """Products of keys and their triangular inverse; keys and values as it turns them; the states, which pass from
    block to block, with the new values; results. Between kernels all is in 16 bits but for these products."""
    v, k = call.argument("values"), call.argument("keys")
    (batch, tokens, heads, width), key = v.shape, k.shape[3]
    count, size = _blocks(call, heads)
    chains, rows, gates = batch * heads, batch * tokens * heads, sum(spec.nbytes for spec in call.inputs[3:])
    squares, inverse, turned, values = SINGLE * rows * size, HALF * rows * size, HALF * rows * key, v.nbytes
    states, last = HALF * count * key * width, SINGLE * chains * key * width
    block_after_block = [Matmul(chains, size, width, key), Matmul(chains, key, width, size)] * (count // chains)
    out = Matmul(count, size, width, key), Matmul(count, size, size, key), Matmul(count, size, width, size)
    return (
        make_contraction(call, [Matmul(count, size, size, key)], read=k.nbytes + gates, written=squares),
        make_cost(call, "element-wise", count * size**3 // 3, read=squares, written=inverse),
        make_contraction(
            call, [Matmul(count, size, key + width, size)], read=k.nbytes + values + inverse, written=turned + values
        ),
        make_contraction(
            call, block_after_block, read=k.nbytes + turned + values + last, written=states + values + last
        ),
        make_contraction(call, out, read=2 * k.nbytes + values + states, written=values),
    )


@_operator("mamba2_blocks", _mamba2_cost)
def _mamba2_blocks(
    values: Tensor, keys: Tensor, queries: Tensor, others: list[Tensor], block: int
) -> tuple[Tensor, Tensor]:
    """Values [batch, tokens, heads, width], keys and queries [batch, tokens, groups, state]; gives results like the
    values and the last states."""
    last = values.new_empty(len(values), *values.shape[2:], keys.shape[-1], dtype=torch.float32)
    return torch.empty_like(values), last


@_operator("delta_rule_blocks", _delta_cost)
def _delta_blocks(
    values: Tensor, keys: Tensor, queries: Tensor, others: list[Tensor], block: int
) -> tuple[Tensor, Tensor]:
    """The same; states lie the other way round."""
    return torch.empty_like(values), _state_of(values, keys)


@_operator("lightning_blocks", _mamba2_cost)
def _lightning_blocks(
    values: Tensor, keys: Tensor, queries: Tensor, others: list[Tensor], block: int
) -> tuple[Tensor, Tensor]:
    """The same products as Mamba-2's, of keys of each head and a decay that no token changes (Lightning Attention-2,
    arXiv 2401.04658); states in the type of the values."""
    return torch.empty_like(values), _state_of(values, keys).to(values.dtype)


def _state_of(values: Tensor, keys: Tensor) -> Tensor:
    heads, width = values.shape[2:]
    return values.new_empty(len(values), heads, keys.shape[-1], width, dtype=torch.float32)


# --- the functions of transformers, by their names and arguments there ------------------------------------------------


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _causal_conv1d_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    return _convolution_step(x, state, weight, bias)


def _causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Any:
    return _convolution(x, weight, bias)


def _state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    *rest: Tensor | None,
    z: Any = None,
    dt_bias: Any = None,
    **_: Any,
) -> Any:
    """Mamba's decay is of each element of the state, Mamba-2's of a head."""
    decays = dt.numel() * state.shape[-1] if a.stride(-1) else state.numel() // math.prod(state.shape[-2:])
    return _state_step(state, hidden_states, _given(dt, a, *rest, z, dt_bias), 1, decays)


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, a: Tensor, *rest: Tensor | None, return_last_state: bool = False, z: Any = None,
    delta_bias: Any = None, **_: Any,
) -> Any:  # fmt: skip
    out, last = _scan(hidden_states, _given(dt, a, *rest, z, delta_bias), a.shape[-1])
    return (out, last) if return_last_state else out


def _chunk_scan(
    hidden_states: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, *,
    return_final_states: bool = False, **others: Any,
) -> Any:  # fmt: skip
    read = _given(dt, a, *(others.get(name) for name in ("D", "dt_bias", "initial_states")))
    out, last = _mamba2_blocks(hidden_states, b, c, read, chunk_size)
    return (out, last) if return_final_states else out


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if value.shape[1] > MOST_STEPPED_TOKENS:
        found: tuple[Tensor, Tensor] = _delta_blocks(value, key, query, [g, beta], chunk_size)
        return found
    state = _state_of(value, key) if initial_state is None else initial_state
    return _state_step(state, value, [query, key, g, beta], value.shape[1], g.numel()), state


def _lightning_attention(layer: Any, hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
    """MiniMax writes it out token by token in the layer's own forward, which is left here but for that. The cache is
    called `cache` from transformers 5.24 on."""
    batch, tokens, _width = hidden_states.shape
    mixed = layer.act_fn(layer.qkv_proj(hidden_states)).reshape(batch, tokens, layer.num_attention_heads, -1)
    query, key, value = mixed.chunk(3, dim=-1)
    cache = options["cache"] if "cache" in options else options["past_key_values"]
    held = cache.layers[layer.layer_idx]
    state = held.recurrent_states[0]
    if state is None or tokens > MOST_STEPPED_TOKENS:
        out, state = _lightning_blocks(value, key, query, [layer.slope_rate], layer.block_size)
    else:
        out = _state_step(state, value, [query, key, layer.slope_rate], tokens, layer.num_attention_heads)
    held.update_recurrent_state(state)
    gate = torch.sigmoid(layer.output_gate(hidden_states))
    mixed_in: Tensor = layer.out_proj(gate * layer.norm(out.reshape(batch, tokens, -1)))
    return mixed_in, None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _causal_conv1d_update,
    "causal_conv1d_fn": _causal_conv1d_fn,
    "mamba_selective_state_update": _state_update,
    "mamba2_selective_state_update": _state_update,
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "MiniMaxCache": object,  # the model takes no other class; its layers above take the cache that is given
}
FORWARDS = {"MiniMaxLightningAttention": _lightning_attention}
"""Layers that call no such function."""


@contextlib.contextmanager
def with_kernels(model: Any) -> Iterator[None]:
    """In this context the model calls the operators above."""
    with contextlib.ExitStack() as stack:
        for file in {type(module).__module__ for module in model.modules()}:
            own = vars(sys.modules[file])
            stack.enter_context(mock.patch.dict(own, {name: FUNCTIONS[name] for name in FUNCTIONS.keys() & own.keys()}))
            for name in FORWARDS.keys() & own.keys():
                stack.enter_context(mock.patch.object(own[name], "forward", FORWARDS[name]))
        yield
