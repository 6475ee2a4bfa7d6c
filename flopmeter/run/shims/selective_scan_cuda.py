"""selective_scan_cuda, the compiled part of mamba_ssm (github.com/state-spaces/mamba, csrc/selective_scan): with it an
installed mamba_ssm runs by its own Python and Triton, where `--shim mamba_ssm` stands in for the whole package.
"""
# ruff: noqa: N803 - A, B, C and D are the names of the paper and of the package

from __future__ import annotations

import torch
from torch import Tensor

from flopmeter.run.shims.kernel import named
from flopmeter.run.shims.mamba_ssm import scan, scan_backward


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """y, the states of its chunks, and, with a gate z, y after it. B and C are [batch, groups, states, length].
    Raises NotImplementedError for complex states."""
    if A.is_complex():
        raise NotImplementedError("flopmeter's shim of selective_scan_cuda has real states")
    out, gated, states = scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return [out, states] if z is None else [out, states, gated]


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Tensor]:
    """Gradients of u, delta, A, B, C, D and delta_bias; that of z, into `dz` where it is given; y after the gate."""
    of_z = torch.empty_like(z) if dz is None and z is not None else dz
    found = scan_backward(
        dout, u, delta, A, B, C, D, z, delta_bias, delta_softplus, x, out, of_z, recompute_out_z and z is not None
    )
    return found if of_z is None else [*found[:7], of_z, *found[7:]]


MODULES = {"selective_scan_cuda": named(fwd, bwd)}
