"""What the emulation tells torch's dispatcher and asks of it, and the operators that it calls or overrides.

`missing(FEATURE)` says what this torch lacks of what a feature needs; the context then leaves the feature out and says
so. Operators are private too if their name starts with an underscore; `OPERATORS` holds the arguments that the kernels
are written for.

Read from torch 2.13 to 2.15. The tests pass on 2.11 to 2.15; the recorded streams are those of 2.13 and 2.15.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library, fallthrough_kernel
from torch.nn.attention import SDPBackend

from flopmeter.torch_names import private

COMPARED_VERSIONS = ((2, 13), (2, 15))
"""The releases whose streams the tests hold recordings of."""
SUPPORTED_VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
"""The releases on which the tests pass. Others run too, with a warning."""

OPERATORS: dict[str, dict[str, str]] = {
    private.ATTENTION: {
        "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
        "_scaled_dot_product_efficient_attention": (
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
        ),
        "_scaled_dot_product_cudnn_attention": (
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
        ),
    },
    private.COMPOSITES: {
        "_softmax": "self dim half_to_float",
        "_log_softmax": "self dim half_to_float",
        "_fused_rms_norm": "input normalized_shape weight eps",
    },
    private.SPARSE: {
        "_coalesce": "self",
        "copy_sparse_to_sparse_": "self src non_blocking",
        "_sparse_coo_tensor_with_dims_and_tensors": (
            "sparse_dim dense_dim size indices values dtype layout device pin_memory is_coalesced"
        ),
    },
    private.CTC_LOSS: {
        "_ctc_loss_backward": (
            "grad log_probs targets input_lengths target_lengths neg_log_likelihood log_alpha blank zero_infinity"
        )
    },
    private.RNN: {
        "_cudnn_rnn": (
            "input weight weight_stride0 weight_buf hx cx mode hidden_size proj_size num_layers batch_first "
            "dropout train bidirectional batch_sizes dropout_state"
        ),
        "_cudnn_rnn_backward": (
            "input weight weight_stride0 weight_buf hx cx output grad_output grad_hy grad_cy mode hidden_size "
            "proj_size num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve "
            "output_mask"
        ),
        "_thnn_fused_lstm_cell": "input_gates hidden_gates cx input_bias hidden_bias",
        "_thnn_fused_gru_cell": "input_gates hidden_gates hx input_bias hidden_bias",
        "_thnn_fused_gru_cell_backward": "grad_hy workspace has_bias",
    },
    private.FOREACH: {
        "_fused_sgd_": (
            "self grads momentum_buffer_list weight_decay momentum lr dampening nesterov maximize is_first_step "
            "grad_scale found_inf"
        ),
        "_fused_adagrad_": (
            "self grads state_sums state_steps lr lr_decay weight_decay eps maximize grad_scale found_inf"
        ),
    },
    private.MHA_FAST_PATH: {
        "_nested_tensor_from_mask_left_aligned": "t mask",
        "_transformer_encoder_layer_fwd": (
            "src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first eps "
            "norm_weight_1 norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 ffn_weight_2 ffn_bias_2 "
            "mask mask_type"
        ),
    },
    private.INT4: {"_weight_int4pack_mm": "self mat2 qGroupSize qScaleAndZeros"},
}
"""Private operators and the argument names that the kernels of this package are written for."""

PUBLIC_OPERATORS: dict[str, str] = {
    private.ATTENTION: "scaled_dot_product_attention",
    private.COMPOSITES: "dropout native_dropout softmax.int log_softmax.int layer_norm batch_norm cudnn_batch_norm",
    private.CTC_LOSS: "ctc_loss.Tensor ctc_loss.IntList",
    private.FUNCTORCH: "dropout native_dropout _fused_rms_norm mish_backward",
    private.RNN: (
        "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data lstm_cell "
        "gru_cell"
    ),
}
"""Operators that the features stand before or call. They change their names more seldom, and no arguments."""


def missing(feature: str) -> tuple[str, ...]:
    """What this torch lacks, or has with other arguments, of what `feature` needs; empty when it can be emulated."""
    absent = [name.path for name in private.NAMES.get(feature, ()) if not name.present()]
    absent += [f"aten::{name}" for name in PUBLIC_OPERATORS.get(feature, "").split() if overload(name) is None]
    for name, expected in OPERATORS.get(feature, {}).items():
        op = overload(name)
        if op is None:
            absent.append(f"aten::{name}")
        elif " ".join(schema_arguments(op)) != expected:
            absent.append(f"aten::{name} as it was (now {str(op._schema).removeprefix(f'aten::{name}')})")
    return tuple(absent)


def running_version() -> tuple[int, int]:
    """(major, minor) of the running torch: (2, 16) for "2.16.0a0+git1b2c3d"."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def is_emulated(tensor: Any) -> bool:
    """Whether `tensor` is one that the emulation may touch: on meta, and not a FakeTensor, which belongs to another
    mode."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and not isinstance(tensor, FakeTensor)


def is_traced(tensor: Any) -> bool:
    """Whether `tensor` is a FakeTensor on meta."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == "meta"


def is_cuda_amp_off(made: Any) -> bool:
    """Whether a torch.autocast or a GradScaler is for CUDA and disabled. False for one whose constructor failed
    midway."""
    device = getattr(made, "device", None) or getattr(made, "_device", None)
    return device == "cuda" and not getattr(made, "_enabled", True)


def autocast_nesting() -> int:
    """How many autocasts this thread has entered."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


# --- dispatcher ------------------------------------------------------------------------------------------------


def decompose(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the CompositeImplicitAutograd kernel of `op`: what the op does unless something overrides it.

    Not `op.decompose()`, which prefers a Python decomposition of the same op (dropout, LSTM, batch norm and others
    have one, of other ops).
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def fall_through(key: str) -> Library:
    """Let ops without a kernel at `key` skip that key, until the library is destroyed."""
    fallback = Library("_", "IMPL", key)
    fallback.fallback(fallthrough_kernel, key)
    return fallback


@contextmanager
def no_warning_of_override() -> Iterator[None]:
    """torch warns, once in a process, when a kernel replaces another one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        yield


def schema_arguments(op: OpOverload) -> tuple[str, ...]:
    """The argument names of `op`, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


def overload(name: str) -> OpOverload | None:
    """Operator by "name" or "name.overload", of aten unless "namespace::" stands before it; None if there is none."""
    namespace, _, rest = name.rpartition("::")
    packet_name, _, overload_name = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return getattr(packet, overload_name or "default", None)


# --- the spare autocast key ----------------------------------------------------------------------------------------


def spare_autocast_key() -> str:
    """Meta tensors have no autocast key of their own; this one has no device in core."""
    return private.SPARE_AUTOCAST_KEY.attribute.removeprefix("DispatchKey.")


def switch_spare_autocast_key(on: bool) -> None:
    """Let calls of this thread pass (or no longer pass) through the kernels at the spare key."""
    private.EXCLUDE_FROM_TLS.value(private.SPARE_AUTOCAST_KEY.value, not on)
    private.INCLUDE_IN_TLS.value(private.SPARE_AUTOCAST_KEY.value, on)


@functools.cache
def _spare_autocast_keyset() -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(private.SPARE_AUTOCAST_KEY.value)


def without_spare_autocast_key() -> Any:
    """Context in which calls skip the kernels at the spare key, as torch's own autocast kernels run their op."""
    return torch._C._ExcludeDispatchKeyGuard(_spare_autocast_keyset())


@contextmanager
def switched_on(key: private.DispatchKey | str) -> Iterator[None]:
    """In this context calls do not skip the kernels at the key, though they do so around it."""
    was_off = private.EXCLUDED_FROM_TLS.value(key)
    private.EXCLUDE_FROM_TLS.value(key, False)
    try:
        yield
    finally:
        private.EXCLUDE_FROM_TLS.value(key, was_off)


def autograd_records() -> AbstractContextManager[None]:
    """In this context autograd notes what runs, where gradients are on: also inside of a dispatch mode, below it."""
    return switched_on(private.DispatchKey.AutogradFunctionality)


# --- attention -----------------------------------------------------------------------------------------------------


def enabled_sdp_backends() -> dict[SDPBackend, bool]:
    """The user's switches, which sdpa_kernel sets."""
    flags: Any = torch.backends.cuda
    return {
        SDPBackend.MATH: flags.math_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: flags.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: flags.cudnn_sdp_enabled(),
    }
