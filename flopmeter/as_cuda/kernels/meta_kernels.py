"""Meta kernels for CUDA-only ops that torch has none for: they only compute the shapes of the results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.records.memory_format import torch_strides
from flopmeter.torch_names import dispatcher, private

GRU_WORKSPACE = 5
"""Values per hidden unit that the fused GRU cell keeps for its backward (GRU_workspace in cuda/RNN.cu)."""


def install(scope: Emulation) -> None:
    """Register each kernel for which this torch has none."""
    for feature, kernels in KERNELS.items():
        if dispatcher.missing(feature):
            continue
        for name, kernel in kernels.items():
            if dispatcher.overload(name) is not None and not private.has_kernel(f"aten::{name}", "Meta"):
                scope.meta_kernel(f"aten::{name}", kernel)


def install_int4(scope: Emulation) -> None:
    """torch 2.13's Meta kernel reads an attribute of its arguments that only FakeTensors have."""
    scope.meta_kernel("aten::_weight_int4pack_mm", weight_int4pack_mm)


def install_grouped(scope: Emulation) -> None:
    """Until 2.13 torch's Meta kernel takes bf16 only, and pads rows only where torch was built for CUDA; the kernels of
    CUDA and the CPU take fp16 and fp32 too."""
    scope.meta_kernel("aten::_grouped_mm", grouped_mm)


def install_folds(scope: Emulation) -> None:
    """torch's Meta kernel gives a part of a padded tensor, CUDA's a tensor without gaps (cuda/Col2Im.cu), which becomes
    a gradient as it is."""
    scope.meta_kernel("aten::col2im", folded)


def folded(columns: Tensor, size: Sequence[int], kernel: Sequence[int], *windows: Any) -> Tensor:
    result = columns.new_empty((*columns.shape[:-2], columns.shape[-2] // prod(kernel), *size))
    unfolded = torch.ops.aten.im2col.default(result, kernel, *windows)
    if unfolded.shape != columns.shape:
        raise RuntimeError(f"fold to {list(size)}: there are columns {list(columns.shape)}, not {list(unfolded.shape)}")
    return result


GROUPED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_ROW_BYTES = 16
"""Rows of the operands begin at multiples of these, and those of the result are padded to them
(aten/src/ATen/native/GroupedMMUtils.h)."""


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dtype is not b.dtype or a.dtype not in GROUPED_TYPES or out_dtype not in (None, a.dtype):
        raise RuntimeError(f"grouped_mm: of {a.dtype} and {b.dtype} to {out_dtype}: these types do not fit")
    has_groups_in_both, splits_depth = a.dim() == b.dim() == 3, a.dim() == b.dim() == 2
    if (offs is None) != has_groups_in_both or bias is not None or not (splits_depth or a.size(-1) == b.size(-2)):
        raise RuntimeError(f"grouped_mm of {list(a.shape)} and {list(b.shape)}: offsets or sizes that do not fit")
    per_row = GROUPED_ROW_BYTES // a.element_size()
    for strides in (torch_strides(a)[-2:], torch_strides(b)[-2:]):
        if min(strides) != 1 or max(strides) % per_row:
            raise RuntimeError(f"grouped_mm: rows that lie {strides} elements apart, which is no multiple of {per_row}")
    rows, columns = a.size(-2), b.size(-1)
    padded = columns + -columns % per_row
    if a.dim() != b.dim():
        return a.new_empty_strided((rows, columns), (padded, 1))
    groups = a.size(0) if offs is None else offs.size(0)
    return a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1))


def cudnn_rnn_backward(
    tensor: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    grad_cx = torch.empty_like(cx) if cx is not None else tensor.new_empty(0)
    return torch.empty_like(tensor), torch.empty_like(hx), grad_cx, [torch.empty_like(each) for each in weight]


def fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, hidden = hx.shape
    return torch.empty_like(hx), hx.new_empty(batch, GRU_WORKSPACE * hidden)


def fused_gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the input gates, the hidden gates, the hidden state and the two biases."""
    batch, hidden = grad_hy.shape
    input_gates, hidden_gates = (grad_hy.new_empty(batch, 3 * hidden) for _ in range(2))
    input_bias, hidden_bias = (grad_hy.new_empty(3 * hidden if has_bias else 0) for _ in range(2))
    return input_gates, hidden_gates, torch.empty_like(grad_hy), input_bias, hidden_bias


def fused_rms_norm(
    tensor: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The output, without gaps, and one reciprocal root mean square a row, in the accumulation dtype."""
    kept = tensor.dim() - len(normalized_shape)
    rows = [*tensor.shape[:kept], *[1] * len(normalized_shape)]
    accumulation = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.new_empty(tensor.shape), tensor.new_empty(rows, dtype=accumulation)


def weight_int4pack_mm(tensor: Tensor, mat2: Tensor, group_size: int, scale_and_zeros: Tensor) -> Tensor:
    """The weight is packed in tiles of 8 output features."""
    on_xpu = getattr(mat2, "fake_device", mat2.device).type == "xpu"  # there in rows of one
    return tensor.new_empty(tensor.size(0), mat2.size(0) * (1 if on_xpu else 8))


def scaled_mm_out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """torch has a Meta kernel for the op without `out`; its checks hold here too."""
    return out.resize_(torch.ops.aten._scaled_mm.default(*args, **kwargs).shape)


def in_place(*args: Any, **kwargs: Any) -> None:
    """An op that only writes into its arguments."""


def like_first(first: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(first)


def like_second(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(second)


def with_mask(first: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), torch.empty_like(first, dtype=torch.bool)


def fake_quantize_backward(
    grad: Tensor, tensor: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(tensor), torch.empty_like(scale), torch.empty_like(zero_point)


def is_set_to(first: Tensor, second: Tensor) -> bool:
    """Whether they begin at the same place of the same storage, and lie alike."""

    def place(tensor: Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tuple(tensor.shape), tuple(torch_strides(tensor))

    return place(first) == place(second)


def padded_dense_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int | None = None) -> Tensor:
    """The kernel that torch has for FakeTensors. `total_length`: of all rows together, which torch.nested knows."""
    if total_length is None:
        raise NotImplementedError("the last offset has no value on meta: tell how many rows there are, as total_L")
    return dense.new_empty(total_length, *dense.shape[1 + len(offsets) :])


KERNELS: dict[str, dict[str, DispatcherKernel]] = {
    # With a composite kernel and an autograd formula: the formula is taken once the backend has a kernel.
    private.COMPOSITES: {"_fused_rms_norm": fused_rms_norm},
    private.RNN: {
        "_cudnn_rnn_backward": cudnn_rnn_backward,
        "_thnn_fused_gru_cell": fused_gru_cell,
        "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
    },
    private.FOREACH: dict.fromkeys(
        (
            "_fused_sgd_",
            "_fused_adagrad_",
            *(f"_fused_{kind}_.tensor_lr" for kind in ("sgd", "adagrad", "adam", "adamw")),
        ),
        in_place,
    ),
    private.MHA_FAST_PATH: {"_transformer_encoder_layer_fwd": like_first},  # torch has this one since 2.13
    private.SCALED: {"_scaled_mm.out": scaled_mm_out},
    private.CTC_LOSS: dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), like_second),
    private.JAGGED: {"_padded_dense_to_jagged_forward": padded_dense_to_jagged},
    private.GRADIENTS: dict.fromkeys(
        ("multi_margin_loss_backward", "multilabel_margin_loss_backward", "fractional_max_pool3d_backward"), like_second
    ),
    private.SAMPLES: dict.fromkeys(
        # torch has _standard_gamma since 2.13
        ("_sample_dirichlet", "_dirichlet_grad", "_standard_gamma", "_standard_gamma_grad", "binomial"),
        like_first,
    ),
    private.SAME_MEMORY: {"is_set_to": is_set_to},
    private.FAKE_QUANTIZE: {
        "fake_quantize_per_tensor_affine_cachemask": with_mask,
        "fake_quantize_per_channel_affine_cachemask": with_mask,
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": with_mask,
        "_fake_quantize_learnable_per_tensor_affine": like_first,
        "_fake_quantize_learnable_per_channel_affine": like_first,
        "_fake_quantize_learnable_per_tensor_affine_backward": fake_quantize_backward,
        "_fake_quantize_learnable_per_channel_affine_backward": fake_quantize_backward,
    },
}
"""By the feature that needs them."""
