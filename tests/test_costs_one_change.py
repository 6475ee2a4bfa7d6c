"""More laws in the manner of test_costs_types.py: one respect of a call is changed, in calls with options too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from costs_support import CAST_FIRST, call_by_hand, calls_of, copies_what_has_gaps, costs_in, meta
from test_costs_cases import ALL as CASES
from test_costs_cases import call_of_case
from test_costs_lists import OVERLAPPING
from test_costs_options import ALL, MOVED
from test_costs_types import CALLS as PLAIN_CALLS
from test_costs_types import as_type, is_fresh, moved, with_outputs, with_tensors, work

from flopmeter.costs import costs_of, find_rule
from flopmeter.records import MOVEMENT, Call, TensorSpec

aten = torch.ops.aten
T, BF16, I32, I64 = meta, torch.bfloat16, torch.int32, torch.int64

WITH_OPTIONS = [case if isinstance(case, Call) else calls_of(case)[-1] for case, *_ in (*ALL.values(), *MOVED.values())]
# Of ops that torch's own samples do not reach, or not on meta tensors.
BESIDE: tuple[Callable[[], Any], ...] = (
    lambda: aten._euclidean_dist(T(3, 40, 6), T(3, 30, 6)),
    lambda: aten._weight_norm_interface(T(4, 6), T(4, 1), 0),
    *(
        lambda op=op: op(T(1, 3, 8, 8), [4, 4], False)
        for op in (getattr(aten, "_upsample_lanczos2d_aa", None),)
        if op is not None
    ),
    lambda: aten._standard_gamma(torch.ones(4, 6)),
    lambda: aten.poisson(T(4, 6)),
    lambda: aten._reshape_alias_copy(T(4, 6), [6, 4], [4, 1]),
    lambda: aten.lift_fresh_copy(T(4, 6)),
    lambda: aten.logspace(0, 1, 7, device="meta"),
    lambda: aten.tril_indices(4, 6, device="meta"),
    lambda: aten.nonzero_static(T(4, 6), size=7),
    lambda: aten.masked_select(torch.ones(4, 6), torch.eye(4, 6) > 0),
    lambda: aten.unique_dim(torch.ones(4, 6), 0),
    lambda: aten._unique2(torch.ones(4, 6), True, True, True),
    lambda: aten.unique_consecutive(torch.ones(4, 6)),
    lambda: aten.histogram(torch.ones(4, 6), 10),
    lambda: aten.bincount(torch.ones(24, dtype=I64)),
    *(
        lambda op=op: op(T(4, 6, dtype=I64), T(4, 6, dtype=I64))
        for op in (aten.bitwise_or, aten.bitwise_xor, aten.bitwise_left_shift, aten.bitwise_right_shift_)
    ),
)
CALLS = (
    *PLAIN_CALLS, *WITH_OPTIONS, *map(call_of_case, CASES), *(call for call, _ in OVERLAPPING.values()),
    *(calls_of(program)[-1] for program in BESIDE),
)  # fmt: skip


def broken(law: Callable[[Call], bool | None], least: int) -> set[str]:
    """The ops that break the law, which says something of so many calls at least."""
    verdicts = [(call.name, law(call)) for call in CALLS]
    assert sum(holds is not None for _, holds in verdicts) >= least
    return {name for name, holds in verdicts if holds is False}


# --- the rate of arithmetic, and the way through memory

# What these do beside products of matrices is all multiplies with an addition behind them: sums of products and of
# squares, a scaled addition, and the algorithms of linear algebra.
MULTIPLY_ADDS = {
    "addcdiv", "addcmul", "lerp", "_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd", "_fft_c2c", "_fft_c2r",
    "_fft_r2c", "_weight_norm_interface", "_weight_norm_interface_backward",
}  # fmt: skip
LINEAR_ALGEBRA = {"cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr", "triangular_solve"}
# They are where a factor is given, or for the norm of squares.
SOME_MULTIPLY_ADDS = {"add", "sub", "rsub", "linalg_vector_norm", "norm", "dist", "renorm", "linalg_matrix_exp"}


def test_only_what_multiplies_and_adds_in_one_step_runs_at_the_full_vector_rate():
    found: dict[str, set[bool]] = {}
    for call in CALLS:
        name = call.name.removeprefix("_foreach").strip("_")
        rates = {cost.fused_multiply_add for cost in costs_of(call) if cost.flops > 2 * cost.macs}
        found.setdefault(name, set()).update(rates)
    always = {name for name, rates in found.items() if rates == {True}} - SOME_MULTIPLY_ADDS
    algebra = {name for name, rates in found.items() if rates and name.startswith("linalg_")} - {"linalg_cross"}
    of_this_torch = LINEAR_ALGEBRA - ({"cholesky"} - found.keys())  # 2.15 has none of that name
    expected = {name.strip("_") for name in MULTIPLY_ADDS} | of_this_torch | algebra
    assert always == expected - SOME_MULTIPLY_ADDS
    assert {name for name, rates in found.items() if len(rates) == 2} <= SOME_MULTIPLY_ADDS


# How a kernel walks its memory, where that is not as its class of ops does.
WALKS = {
    "window": {
        "im2col", "col2im", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward", "adaptive_max_pool2d", "adaptive_max_pool3d",
    },
    "gather": {"_unsafe_index", "_unsafe_masked_index", "take"},
    "scatter": {
        "index_add", "scatter_add", "scatter_reduce",
    },
    "stream": {
        "_batch_norm_no_update", "_native_batch_norm_legit_no_training", "batch_norm_elemt",
        "batch_norm_backward_elemt", "_embedding_bag", "_embedding_bag_forward_only",
    },
    "channels": {
        "native_group_norm", "native_group_norm_backward",
    },
    "statistics": {"_batch_norm_with_update", "batch_norm_backward"},
}  # fmt: skip
OF_LISTS = ("_foreach_", "_fused_ad", "_fused_sgd", "_amp_foreach_")  # whose blocks walk chunks
# Whole rows that are looked up are not walked as single elements are. Copies do where the order changes; a batch norm
# has statistics to take in training alone. What sorts has kernels of several sorts, most of which walk in order.
WALKS_IN_SEVERAL_WAYS = {
    "embedding", "gather", "index", "index_select",
    "sort", "topk", "_unique", "_unique2", "randperm", "embedding_dense_backward", "_embedding_bag_backward",
    "_embedding_bag_dense_backward", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "clone", "copy", "copy_", "cumprod", "cudnn_batch_norm", "cudnn_batch_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "_native_batch_norm_legit",
}  # fmt: skip


def test_windows_gathers_scatters_and_channels_are_walked_as_such_and_all_else_in_order():
    ways = {name: way for way, names in WALKS.items() for name in names}

    def law(call: Call) -> bool | None:
        name = call.name if call.name in ways else call.name.removesuffix("_")
        if call.name in WALKS_IN_SEVERAL_WAYS:
            return None
        way = "chunks" if name.startswith(OF_LISTS) else ways.get(name)
        return {cost.access for cost in costs_of(call) if cost.access} <= {way} and (
            name not in ways or any(cost.access for cost in costs_of(call))
        )

    assert broken(law, least=900) == set()


# --- strides


def all_equal(spec: TensorSpec) -> TensorSpec:
    """Every element in one place, as after `expand`."""
    return spec._replace(stride=(0,) * len(spec.shape))


def test_work_goes_by_the_shapes_of_tensors_and_not_by_how_many_numbers_lie_behind_them():
    """Ops that copy such operands are left out; a grouped product looks how they lie."""

    def law(call: Call) -> bool | None:
        if copies_what_has_gaps(call.name) or "grouped" in call.name:
            return None
        return list(map(work, costs_of(call))) == list(map(work, costs_of(with_tensors(call, all_equal))))

    assert broken(law, least=750) == set()


GATHERS = {"embedding", "index_select", "gather", "take", "index", "_unsafe_index", "_unsafe_masked_index"}


def test_how_a_result_lies_does_not_change_the_work_and_not_what_a_gather_reads():
    def law(call: Call) -> bool | None:
        if not is_fresh(call) or copies_what_has_gaps(call.name) or "grouped" in call.name:
            return None
        plain, spread = costs_of(call), costs_of(with_outputs(call, all_equal))
        read = [[cost.bytes_read for cost in costs] for costs in (plain, spread)]
        return list(map(work, plain)) == list(map(work, spread)) and (call.name not in GATHERS or read[0] == read[1])

    assert broken(law, least=600) == set()


# --- types

# A result of these has the type of their first operand, or is a table of gradients in the type of the incoming one.
OF_THE_TYPE_OF_AN_OPERAND = {
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "masked_scatter", "put", "scatter",
    "scatter_add", "scatter_reduce", "_unsafe_masked_index_put_accumulate", "embedding_dense_backward",
    "nll_loss_backward", "nll_loss2d_backward",
}  # fmt: skip


def test_a_wider_operand_is_the_same_work_as_much_to_write_and_at_most_its_own_bytes_more_to_read():
    def law(call: Call) -> bool | None:
        if not is_fresh(call) or call.name in OF_THE_TYPE_OF_AN_OPERAND | CAST_FIRST:
            return None
        if len(plain := costs_of(call)) != 1:
            return None
        for each in call.inputs:
            if each.dtype is not torch.float32 or each in call.outputs:
                continue
            wider = with_tensors(call, lambda s, each=each: s._replace(dtype=torch.float64) if s == each else s)
            if len(costs := costs_of(wider)) != 1:  # a `cat` of several types copies one input after another
                continue
            (before,), (after,) = plain, costs
            more = after.bytes_read - before.bytes_read
            if work(before) != work(after) or before.bytes_written != after.bytes_written:
                return False
            if not 0 <= more <= each.nbytes:
                return False
        return True

    assert broken(law, least=600) == set()


READ_IN_FULL = {
    "add", "mul", "mm", "bmm", "addmm", "softmax", "_softmax", "native_layer_norm", "native_group_norm",
    "cat", "stack", "roll", "flip", "repeat", "sort", "topk", "where", "addcmul", "lerp", "linalg_qr", "_linalg_svd",
    "linalg_lu_factor_ex", "linalg_solve_triangular", "_cdist_forward", "dist", "var",
    "native_batch_norm", "native_batch_norm_backward", "native_layer_norm_backward", "_softmax_backward_data",
    "linalg_vector_norm", "renorm", "polar", "_fused_rms_norm",
    "ormqr", "linalg_householder_product", "cholesky_solve", "linalg_lstsq", "_trilinear",
}  # fmt: skip


def test_what_an_op_reads_in_full_counts_by_its_own_width():
    def law(call: Call) -> bool | None:
        if call.name not in READ_IN_FULL or call.kwargs.get("beta") == 0 or not is_fresh(call):
            return None
        if len(plain := costs_of(call)) != 1:
            return None
        floats = [each for each in dict.fromkeys(call.inputs) if each.dtype is torch.float32]
        wide = [
            costs_of(with_tensors(call, lambda s, each=each: s._replace(dtype=torch.float64) if s == each else s))
            for each in floats
        ]
        more = [sum(cost.bytes_read for cost in costs) - plain[0].bytes_read for costs in wide]
        return more == [each.nbytes for each in floats]

    assert broken(law, least=60) == set()


# Real operations for one on real numbers: a + b has two parts, a·b is four products and two sums, and so on.
OF_COMPLEX: dict[float, set[str]] = {
    1: {"polar", "linalg_eig", "_fft_r2c"},  # complex already
    2: {
        "add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "_foreach_add", "_foreach_neg", "sum", "nansum", "mean",
        "cumsum", "cumsum_", "trace", "index_add", "index_add_", "scatter_add", "put", "index_put", "_index_put_impl_",
        "_unsafe_masked_index_put_accumulate", "reflection_pad1d_backward", "replication_pad1d_backward",
        "replication_pad2d_backward", "upsample_nearest1d_backward", "_upsample_nearest_exact1d_backward",
        "col2im", "unfold_backward",
    },
    6: {"mul", "mul_", "_foreach_mul_", "prod", "cumprod", "cumprod_"},
    10 / 3: {"lerp", "lerp_", "_foreach_lerp_"},
    11: {"reciprocal", "reciprocal_", "_foreach_div", "_foreach_reciprocal"},
    4: {  # products, factorizations and functions
        "mm", "bmm", "mv", "dot", "vdot", "_foreach_mm", "convolution", "convolution_backward", "exp", "log",
        "sin", "cos", "tan",
        "sqrt", "rsqrt", "tanh", "sigmoid", "sigmoid_backward", "tanh_backward", "silu", "logsumexp", "var", "std",
        "_softmax", "linalg_cholesky_ex", "linalg_lu_factor_ex", "linalg_qr", "linalg_inv_ex", "_linalg_svd",
        "_linalg_eigh", "_linalg_eigvals", "_linalg_det", "_linalg_solve_ex", "linalg_lu_solve", "linalg_ldl_solve",
        "linalg_solve_triangular", "linalg_lstsq", "linalg_householder_product", "ormqr", "linalg_matrix_exp", "geqrf",
        "_foreach_sigmoid", "_adaptive_avg_pool2d", "avg_pool2d", "_cdist_forward", "acos", "atan",
        "_fused_adam_",
        "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_linalg_slogdet", "linalg_pinv", "triangular_solve",
    },
}  # fmt: skip


def test_complex_numbers_take_as_many_real_operations_as_the_convention_says():
    factors = {name: factor for factor, names in OF_COMPLEX.items() for name in names}

    def law(call: Call) -> bool | None:
        factor = factors.get(call.name)
        if factor is None or all(spec.dtype is not torch.float32 for spec in (*call.inputs, *call.outputs)):
            return None
        if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("rounding_mode") is not None:
            return None
        real, of_complex = costs_of(call), costs_of(with_tensors(call, as_type({torch.float32: torch.complex64})))
        bias = sum(cost.flops - 2 * cost.macs for cost in real if cost.macs)  # added, or summed, beside a product
        if bias:
            return None
        return sum(cost.flops for cost in of_complex) == pytest.approx(factor * sum(cost.flops for cost in real))

    assert broken(law, least=100) == set()


NAMES_OF_TYPES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.parametrize("dtype", NAMES_OF_TYPES, ids=str)
def test_an_op_computes_in_the_type_of_its_operands_also_where_its_result_is_wider(dtype):
    def law(call: Call) -> bool | None:
        if not any(spec.dtype is torch.float32 for spec in call.inputs) or not is_fresh(call):
            return None
        if call.name in CAST_FIRST or {spec.dtype for spec in call.inputs} - {
            torch.float32,
            torch.int64,
            torch.int32,
            torch.bool,
        }:
            return None
        narrow = with_tensors(call, as_type({torch.float32: dtype}))
        wide = with_outputs(narrow, as_type({dtype: torch.float32}))
        return {cost.dtype for cost in costs_of(wide)} == {NAMES_OF_TYPES[dtype]}

    assert broken(law, least=500) == set()


# --- in place


def in_place(call: Call) -> Call | None:
    """The same call of the form that writes over its first operand."""
    packet = getattr(aten, f"{call.name}_", None) if call.func.namespace == "aten" else None
    func = getattr(packet, call.func._overloadname, None)
    if func is None or not call.inputs or len(call.outputs) != 1:
        return None
    names, own = ([each.name for each in each_func._schema.arguments] for each_func in (func, call.func))
    written = call.outputs[0]._replace(storage=call.inputs[0].storage)
    return replace(call, func=func, outputs=(written,)) if names == own else None


def test_an_op_in_place_is_the_same_work_as_its_functional_form():
    """Or a copy, and then the form in place; mvlgamma in place copies its result."""

    def law(call: Call) -> bool | None:
        twin = in_place(call)
        if twin is None:
            return None
        if find_rule(twin) is None:
            return False
        of_twin, costs = costs_of(twin), costs_of(call)
        if len(of_twin) > len(costs) and of_twin[-1].op_class == MOVEMENT:
            of_twin = of_twin[:-1]
        first, rest = costs[: len(costs) - len(of_twin)], costs[len(costs) - len(of_twin) :]
        copies = [cost.op_class for cost in first] in ([], [MOVEMENT])
        return copies and [work(cost)[1:] for cost in rest] == [work(cost)[1:] for cost in of_twin]

    assert broken(law, least=120) == set()


# --- into given tensors


def into_given(call: Call) -> Call | None:
    """The same call of the form that writes its results into tensors given as `out=`."""
    wanted = [(each.name, str(each.type)) for each in call.func._schema.arguments]
    for func in map(functools.partial(getattr, call.func.overloadpacket), call.func.overloadpacket.overloads()):
        given = [each.name for each in func._schema.arguments if each.is_out]
        asked = [(each.name, str(each.type)) for each in func._schema.arguments if not each.is_out]
        if given and asked == wanted and len(given) == len(call.outputs):
            kwargs = {**call.kwargs, **dict(zip(given, call.outputs, strict=True))}
            return replace(call, func=func, kwargs=kwargs, inputs=(*call.inputs, *call.outputs))
    return None


def test_an_op_that_writes_into_given_tensors_costs_what_the_one_that_returns_new_ones_does():
    def law(call: Call) -> bool | None:
        twin = into_given(call) if is_fresh(call) else None
        if twin is None:
            return None
        plain, given = ([(work(cost), *moved(cost)) for cost in costs_of(each)] for each in (call, twin))
        return plain == given

    assert broken(law, least=600) == set()


X, TABLE = meta(8, 8), meta(3, dtype=torch.int64)
GIVEN: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "tril": (lambda **out: torch.tril(X, **out), (8, 8)),
    "softmax": (lambda **out: torch.softmax(X, 1, **out), (8, 8)),
    "log_softmax": (lambda **out: torch.log_softmax(X, 1, **out), (8, 8)),
    "logsumexp": (lambda **out: torch.logsumexp(X, 1, **out), (8,)),
    "index_select": (lambda **out: torch.index_select(X, 0, TABLE, **out), (3, 8)),
    "vector_norm": (lambda **out: torch.linalg.vector_norm(X, dim=1, **out), (8,)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_program_that_gives_a_tensor_for_the_result_computes_and_moves_what_it_did_without(name):
    program, shape = GIVEN[name]
    plain, given = costs_in(program), costs_in(lambda: program(out=meta(*shape)))
    assert [(cost.op_class, cost.flops, *moved(cost)) for cost in plain] == [
        (cost.op_class, cost.flops, *moved(cost)) for cost in given
    ]


def test_a_result_may_go_into_an_operand_which_is_then_read_and_written():
    (lower,) = costs_in(lambda: torch.tril(X, out=X))
    assert moved(lower) == (4 * 36, 4 * 64)  # the half that is kept, with its diagonal; all of it is written
    (product,) = costs_in(lambda: torch.mul(X, X[0], out=X))
    assert moved(product) == (4 * 64, 4 * 64)
    assert {region.spec.storage for region in (*product.reads, *product.writes) if region.nbytes} == {0}


# --- packed sequences: five tokens in sequences of at most 2 queries, and at most 7 keys: three of them


def packed(func: Any, gives: tuple[str, ...], **named: Any) -> Call:
    """A call with its arguments by name; one that is not given here is None or its default."""
    schema = func.default._schema.arguments
    q, k = meta(5, 4, 8, dtype=BF16), meta(21, 4, 8, dtype=BF16)
    if "efficient" in func.__name__:
        q, k = q.unsqueeze(0), k.unsqueeze(0)
    tensors = {"query": q, "key": k, "value": k, "grad_out": q, "grad_out_": q, "out": q, "logsumexp": T(4, 5)}
    given = {each.name: tensors[each.name] for each in schema if each.name in tensors} | named
    outputs = tuple(tensors[name].clone() for name in gives)
    return call_by_hand(func.default, (), outputs, **given)


STARTS = meta(4, dtype=I32)
IN_LIBRARY = {"cum_seq_q": STARTS, "cum_seq_k": STARTS, "max_q": 2, "max_k": 7, "is_causal": False}
PACKED: dict[str, tuple[Call, int]] = {
    "flash": (packed(aten._flash_attention_forward, ("query", "logsumexp"), **IN_LIBRARY), 2),
    "flash, backward": (packed(aten._flash_attention_backward, ("query", "key", "key"), **IN_LIBRARY), 5),
    "efficient": (
        packed(
            aten._efficient_attention_forward, ("query", "logsumexp"), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS,
            max_seqlen_q=2, max_seqlen_k=7, custom_mask_type=0,
        ),
        2,
    ),
    "efficient, backward": (
        packed(
            aten._efficient_attention_backward, ("query", "key", "key"), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS,
            max_seqlen_q=2, max_seqlen_k=7, custom_mask_type=0,
        ),
        5,
    ),
}  # fmt: skip
for name in ("_cudnn_attention_forward", "_cudnn_attention_backward"):
    if hasattr(aten, name):
        backward = name.endswith("backward")
        gives = ("query", "key", "key") if backward else ("query", "logsumexp")
        PACKED[f"cudnn{', backward' * backward}"] = (
            packed(getattr(aten, name), gives, **IN_LIBRARY),
            5 if backward else 2,
        )


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_as_many_as_the_longest_of_the_queries_allows_each_against_the_longest_of_the_keys(name):
    call, products = PACKED[name]
    (cost,) = costs_of(call)
    assert cost.macs == products * 3 * 4 * 2 * 7 * 8  # of 3 sequences, 4 heads, 2 queries, 7 keys, depth 8
    assert cost.recomputed_flops == (2 * 3 * 4 * 2 * 7 * 8 if products == 5 else 0)
    assert cost.work.backend == name.partition(",")[0]
