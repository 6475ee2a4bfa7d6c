"""Matmuls: 2·M·N·K each."""

from __future__ import annotations

from math import prod

import torch

from flopmeter.costs.rules import COMPLEX_ADD, COMPLEX_MULTIPLY, make_contraction, make_cost, rule
from flopmeter.records import ELEMENTWISE, MOVEMENT, Call, Cost, Matmul, TensorSpec
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten


@rule(aten.mm, aten._int_mm)
def mm(call: Call) -> Cost:
    """[m, k] @ [k, n]."""
    a, b = call.inputs[:2]
    return make_contraction(call, [_product(a, b)])


@rule(aten.bmm)
def bmm(call: Call) -> Cost:
    """[b, m, k] @ [b, k, n]."""
    a, b = call.inputs[:2]
    return make_contraction(call, [_product(a, b)])


@rule(aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_)
def addmm(call: Call) -> tuple[Cost, ...]:
    """beta·bias + alpha·(a @ b): the matmul, then per output one add and one multiply for each of
    alpha and beta that is not 1. cuBLAS does it in the matmul's epilogue."""
    return _scaled_sum(call, _product(*call.inputs[1:3]))


@rule(aten._addmm_activation)
def addmm_activation(call: Call) -> tuple[Cost, ...]:
    """addmm with ReLU (0) or GELU (tanh, 9 with one function) in the epilogue."""
    product = _product(*call.inputs[1:3])
    gelus = product.m * product.n if call.argument("use_gelu") else 0
    return _scaled_sum(call, product, more_flops=9 * gelus, transcendentals=gelus)


@rule(aten.addbmm, aten.addbmm_)
def addbmm(call: Call) -> tuple[Cost, ...]:
    """beta·input + alpha·sum over the batch of (a @ b): a copy of the input, to which each product is added in place
    (aten/src/ATen/native/LinearAlgebra.cpp). The sum over the batch counts as depth of the product."""
    (_, a, b), (out,) = call.inputs, call.outputs
    batch, m, k = a.shape
    *copy, whole = _scaled_sum(call, Matmul(1, m, b.shape[-1], batch * k))
    return *copy, *(
        make_contraction(
            call,
            [Matmul(1, m, b.shape[-1], k)],
            extra=whole.flops_by_class[1:] if number == 0 else (),
            read=(_matrix(a, number), _matrix(b, number), *([out] if number or call.argument("beta") != 0 else [])),
            written=(out,),
        )
        for number in range(batch)
    )


def _matrix(batch: TensorSpec, number: int) -> TensorSpec:
    offset = batch.offset + number * batch.stride[0]
    return batch._replace(shape=batch.shape[1:], stride=batch.stride[1:], offset=offset)


@rule(aten.mv)
def mv(call: Call) -> Cost:
    """[m, k] @ [k]."""
    m, k = call.inputs[0].shape
    return make_contraction(call, [Matmul(1, m, 1, k)])


@rule(aten.addmv, aten.addmv_)
def addmv(call: Call) -> tuple[Cost, ...]:
    """beta·input + alpha·(A @ x)."""
    m, k = call.inputs[1].shape
    return _scaled_sum(call, Matmul(1, m, 1, k))


@rule(aten.dot, aten.vdot)
def dot(call: Call) -> Cost:
    """[k] · [k]."""
    return make_contraction(call, [Matmul(1, 1, 1, call.argument("self").numel)])


@rule(aten.addr, aten.addr_)
def addr(call: Call) -> tuple[Cost, ...]:
    """beta·input + alpha·(x ⊗ y)."""
    x, y = call.inputs[1:3]
    return _scaled_sum(call, Matmul(1, x.numel, y.numel, 1))


@rule(aten._trilinear)
def trilinear(call: Call) -> Cost:
    """Bilinear layers: three tensors, each broadcast over its `expand` dimensions, are multiplied and summed. First the
    first two, over the dimensions that the third lacks; then their result and the third."""
    first, second, third = (
        _unsqueezed(spec.shape, call.argument(f"expand{i}")) for i, spec in enumerate(call.inputs, 1)
    )
    summed_early = {dim for dim in call.argument("sumdim") if dim in call.argument("expand3")}
    pair = torch.broadcast_shapes(first, second)
    kept = [1 if dim in summed_early else size for dim, size in enumerate(pair)]
    macs = prod(pair), prod(torch.broadcast_shapes(tuple(kept), third))
    return make_contraction(call, [Matmul(1, 1, 1, count) for count in macs])


@rule(aten.conv_tbc)
def conv_tbc(call: Call) -> Cost:
    """x [T, B, C_in], filters [kernel, C_in, C_out], and the bias."""
    (kernel, c_in, c_out), (out,) = call.inputs[1].shape, call.outputs
    product = Matmul(1, out.shape[0] * out.shape[1], c_out, c_in * kernel)
    return make_contraction(call, [product], extra=((ELEMENTWISE, out.numel),), tf32_switch="cudnn")


def _unsqueezed(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for dim in dims:
        sizes.insert(dim, 1)
    return tuple(sizes)


def _scaled_sum(call: Call, product: Matmul, *, more_flops: int = 0, transcendentals: int = 0) -> tuple[Cost, ...]:
    """The matmul and beta·input + alpha·matmul. With beta 0 the input is not read."""
    (added, *operands), (out,) = call.inputs[:3], call.outputs
    beta, alpha = call.argument("beta"), call.argument("alpha")
    add, multiply = (COMPLEX_ADD, COMPLEX_MULTIPLY) if _is_complex(call) else (1, 1)
    per_output = (add if beta != 0 else 0) + multiply * ((beta not in (0, 1)) + (alpha != 1))
    sums = per_output * product.batch * product.m * product.n
    copies = beta != 0 and out.storage != added.storage and not _adds_where_it_lies(call, product)
    whole = make_contraction(
        call,
        [product],
        extra=((ELEMENTWISE, sums + more_flops),),
        read=((out, *operands) if copies else None) if beta != 0 else operands,
        transcendentals=transcendentals,
    )
    return (make_cost(call, MOVEMENT, read=(added,), written=(out,)), whole) if copies else (whole,)


def _adds_where_it_lies(call: Call, product: Matmul) -> bool:
    """Whether the kernel of the product reads the addend itself. Else torch copies the addend into the result first, to
    which cuBLAS adds (aten/src/ATen/native: `isInputCompliesAddmmCudaLt` in cuda/Blas.cpp, `common_checks_baddbmm_bmm`
    in LinearAlgebra.cpp). From torch 2.15 on a matrix is no longer copied (`c_ptr` in ATen/cuda/CUDABlas.h)."""
    added, packet = call.inputs[0], call.func.overloadpacket
    if packet in (aten.addr, aten.addr_):  # element by element
        return True
    if packet not in (aten.addmm, aten._addmm_activation) or _is_complex(call) or not added.is_floating:
        return False
    if min(product.m, product.n, product.k) == 1 or added.stride[-1:] != (1,):
        return False
    if len(added.shape) == 1:
        return added.shape[0] == product.n and call.argument("beta") == 1
    return added.shape == (product.m, product.n) and running_version() >= (2, 15)


def _is_complex(call: Call) -> bool:
    return call.inputs[0].dtype.is_complex


def _product(a: TensorSpec, b: TensorSpec) -> Matmul:
    *batch, m, k = a.shape
    return Matmul(prod(batch), m, b.shape[-1], k)
