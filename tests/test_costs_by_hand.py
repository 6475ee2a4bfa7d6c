"""Ops that need a GPU, or a build of torch, to run: their calls are written down and priced by hand."""

from __future__ import annotations

import pytest
import torch
from costs_support import call_by_hand, meta
from torch import Tensor

from flopmeter.costs import costs_of
from flopmeter.records import Call

aten = torch.ops.aten
BF16, F16, I8, I16, I32, I64, U8 = (
    torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8
)  # fmt: skip
FP8, FP4, BOOL = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.bool
T = meta


def rnn_weights(hidden: int, width: int) -> list[Tensor]:
    return [T(4 * hidden, width), T(4 * hidden, hidden), T(4 * hidden), T(4 * hidden)]


# Ops that need a GPU (or a build of torch) to run: their calls are written down. (call, FLOPs, products alone)
BY_HAND: dict[str, tuple[Call, int, int]] = {
    "_cudnn_rnn": (  # LSTM: 7 steps of 2 sequences, width 5, hidden 3
        call_by_hand(
            aten._cudnn_rnn.default,
            (
                T(7, 2, 5), rnn_weights(3, 5), 4, None, T(1, 2, 3), T(1, 2, 3), 2, 3, 0, 1, False, 0.0, False, False,
                [], None,
            ),
            (T(7, 2, 3), T(1, 2, 3), T(1, 2, 3), T(0), T(0, dtype=U8)),
        ),
        2 * 14 * 12 * 8 + 14 * 3 * 22 + 14 * 24, 2 * 14 * 12 * 8,
    ),
    "batch_norm_stats": (call_by_hand(aten.batch_norm_stats.default, (T(2, 3, 5), 1e-5), (T(3), T(3))), 3 * 30, 0),
    "batch_norm_gather_stats_with_counts": (  # of 4 ranks
        call_by_hand(
            aten.batch_norm_gather_stats_with_counts.default,
            (T(2, 3, 5), T(4, 3), T(4, 3), T(3), T(3), 0.1, 1e-5, T(4)), (T(3), T(3)),
        ),
        19 * 4 * 3, 0,
    ),
    "batch_norm_elemt": (
        call_by_hand(aten.batch_norm_elemt.default, (T(2, 3, 5), T(3), T(3), T(3), T(3), 1e-5), (T(2, 3, 5),)),
        4 * 30, 0,
    ),
    "batch_norm_backward_reduce": (
        call_by_hand(
            aten.batch_norm_backward_reduce.default,
            (T(2, 3, 5), T(2, 3, 5), T(3), T(3), T(3), True, True, True), (T(3), T(3), T(3), T(3)),
        ),
        4 * 30, 0,
    ),
    "batch_norm_backward_elemt": (
        call_by_hand(
            aten.batch_norm_backward_elemt.default,
            (T(2, 3, 5), T(2, 3, 5), T(3), T(3), T(3), T(3), T(3), T(2, dtype=I32)), (T(2, 3, 5),),
        ),
        5 * 30, 0,
    ),
    "_cudnn_rnn_backward": (  # both products for each weight; 23 a unit; both biases
        call_by_hand(
            aten._cudnn_rnn_backward.default,
            (
                T(7, 2, 5), rnn_weights(3, 5), 4, T(0), T(1, 2, 3), T(1, 2, 3), T(7, 2, 3), T(7, 2, 3), None, None, 2,
                3, 0, 1, False, 0.0, True, False, [], None, T(0, dtype=U8), [True, True, True, True],
            ),
            (T(7, 2, 5), T(1, 2, 3), T(1, 2, 3), *rnn_weights(3, 5)),
        ),
        2 * 2 * 14 * 12 * 8 + 14 * 3 * 23 + 14 * 24, 2 * 2 * 14 * 12 * 8,
    ),
    "_jagged_to_padded_dense_forward": (
        call_by_hand(
            aten._jagged_to_padded_dense_forward.default, (T(31, 6), [T(4, dtype=I32)], [17]), (T(3, 17, 6),)
        ),
        0, 0,
    ),
    "_padded_dense_to_jagged_forward": (
        call_by_hand(
            aten._padded_dense_to_jagged_forward.default, (T(3, 17, 6), [T(4, dtype=I32)], 31), (T(31, 6),)
        ),
        0, 0,
    ),
    "mish_backward": (call_by_hand(aten.mish_backward.default, (T(6), T(6)), (T(6),)), 6 * (3 + 4 + 6), 0),
    "_thnn_fused_gru_cell": (
        call_by_hand(
            aten._thnn_fused_gru_cell.default, (T(5, 9), T(5, 9), T(5, 3)), (T(5, 3), T(5, 15))
        ),
        15 * (2 * 5 + 3 + 3), 0,
    ),
    "_thnn_fused_gru_cell_backward": (
        call_by_hand(
            aten._thnn_fused_gru_cell_backward.default,
            (T(5, 3), T(5, 15), True),
            (T(5, 9), T(5, 9), T(5, 3), T(9), T(9)),
        ),
        15 * (16 + 6), 0,
    ),
    "_scaled_mm fp4": (  # two numbers an element
        call_by_hand(
            aten._scaled_mm.default,
            (T(16, 32, dtype=FP4), T(32, 64, dtype=FP4), T(16, 4), T(4, 64), None, None, BF16),
            (T(16, 64, dtype=BF16),),
        ),
        2 * 16 * 64 * 64 + 2 * 16 * 64, 2 * 16 * 64 * 64,
    ),
    "_weight_int4pack_mm": (  # two operations to unpack each weight
        call_by_hand(
            aten._weight_int4pack_mm.default,
            (T(4, 32, dtype=BF16), T(2, 1, 32, 4, dtype=torch.int32), 32, T(1, 16, 2, dtype=BF16)),
            (T(4, 16, dtype=BF16),),
        ),
        2 * 4 * 16 * 32 + 2 * 16 * 32, 2 * 4 * 16 * 32,
    ),
    "_sparse_semi_structured_mm": (  # half of a dense product of depth 32
        call_by_hand(
            aten._sparse_semi_structured_mm.default,
            (T(16, 16, dtype=BF16), T(16, 2, dtype=torch.int16), T(32, 8, dtype=BF16)),
            (T(16, 8, dtype=BF16),),
        ),
        16 * 8 * 32, 16 * 8 * 32,
    ),
    "cudnn_convolution_relu": (
        call_by_hand(
            aten.cudnn_convolution_relu.default,
            (T(2, 3, 8, 8), T(5, 3, 3, 3), T(5), [2, 2], [1, 1], [1, 1], 1),
            (T(2, 5, 4, 4),),
        ),
        2 * 160 * 27 + 160, 2 * 160 * 27,
    ),
    "_flash_attention_forward, causal at the bottom right": (
        call_by_hand(
            aten._flash_attention_forward.default,
            (
                T(2, 3, 4, 8, dtype=BF16), T(2, 7, 4, 8, dtype=BF16), T(2, 7, 4, 8, dtype=BF16), None, None, 3, 7, 0.0,
                True, False,
            ),
            (T(2, 3, 4, 8, dtype=BF16), T(2, 4, 3), T(2, dtype=I64), T(0), T(0)),
        ),
        2 * 2 * (2 * 4) * 3 * 7 * 8, 2 * 2 * (2 * 4) * 3 * 7 * 8,
    ),
    "_transformer_encoder_layer_fwd": (  # batch 2, length 5, width 16, 2 heads, hidden 32
        call_by_hand(
            aten._transformer_encoder_layer_fwd.default,
            (
                T(2, 5, 16), 16, 2, T(48, 16), T(48), T(16, 16), T(16), False, False, 1e-5, T(16), T(16), T(16), T(16),
                T(32, 16), T(32), T(16, 32), T(16),
            ),
            (T(2, 5, 16),),
        ),
        2 * 10 * 16 * (48 + 16 + 32 + 32) + 4 * 2 * 25 * 16 + 10 * (48 + 16 + 32 + 16) + 2 * 160 + 2 * 7 * 160,
        2 * 10 * 16 * (48 + 16 + 32 + 32) + 4 * 2 * 25 * 16,
    ),
    "_thnn_fused_lstm_cell_backward_impl": (  # 23 a unit (CUDA's kernel), and the sum over the batch for the bias
        call_by_hand(
            aten._thnn_fused_lstm_cell_backward_impl.default,
            (T(5, 3), T(5, 3), T(5, 3), T(5, 3), T(5, 12), True),
            (T(5, 12), T(5, 3), T(12)),
        ),
        15 * 23 + 60, 0,
    ),
    "mkldnn_rnn_layer": (
        call_by_hand(
            aten.mkldnn_rnn_layer.default,
            (T(7, 2, 5), *rnn_weights(3, 5), T(2, 3), T(2, 3), False, [], 2, 3, 1, True, False, False, False),
            (T(7, 2, 3), T(1, 2, 3), T(1, 2, 3), T(0, dtype=U8)),
        ),
        2 * 14 * 12 * 8 + 14 * 3 * 22 + 14 * 24, 2 * 14 * 12 * 8,
    ),
    "_scaled_grouped_mm": (
        call_by_hand(
            aten._scaled_grouped_mm.default,
            (T(32, 16, dtype=FP8), T(4, 16, 8, dtype=FP8), T(32), T(4, 8), T(4, dtype=I32), None, None, BF16),
            (T(32, 8, dtype=BF16),),
        ),
        2 * 32 * 16 * 8 + 2 * 256, 2 * 32 * 16 * 8,
    ),
    "_scaled_mm_v2": (
        call_by_hand(
            aten._scaled_mm_v2.default,
            (T(16, 32, dtype=FP8), T(32, 64, dtype=FP8), [T(1)], [0], [0], [T(1)], [0], [0], None, BF16),
            (T(16, 64, dtype=BF16),),
        ),
        2 * 16 * 64 * 32 + 1024, 2 * 16 * 64 * 32,
    ),
    "_weight_int4pack_mm_for_cpu": (
        call_by_hand(
            aten._weight_int4pack_mm_for_cpu.default,
            (T(4, 32, dtype=BF16), T(16, 16, dtype=U8), 32, T(1, 16, 2, dtype=BF16)),
            (T(4, 16, dtype=BF16),),
        ),
        2 * 4 * 16 * 32 + 2 * 16 * 32, 2 * 4 * 16 * 32,
    ),
    "_weight_int4pack_mm_with_scales_and_zeros": (
        call_by_hand(
            aten._weight_int4pack_mm_with_scales_and_zeros.default,
            (T(4, 32, dtype=BF16), T(16, 16, dtype=U8), 32, T(16, dtype=BF16), T(16, dtype=BF16)),
            (T(4, 16, dtype=BF16),),
        ),
        2 * 4 * 16 * 32 + 2 * 16 * 32, 2 * 4 * 16 * 32,
    ),
    "_dyn_quant_matmul_4bit": (
        call_by_hand(aten._dyn_quant_matmul_4bit.default, (T(4, 32), T(512, dtype=U8), 32, 32, 16), (T(4, 16),)),
        2 * 4 * 16 * 32 + 2 * 16 * 32, 2 * 4 * 16 * 32,
    ),
    "_sparse_semi_structured_linear": (
        call_by_hand(
            aten._sparse_semi_structured_linear.default,
            (T(8, 32, dtype=F16), T(16, 16, dtype=F16), T(16, 2, dtype=I16)),
            (T(8, 16, dtype=F16),),
            bias=T(16, dtype=F16),
        ),
        8 * 16 * 32 + 128, 8 * 16 * 32,
    ),
    "_cslt_sparse_mm": (
        call_by_hand(aten._cslt_sparse_mm.default, (T(300, dtype=F16), T(32, 8, dtype=F16)), (T(16, 8, dtype=F16),)),
        16 * 8 * 32, 16 * 8 * 32,
    ),
    "fake_quantize_per_tensor_affine_cachemask": (
        call_by_hand(
            aten.fake_quantize_per_tensor_affine_cachemask.default, (T(6), 0.1, 0, -128, 127), (T(6), T(6, dtype=BOOL))
        ),
        30, 0,
    ),
    "cudnn_convolution": (
        call_by_hand(
            aten.cudnn_convolution.default,
            (T(2, 3, 8, 8), T(5, 3, 3, 3), [1, 1], [1, 1], [1, 1], 1, False, False, True),
            (T(2, 5, 8, 8),),
        ),
        2 * 640 * 27, 2 * 640 * 27,
    ),
    "cudnn_convolution_transpose": (  # 6 positions, each spread over 3 taps of 5 channels
        call_by_hand(
            aten.cudnn_convolution_transpose.default,
            (T(1, 4, 6), T(4, 5, 3), [0], [0], [2], [1], 1, False, False, True),
            (T(1, 5, 13),),
        ),
        2 * 6 * 4 * 5 * 3, 2 * 6 * 4 * 5 * 3,
    ),
    "cudnn_convolution_add_relu": (  # alpha·z: a multiply and an add; the bias: an add
        call_by_hand(
            aten.cudnn_convolution_add_relu.default,
            (T(2, 3, 8, 8), T(5, 3, 3, 3), T(2, 5, 8, 8), 0.5, T(5), [1, 1], [1, 1], [1, 1], 1),
            (T(2, 5, 8, 8),),
        ),
        2 * 640 * 27 + 3 * 640, 2 * 640 * 27,
    ),
    "mkldnn_convolution": (
        call_by_hand(
            aten.mkldnn_convolution.default,
            (T(2, 3, 8, 8), T(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], 1),
            (T(2, 5, 8, 8),),
        ),
        2 * 640 * 27, 2 * 640 * 27,
    ),
    "cudnn_batch_norm in training": (
        call_by_hand(
            aten.cudnn_batch_norm.default,
            (T(2, 3, 4, 4), T(3), T(3), T(3), T(3), True, 0.1, 1e-5),
            (T(2, 3, 4, 4), T(3), T(3), T(0, dtype=U8)),
        ),
        96 * 7, 0,
    ),
    "cudnn_batch_norm in evaluation": (
        call_by_hand(
            aten.cudnn_batch_norm.default,
            (T(2, 3, 4, 4), T(3), T(3), T(3), T(3), False, 0.1, 1e-5),
            (T(2, 3, 4, 4), T(0), T(0), T(0, dtype=U8)),
        ),
        96 * 4, 0,
    ),
    "cudnn_batch_norm_backward": (
        call_by_hand(
            aten.cudnn_batch_norm_backward.default,
            (T(2, 3, 4, 4), T(2, 3, 4, 4), T(3), T(3), T(3), T(3), T(3), 1e-5, T(0, dtype=U8)),
            (T(2, 3, 4, 4), T(3), T(3)),
        ),
        96 * 13, 0,
    ),
    "_fused_rms_norm": (  # square and add, times the reciprocal root, weight
        call_by_hand(aten._fused_rms_norm.default, (T(4, 6), [6], T(6), 1e-5), (T(4, 6), T(4, 1))), 24 * 4, 0
    ),
    "_fused_rms_norm_backward": (
        call_by_hand(
            aten._fused_rms_norm_backward.default,
            (T(4, 6), T(4, 6), [6], T(4, 1), T(6), [True, True]),
            (T(4, 6), T(6)),
        ),
        24 * 9, 0,
    ),
    "_masked_softmax": (
        call_by_hand(aten._masked_softmax.default, (T(4, 6), T(4, 6, dtype=BOOL)), (T(4, 6),)), 24 * 4, 0
    ),
    "_transform_bias_rescale_qkv": (  # a bias for all three, a scale for q
        call_by_hand(
            aten._transform_bias_rescale_qkv.default,
            (T(2, 5, 48), T(48), 2),
            (T(2, 2, 5, 8), T(2, 2, 5, 8), T(2, 2, 5, 8)),
        ),
        480 + 160, 0,
    ),
    "_fused_sgd_ with momentum": (  # b = mu·b + g (3 with the dampening), p -= lr·b
        call_by_hand(
            aten._fused_sgd_.default,
            ([T(6), T(5)], [T(6), T(5)], [T(6), T(5)]),
            (),
            weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        ),
        11 * 5, 0,
    ),
    "_fused_adamw_": (  # moments 3 and 4, root, correction and epsilon 3, step 3, decay 1
        call_by_hand(
            aten._fused_adamw_.default,
            ([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [], [T(), T()]),
            (),
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        ),
        11 * 14, 0,
    ),
    "_fused_adam_ without decay": (
        call_by_hand(
            aten._fused_adam_.default,
            ([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [], [T(), T()]),
            (),
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        ),
        11 * 13, 0,
    ),
    "_fused_adagrad_": (  # s += g·g, p -= lr·g / (sqrt(s) + eps)
        call_by_hand(
            aten._fused_adagrad_.default,
            ([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [T(), T()]),
            (),
            lr=0.1, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False,
        ),
        11 * 7, 0,
    ),
    "_embedding_bag_dense_backward, mean": (
        call_by_hand(
            aten._embedding_bag_dense_backward.default,
            (T(3, 6), T(7, dtype=I64), T(7, dtype=I64), T(3, dtype=I64), T(0, dtype=I64), 50, False, 1, None),
            (T(50, 6),),
        ),
        2 * 7 * 6, 0,
    ),
    "_ctc_loss_backward": (  # 98 states; 70 classes
        call_by_hand(
            aten._ctc_loss_backward.default,
            (T(2), T(7, 2, 5), T(2, 3, dtype=I64), [7, 7], [3, 3], T(2), T(2, 7, 7), 0),
            (T(7, 2, 5),),
        ),
        17 * 98 + 7 * 70, 0,
    ),
    "linalg_lstsq": (  # QR 504; each right side 4·9·6 - 72 + 36
        call_by_hand(aten.linalg_lstsq.default, (T(9, 6), T(9, 2)), (T(6, 2), T(2), T(), T(0))), 504 + 2 * 180, 0
    ),
    "geqrf": (call_by_hand(aten.geqrf.default, (T(9, 6),), (T(9, 6), T(6))), 504, 0),
    "_linalg_eigvals": (call_by_hand(aten._linalg_eigvals.default, (T(6, 6),), (T(6),)), 10 * 216, 0),
    "_weight_norm_interface_backward": (
        call_by_hand(
            aten._weight_norm_interface_backward.default, (T(4, 6), T(4, 6), T(4, 1), T(4, 1), 0), (T(4, 6), T(4, 1))
        ),
        24 * 5, 0,
    ),
    "multi_margin_loss_backward": (
        call_by_hand(
            aten.multi_margin_loss_backward.default, (T(), T(4, 6), T(4, dtype=I64), 1, 1), (T(4, 6),)
        ),
        24 * 4, 0,
    ),
    "mkldnn_rnn_layer_backward": (
        call_by_hand(
            aten.mkldnn_rnn_layer_backward.default,
            (
                T(7, 2, 5), *rnn_weights(3, 5), T(2, 3), T(2, 3), T(7, 2, 3), T(2, 3), T(2, 3), T(7, 2, 3), None, None,
                False, 2, 3, 1, True, True, False, [], False, T(0, dtype=U8),
            ),
            (T(7, 2, 5), *rnn_weights(3, 5), T(2, 3), T(2, 3)),
        ),
        2 * 2 * 14 * 12 * 8 + 14 * 3 * 23 + 14 * 24, 2 * 2 * 14 * 12 * 8,
    ),
    "_convolution": (
        call_by_hand(
            aten._convolution.default,
            (T(1, 4, 6), T(6, 2, 3), None, [1], [0], [1], False, [0], 2, False, False, True, True),
            (T(1, 6, 4),),
        ),
        2 * (6 * 4) * (2 * 3), 2 * (6 * 4) * (2 * 3),
    ),
    "_batch_norm_no_update": (
        call_by_hand(
            aten._batch_norm_no_update.default,
            (T(2, 3, 4, 4), T(3), T(3), T(3), T(3), 0.1, 1e-5),
            (T(2, 3, 4, 4), T(0), T(0), T(0, dtype=U8)),
        ),
        96 * 4, 0,
    ),
    "_index_put_impl_": (
        call_by_hand(
            aten._index_put_impl_.default, (T(50, 6), [T(3, dtype=I64)], T(3, 6), True), ()
        ),
        18, 0,
    ),
    "fake_quantize_per_channel_affine_cachemask": (
        call_by_hand(
            aten.fake_quantize_per_channel_affine_cachemask.default,
            (T(4, 6), T(4), T(4, dtype=I32), 0, -128, 127),
            (T(4, 6), T(4, 6, dtype=BOOL)),
        ),
        24 * (4 + 6), 0,  # the mask without the way back; 1 / scale for each number
    ),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (
        call_by_hand(
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
            (T(4, 6), T(1), T(1, dtype=I32), T(1), -128, 127),
            (T(4, 6), T(4, 6, dtype=BOOL)),
        ),
        24 * 5, 0,
    ),
    "_upsample_bicubic2d_aa_backward": (
        call_by_hand(
            aten._upsample_bicubic2d_aa_backward.default,
            (T(1, 2, 4, 4), [4, 4], [1, 2, 8, 8], False),
            (T(1, 2, 8, 8),),
        ),
        32 * 2 * 64, 0,
    ),
    "cudnn_grid_sampler_backward": (  # weights again; 4 taps: 2 for the input, 3 for each of 2 coordinates
        call_by_hand(
            aten.cudnn_grid_sampler_backward.default,
            (T(1, 2, 5, 5), T(1, 3, 3, 2), T(1, 2, 3, 3)),
            (T(1, 2, 5, 5), T(1, 3, 3, 2)),
        ),
        9 * (8 + 4 + 4) + 18 * 4 * (2 + 6), 0,
    ),
    "cudnn_grid_sampler": (
        call_by_hand(aten.cudnn_grid_sampler.default, (T(1, 2, 5, 5), T(1, 3, 3, 2)), (T(1, 2, 3, 3),)),
        9 * (8 + 4 + 4) + 18 * 8, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_an_op_of_the_gpu_costs_what_arithmetic_by_hand_says(name):
    call, flops, products = BY_HAND[name]
    costs = costs_of(call)
    assert sum(cost.flops for cost in costs) == flops
    assert sum(2 * cost.macs for cost in costs) == products


@pytest.mark.skipif(not hasattr(aten, "_foreach_powsum"), reason="an op of torch 2.13")
def test_a_sum_of_powers_is_a_norm_without_its_roots():
    call = call_by_hand(aten._foreach_powsum.Scalar, ([T(6), T(5)], 2), (T(), T()))
    assert sum(cost.flops for cost in costs_of(call)) == 2 * 11


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_with_relu_tells_the_time_model_its_layout(order):
    x, out = (T(2, 8, 8, 8).contiguous(memory_format=order) for _ in range(2))
    operands = (x, T(8, 8, 3, 3).contiguous(memory_format=order), None, [1, 1], [1, 1], [1, 1], 1)
    (cost,) = costs_of(call_by_hand(aten.cudnn_convolution_relu.default, operands, (out,)))
    assert cost.work.shape.channels_last is (order is torch.channels_last)
