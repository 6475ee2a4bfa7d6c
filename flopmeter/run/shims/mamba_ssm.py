"""mamba_ssm (github.com/state-spaces/mamba): the selective scan, one kernel each way, and the Mamba block around it.

`u`, `delta` and `z` are [batch, channels, length], `A` [channels, states], `B` and `C` [batch, states, length]. For
each element of `u` and each of N states the forward kernel (csrc/selective_scan/selective_scan_fwd_kernel.cuh)
computes a = exp(delta A), x = a x + (delta u) B and y += C x: 7 operations, counted as everywhere in flopmeter (the
authors' 9 B L D N, in issue 110 there, counts them otherwise). It keeps the state of each chunk of 2,048 steps.
"""
# ruff: noqa: N803, N806 - A, B, C and D are the names of the paper and of the package

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.costs import make_cost
from flopmeter.costs.traffic import regions
from flopmeter.records import Call, Cost
from flopmeter.run.shims.causal_conv1d import SILU, SILU_BACKWARD, causal_conv1d_fn
from flopmeter.run.shims.kernel import kernel

COMPILED_PARTS = ("causal_conv1d", "selective_scan_cuda")
"""Shims with which an installed mamba_ssm runs by its own Python and Triton kernels, Mamba-2 among them."""
CHUNK = 2048  # steps (csrc/selective_scan/selective_scan.cpp)
# Operations a state. Backward: a, its exponential and the state again 5; dx = C dy + a dx' 3; the gradients of C, B,
# delta u, a (twice), A and delta, a product and a sum each.
SCAN, SCAN_BACKWARD = 7, 5 + 3 + 6 * 2
# log(1 + exp(x)); its gradient times 1 / (1 + exp(-x)) is one more than a sigmoid's 2.
SOFTPLUS, SOFTPLUS_BACKWARD = 3, 3


def _options(call: Call) -> tuple[int, int, int]:
    """For an element of u: the operations and the library functions besides those of its states, and the number of
    states."""
    has_z, softplus = call.argument("z") is not None, bool(call.argument("softplus"))
    each = 1 + 2 * (call.argument("D") is not None) + (SILU + 1) * has_z
    each += (call.argument("delta_bias") is not None) + SOFTPLUS * softplus
    return each, 2 * softplus + has_z, call.argument("A").shape[1]


def _forward_cost(call: Call) -> Cost:
    each, exponentials, states = _options(call)
    n = call.argument("u").numel
    return make_cost(call, "element-wise", (each + SCAN * states) * n, transcendentals=(exponentials + states) * n)


def _backward_cost(call: Call) -> Cost:
    each, exponentials, states = _options(call)
    has_z, softplus = call.argument("z") is not None, bool(call.argument("softplus"))
    each += 3 + 2 * (call.argument("D") is not None) + SILU_BACKWARD * has_z + SOFTPLUS_BACKWARD * softplus
    n = call.argument("u").numel
    flops = (each + SCAN_BACKWARD * states) * n
    read = [spec for spec in regions(call)[0] if spec is not call.argument("of_z")]  # written, and not read
    return make_cost(call, "element-wise", flops, transcendentals=(exponentials + states) * n, read=read)


@kernel("selective_scan", _forward_cost)
def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y before and after the gate z, and the states at the chunks' ends with the products of their a."""
    batch, channels, length = u.shape
    states = u.new_empty((batch, channels, -(-length // CHUNK), 2 * A.shape[1]), dtype=torch.float32)
    return torch.empty_like(u), u.new_empty(0) if z is None else torch.empty_like(u), states


@kernel("selective_scan_backward", _backward_cost, mutates=("of_z",))
def scan_backward(
    gradient: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    states: Tensor,
    out: Tensor | None,
    of_z: Tensor | None,
    gates_again: bool,
) -> list[Tensor]:
    """Gradients of u, delta, A, B, C, D and delta_bias, of which those that many blocks add to are fp32; and, where it
    is asked for, y after the gate again. That of z goes where it is wanted."""
    as_float = [each.new_empty(each.shape, dtype=torch.float32) for each in (A, B, C)]
    of_options = (u.new_empty(0) if each is None else torch.empty_like(each) for each in (D, delta_bias))
    return [torch.empty_like(u), torch.empty_like(delta), *as_float, *of_options, *[torch.empty_like(u)] * gates_again]


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, gated, states = scan(*inputs)
        *tensors, ctx.softplus = inputs
        ctx.save_for_backward(*tensors, states, out)
        return out if inputs[6] is None else gated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, states, out = ctx.saved_tensors
        of_z = None if inputs[6] is None else torch.empty_like(inputs[6])
        gradients = scan_backward(gradient.contiguous(), *inputs, ctx.softplus, states, out, of_z, False)
        gradients.insert(6, of_z)
        pairs = zip(gradients, inputs, strict=True)
        return (*(None if given is None else each.to(given.dtype) for each, given in pairs), None)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Raises NotImplementedError for complex states, and for B or C that do not depend on the input."""
    if A.is_complex() or B.ndim == 2 or C.ndim == 2:
        raise NotImplementedError("flopmeter's shim of mamba_ssm has real states, and B and C that depend on the input")
    out: Tensor = _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return (out, u.new_empty(*u.shape[:2], A.shape[1])) if return_last_state else out


class Mamba(nn.Module):
    """The block of 'Mamba: Linear-Time Sequence Modeling with Selective State Spaces' (arXiv 2312.00752), after
    mamba_ssm/modules/mamba_simple.py. mamba_ssm's block computes the convolution and delta again in its backward pass;
    this one keeps them."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = expand * d_model
        self.d_state, self.dt_rank = d_state, math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **made)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1, **made)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False, **made)
        self.dt_proj = nn.Linear(self.dt_rank, inner, **made)
        self.A_log = nn.Parameter(torch.zeros(inner, d_state, device=device))
        self.D = nn.Parameter(torch.ones(inner, device=device))
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **made)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, length, d_model] to the same."""
        batch, length, _ = hidden_states.shape
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        steps = self.x_proj(x.transpose(1, 2).reshape(batch * length, -1))
        delta, B, C = steps.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = (self.dt_proj.weight @ delta.t()).view(-1, batch, length).transpose(0, 1)
        B, C = (each.reshape(batch, length, -1).transpose(1, 2).contiguous() for each in (B, C))
        A, bias = -torch.exp(self.A_log.float()), self.dt_proj.bias.float()
        y = selective_scan_fn(x, delta, A, B, C, self.D.float(), z, bias, delta_softplus=True)
        return self.out_proj(y.transpose(1, 2))


_SCAN = {"selective_scan_fn": selective_scan_fn}
_MAMBA = {"Mamba": Mamba}
MODULES = {
    "mamba_ssm": {**_MAMBA, **_SCAN},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": _SCAN,
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": _MAMBA,
}
