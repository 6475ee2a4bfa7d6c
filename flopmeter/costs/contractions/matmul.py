"""Matmuls: 2·M·N·K each."""

from __future__ import annotations

from math import prod

from flopmeter.costs.rules import (
    COMPLEX_ADD,
    COMPLEX_MULTIPLY,
    in_one_piece,
    is_complex,
    make_contraction,
    make_cost,
    rule,
    scratch,
    zeros,
)
from flopmeter.records import ELEMENTWISE, MOVEMENT, Call, Cost, Matmul, Region, TensorSpec
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten


@rule(aten.mm, aten._int_mm, aten.bmm)
def mm(call: Call) -> Cost:
    """[m, k] @ [k, n]; `bmm` has a batch of them."""
    return make_contraction(call, [_product(*call.inputs)])


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
    (aten/src/ATen/native/LinearAlgebra.cpp)."""
    (_, a, b), (out,) = call.inputs, call.outputs
    batch, m, k = a.shape
    product = Matmul(1, m, b.shape[-1], k)
    *copy, scaled = _scaled_sum(call, product)
    return *copy, *(
        make_contraction(
            call,
            [product],
            extra=scaled.flops_by_class[1:] if number == 0 else (),
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
def trilinear(call: Call) -> tuple[Cost, ...]:
    """Bilinear layers: three tensors, each broadcast over its `expand` dimensions, are multiplied and summed. For each
    place along one dimension (`unroll_dim`) a kernel multiplies the first two, over the dimensions that the third
    lacks, another their result and the third, and one adds this to zeros (aten/src/ATen/native/Linear.cpp)."""
    (out,), unrolled, summed = call.outputs, call.argument("unroll_dim"), set(call.argument("sumdim"))
    whole = [_unsqueezed(spec.shape, call.argument(f"expand{i}")) for i, spec in enumerate(call.inputs, 1)]
    steps = max(shape[unrolled] for shape in whole)
    shapes = [(*shape[:unrolled], 1, *shape[unrolled + 1 :]) for shape in whole]
    parts = [Region(spec, prod(shape) * spec.dtype.itemsize) for spec, shape in zip(call.inputs, shapes, strict=True)]
    early = {dim for dim in summed if dim in call.argument("expand3")}
    first, pair = _product_of_pair(shapes[0], shapes[1], early)
    second, last = _product_of_pair(pair, shapes[2], summed - early)
    made, term = in_one_piece(scratch(out, 1), (prod(pair),)), in_one_piece(scratch(out, 2), (prod(last),))
    written = Region(out, term.nbytes)
    step = (
        make_contraction(call, [first], read=parts[:2], written=(made,)),
        make_contraction(call, [second], read=(made, parts[2]), written=(term,)),
        make_cost(call, ELEMENTWISE, term.numel, read=(term, written), written=(written,), complex_factor=COMPLEX_ADD),
    )
    return zeros(call, out), *step * steps


def _product_of_pair(a: tuple[int, ...], b: tuple[int, ...], summed: set[int]) -> tuple[Matmul, tuple[int, ...]]:
    """The batched matmul of two tensors that are broadcast to one another and summed, and the shape of its result."""
    sizes = {"batch": 1, "rows": 1, "columns": 1, "depth": 1}
    for dim, (left, right) in enumerate(zip(a, b, strict=True)):
        kind = "depth" if dim in summed else "columns" if left == 1 else "rows" if right == 1 else "batch"
        sizes[kind] *= max(left, right)
    shape = tuple(1 if dim in summed else max(pair) for dim, pair in enumerate(zip(a, b, strict=True)))
    return Matmul(sizes["batch"], sizes["rows"], sizes["columns"], sizes["depth"]), shape


@rule(aten.conv_tbc)
def conv_tbc(call: Call) -> tuple[Cost, ...]:
    """x [T, B, C_in], filters [kernel, C_in, C_out]: a copy of the bias, to which each tap's product is added, of the
    rows where it does not meet the padding (aten/src/ATen/native/ConvolutionTBC.cpp)."""
    (x, weight, bias), (out,) = call.inputs, call.outputs
    pad, batch = call.argument("pad"), x.shape[1]
    kernel, c_in, c_out = weight.shape
    costs = [make_cost(call, MOVEMENT, read=(bias,))]
    for tap in range(kernel):
        steps = min(x.shape[0] + pad - tap, out.shape[0]) - max(0, pad - tap)
        if steps > 0:
            rows, item = steps * batch, x.dtype.itemsize
            of_x, of_weight, of_out = (
                Region(spec, size * item)
                for spec, size in ((x, rows * c_in), (weight, c_in * c_out), (out, rows * c_out))
            )
            product, added = Matmul(1, rows, c_out, c_in), ((ELEMENTWISE, rows * c_out),)
            costs.append(
                make_contraction(call, [product], extra=added, read=(of_x, of_weight, of_out), written=(of_out,))
            )
    return tuple(costs)


def _unsqueezed(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for dim in dims:
        sizes.insert(dim, 1)
    return tuple(sizes)


def _scaled_sum(call: Call, product: Matmul, *, more_flops: int = 0, transcendentals: int = 0) -> tuple[Cost, ...]:
    """The matmul and beta·input + alpha·matmul. With beta 0 the input is not read."""
    (added, *operands), (out,) = call.inputs[:3], call.outputs
    beta, alpha = call.argument("beta"), call.argument("alpha")
    add, multiply = (COMPLEX_ADD, COMPLEX_MULTIPLY) if is_complex(call) else (1, 1)
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
    return (make_cost(call, MOVEMENT, read=(added,)), whole) if copies else (whole,)


def _adds_where_it_lies(call: Call, product: Matmul) -> bool:
    """Whether the kernel of the product reads the addend itself. Else torch copies the addend into the result first, to
    which cuBLAS adds (aten/src/ATen/native: `isInputCompliesAddmmCudaLt` in cuda/Blas.cpp, `common_checks_baddbmm_bmm`
    in LinearAlgebra.cpp). From torch 2.15 on a matrix is no longer copied (`c_ptr` in ATen/cuda/CUDABlas.h)."""
    added, packet = call.inputs[0], call.func.overloadpacket
    if packet in (aten.addr, aten.addr_):  # element by element
        return True
    if packet not in (aten.addmm, aten._addmm_activation) or is_complex(call) or not added.is_floating:
        return False
    if min(product.m, product.n, product.k) == 1 or added.stride[-1:] != (1,):
        return False
    if len(added.shape) == 1:
        return added.shape[0] == product.n and call.argument("beta") == 1
    return added.shape == (product.m, product.n) and running_version() >= (2, 15)


def _product(a: TensorSpec, b: TensorSpec) -> Matmul:
    *batch, m, k = a.shape
    return Matmul(prod(batch), m, b.shape[-1], k)
