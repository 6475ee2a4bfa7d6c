"""torch.autocast("cuda") for meta tensors.

Works around: meta tensors have no autocast key, and torch turns autocast("cuda") off where there is no CUDA.
Until: core has casting kernels for meta, or tensors without memory can call their device cuda.

For tensors on CUDA torch has casting kernels at the key AutocastCUDA. Here the same kernels are registered in Python at
an autocast key that torch leaves empty, and calls go through that key while autocast("cuda") is on in their thread. The
lists are those of ATen/autocast_mode.h; an op of a list counts only if the running build of torch autocasts it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.library import Library

from flopmeter.as_cuda import amp_wishes
from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names import dispatcher, private
from flopmeter.torch_names.around import around

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
""")
"""Run in autocast's dtype."""

FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
"""Run in fp32. (The last one since torch 2.14, outside of the header's lists; the CPU's autocast has it here too.)"""

FP32_SET_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Get dtype=torch.float32 if the caller passed no dtype."""

FP32_APPEND_DTYPE: Mapping[str, str] = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Replaced by the overload that takes a dtype."""

PROMOTE = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Run in the widest dtype of their inputs."""

BANNED = frozenset({"binary_cross_entropy"})
"""Refused."""

BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Many models use a sigmoid "
    "layer right before the binary cross entropy layer. In this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss. "
    "binary_cross_entropy_with_logits and BCEWithLogits are safe to autocast."
)
"""Torch's own words."""


def autocast_ops() -> tuple[str, ...]:
    """The ops of the lists that this build autocasts on CUDA."""
    listed = (*LOWER_PRECISION, *FP32, *FP32_SET_DTYPE, *FP32_APPEND_DTYPE, *PROMOTE, *BANNED)
    present = (
        name for name in listed if dispatcher.overload(name) and dispatcher.overload(FP32_APPEND_DTYPE.get(name, name))
    )
    return tuple(name for name in present if private.has_kernel(f"aten::{name}", "AutocastCUDA"))


_autocast_ops = functools.cache(autocast_ops)


def install(scope: Emulation) -> None:
    """Make torch.autocast("cuda"), and custom_fwd and GradScaler with it, act on meta tensors."""
    cache = WeightCache()
    _follow_torchs_switches(scope, cache)
    _treat_meta_as_cuda(scope)
    _let_higher_order_ops_through(scope)
    amp_wishes.grant(scope)


def _register_kernels(scope: Emulation, cache: WeightCache) -> None:
    for name in _autocast_ops():
        op = dispatcher.overload(name)
        assert op is not None
        scope.kernel(f"aten::{name}", _kernel(op, name, cache), dispatcher.spare_autocast_key())
    if dispatcher.overload("_cudnn_rnn") is not None:
        scope.kernel("aten::_cudnn_rnn", _rnn_kernel(cache), dispatcher.spare_autocast_key())


class _SpareKey:
    """The spare autocast key. It is on in each thread in which autocast("cuda") is on; a fallback lets all other ops
    pass.

    If a thread is still in autocast when the emulation closes, its key stays on, since only the thread itself can
    switch it off. Then the fallback stays registered, so that the key does nothing.
    """

    fallback: ClassVar[Library | None] = None

    def __init__(self) -> None:
        self._threads_on: set[int] = set()

    def switch(self, on: bool) -> None:
        if on and _SpareKey.fallback is None:
            _SpareKey.fallback = dispatcher.fall_through(dispatcher.spare_autocast_key())
        dispatcher.switch_spare_autocast_key(on)
        (self._threads_on.add if on else self._threads_on.discard)(threading.get_ident())

    def close(self) -> None:
        self.switch(False)
        if not self._threads_on and _SpareKey.fallback is not None:
            _SpareKey.fallback._destroy()
            _SpareKey.fallback = None


def _follow_torchs_switches(scope: Emulation, cache: WeightCache) -> None:
    """Python code sets autocast's state through these functions, each thread its own state.

    The kernels are registered when autocast is first turned on, because that takes longer than all else that opening
    an emulation does.
    """
    set_enabled, clear_cache, key = torch.set_autocast_enabled, torch.clear_autocast_cache, _SpareKey()
    scope.on_close(key.close)
    register, lock = functools.cache(functools.partial(_register_kernels, scope, cache)), threading.Lock()

    def follow() -> None:
        on = torch.is_autocast_enabled("cuda")
        with lock:
            if on:
                register()
            key.switch(on)

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        follow()

    def clear_autocast_cache() -> None:
        clear_cache()
        cache.clear()

    scope.patch(torch, "set_autocast_enabled", set_autocast_enabled)
    scope.patch(torch, "clear_autocast_cache", clear_autocast_cache)
    follow()


def _treat_meta_as_cuda(scope: Emulation) -> None:
    """Answer checks for a CUDA device with yes; "meta" counts as "cuda" in `autocast(x.device.type)` and custom_fwd."""
    scope.patch_private(private.NO_AMP, lambda: False)
    has_bf16 = scope.target.compute_capability >= (8, 0)
    scope.patch(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or bool(including_emulation))
    cast = private.CUSTOM_FWD_CAST.value

    def cast_for_custom_fwd(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        is_ours = device_type == "cuda" and is_eligible(value)
        return value.to(dtype) if is_ours else cast(value, device_type, dtype)

    scope.patch_private(private.CUSTOM_FWD_CAST, cast_for_custom_fwd)
    autocast = torch.amp.autocast_mode.autocast
    scope.patch(autocast, "__init__", _on_cuda(1, autocast.__init__))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        scope.patch(torch, name, _on_cuda(0, getattr(torch, name)))


def _let_higher_order_ops_through(scope: Emulation) -> None:
    """The key of CUDA's autocast falls through for them. For an op that has a kernel there, the emulation does itself
    what that kernel does (flex_attention.py)."""
    spare, keys = private.SPARE_AUTOCAST_KEY.value, private.HIGHER_ORDER_FALLTHROUGH.value
    keys.append(spare)
    scope.on_close(keys.remove, spare)
    for operator in private.HIGHER_ORDER_OPERATORS.value.values():
        operator.fallthrough(spare)
        scope.on_close(_stop_at, operator, spare)


def _stop_at(operator: HigherOrderOperator, key: Any) -> None:
    operator.non_fallthrough_keys = operator.non_fallthrough_keys.add(key)


@around
def _on_cuda(position: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """ "meta" as the argument at `position` becomes "cuda"."""
    if len(args) > position and args[position] == "meta":
        args = (*args[:position], "cuda", *args[position + 1 :])
    elif kwargs.get("device_type") == "meta":
        kwargs["device_type"] = "cuda"
    return function(*args, **kwargs)


# --- casting -------------------------------------------------------------------------------------------------------


class WeightCache:
    """Lower-precision copies of fp32 leaves, kept until the outermost autocast ends, so that a weight is cast once.

    All threads share it, like torch's cache. The leaf is kept alive with its copy, so that no other tensor gets its id.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._lock = threading.Lock()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """cached_cast in aten/src/ATen/autocast_mode.cpp."""
        if not self._keeps(tensor, dtype):
            return tensor.to(dtype)
        with self._lock:
            _, copy = self._copies.get(id(tensor), (tensor, None))
        if copy is None or copy.dtype != dtype:
            copy = tensor.to(dtype)
            with self._lock:
                self._copies[id(tensor)] = tensor, copy
        return copy

    def clear(self) -> None:
        with self._lock:
            self._copies.clear()

    @staticmethod
    def _keeps(tensor: Tensor, dtype: torch.dtype) -> bool:
        return (
            tensor.requires_grad
            and tensor.is_leaf
            and tensor.dtype == torch.float32
            and dtype == torch.get_autocast_dtype("cuda")
            and not tensor._is_view()
            and not dispatcher.is_traced(tensor)
            and torch.is_autocast_cache_enabled()
        )


class _TracedCast(threading.local):
    is_on = False


_traced = _TracedCast()


@contextmanager
def traced_tensors_cast(cast: bool) -> Iterator[None]:
    """Whether autocast acts on FakeTensors, in this thread. Those with which Dynamo finds out types have to have the
    types of CUDA; those of another mode are left as they are."""
    before, _traced.is_on = _traced.is_on, cast
    try:
        yield
    finally:
        _traced.is_on = before


def is_eligible(value: Any) -> bool:
    """Whether the tensor is of floating point, not fp64, and one that the emulation may touch."""
    is_ours = dispatcher.is_emulated(value) or (_traced.is_on and dispatcher.is_traced(value))
    return is_ours and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype, cache: WeightCache) -> Any:
    """An argument with its eligible tensors in `dtype`: a tensor, a list of them, or anything else."""
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(each, dtype, cache) for each in value])
    if is_eligible(value) and value.dtype != dtype:
        return cache.cast(value, dtype)
    return value


# --- the policies: what a kernel does with its arguments before it runs its op -------------------------------------

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _kernel(op: OpOverload, name: str, cache: WeightCache) -> DispatcherKernel:
    policy = _policy(op, name, cache)
    target = dispatcher.overload(FP32_APPEND_DTYPE[name]) if name in FP32_APPEND_DTYPE else op
    assert target is not None

    def autocast_kernel(*args: Any, **kwargs: Any) -> Any:
        with dispatcher.without_spare_autocast_key():
            if not torch.is_autocast_enabled("cuda") or not any(map(is_eligible, tensors_in((args, kwargs)))):
                return op(*args, **kwargs)
            args, kwargs = policy(args, kwargs)
            return target(*args, **kwargs)

    return autocast_kernel


def _policy(op: OpOverload, name: str, cache: WeightCache) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    if name in BANNED:
        return _refuse
    if name in FP32_SET_DTYPE:
        return functools.partial(_set_dtype, dispatcher.schema_arguments(op).index("dtype"))
    if name in FP32_APPEND_DTYPE:
        return _append_dtype
    dtype_of = {**dict.fromkeys(FP32, lambda _: torch.float32), **dict.fromkeys(PROMOTE, _widest)}.get(
        name, _lower_precision
    )

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        dtype = dtype_of((args, kwargs))
        # Last argument first: the order in which torch's compiled kernels evaluate theirs.
        cast_kwargs = {name: _cast(kwargs[name], dtype, cache) for name in reversed(kwargs)}
        cast_args = [_cast(value, dtype, cache) for value in reversed(args)]
        return tuple(reversed(cast_args)), cast_kwargs

    return cast


def _lower_precision(values: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _widest(values: Any) -> torch.dtype:
    """fp32 if any input is fp32. Dtypes other than fp32 and autocast's are an error, as in at::autocast::prioritize."""
    dtypes = {tensor.dtype for tensor in tensors_in(values) if is_eligible(tensor)}
    lower = _lower_precision(values)
    if torch.float32 in dtypes:
        return torch.float32
    if dtypes - {lower}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def _set_dtype(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if len(args) > position:
        dtype = torch.float32 if args[position] is None else args[position]
        return (*args[:position], dtype, *args[position + 1 :]), kwargs
    if kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _append_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    defaults = (2,) if len(args) == 1 else (False,) if len(args) == 3 else ()  # p of norm.Scalar, keepdim of the other
    return (*args, *defaults), {**kwargs, "dtype": torch.float32 if is_eligible(args[0]) else args[0].dtype}


def _refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    raise RuntimeError(BANNED_MESSAGE)


# --- cuDNN RNN -----------------------------------------------------------------------------------------------------

RNN_DTYPE = torch.float16
"""The RNN wrapper casts to fp16 whatever autocast's dtype is (_cudnn_rnn_cast_reflatten in autocast_mode's RNN.cpp)."""


def _rnn_kernel(cache: WeightCache) -> DispatcherKernel:
    """Copies the weights into one fp16 buffer, on every call, and casts input and states."""

    def cudnn_rnn(
        tensor: Tensor,
        weight: Sequence[Tensor],
        weight_stride0: int,
        weight_buf: Tensor | None,
        hx: Tensor,
        cx: Tensor | None,
        *rest: Any,
    ) -> Any:
        with dispatcher.without_spare_autocast_key():
            if torch.is_autocast_enabled("cuda") and is_eligible(weight[0]):
                if weight[0].dtype != RNN_DTYPE:
                    weight_buf, weight = _flat_copies(weight)
                cx, hx, tensor = (_cast(value, RNN_DTYPE, cache) for value in (cx, hx, tensor))
            return aten._cudnn_rnn(tensor, weight, weight_stride0, weight_buf, hx, cx, *rest)

    return cudnn_rnn


def _flat_copies(weight: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """An fp16 buffer and, for each weight, a view of its slice holding a copy, differentiable."""
    total = sum(each.numel() for each in weight)
    buffer = torch.zeros(total, dtype=RNN_DTYPE, device=weight[0].device)
    copies, start = [], 0
    for each in weight:
        # detach: views of one base with in-place copies would chain the gradients of all weights.
        view = torch.empty(0, dtype=RNN_DTYPE, device=each.device)
        row_major = [math.prod(each.shape[axis + 1 :]) for axis in range(each.dim())]
        view.set_(buffer.untyped_storage(), start, each.shape, row_major)
        copies.append(view.copy_(each))
        start += each.numel()
    return buffer, copies
