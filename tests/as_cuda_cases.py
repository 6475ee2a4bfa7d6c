"""The programs of data/cuda_streams.json and data/cuda_streams_2.15.json, on meta tensors.

The recordings are the project's own: torch 2.13.0's CUDA build (cu130, cuDNN 9.20) dispatched the same programs under
FakeTensorMode with the device properties of sm 7.5, 8.0 and 9.0 simulated, and torch 2.15.0's after it: of that, the
file holds the cases that came out differently. No GPU ran. A case builds its inputs and
returns the program; the recording holds the aten ops of its forward and, where the result needs a gradient, of its
backward, each with the dtype of its first result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from as_cuda_stream import Program, bf16, f16, f32, module
from torch import Tensor
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten


def index(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="meta")


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last).requires_grad_()


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    return lambda: function(*args, **kwargs)


def first(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    return lambda: function(*args, **kwargs)[0]


def under(context: Callable[[], Any], program: Program) -> Program:
    def run() -> Any:
        with context():
            return program()

    return run


# --- attention -----------------------------------------------------------------------------------------------------


def sdpa(
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 8,
    kv_heads: int = 8,
    size: int = 64,
    value_size: int | None = None,
    length: int = 128,
    kv_length: int | None = None,
    grad: bool = True,
    mask: str | None = None,
    mask_grad: bool = False,
    **options: Any,
) -> Program:
    kv_length = kv_length or length
    query = f32(2, heads, length, size, dtype=dtype, grad=grad)
    key = f32(2, kv_heads, kv_length, size, dtype=dtype, grad=grad)
    value = f32(2, kv_heads, kv_length, value_size or size, dtype=dtype, grad=grad)
    masks: dict[str | None, Callable[[], Tensor | None]] = {
        None: lambda: None,
        "bool": lambda: torch.ones(length, kv_length, device="meta", dtype=torch.bool),
        "bool4": lambda: torch.ones(2, 1, length, kv_length, device="meta", dtype=torch.bool),
        "float": lambda: torch.zeros(length, kv_length, device="meta", dtype=dtype).requires_grad_(mask_grad),
    }
    return call(F.scaled_dot_product_attention, query, key, value, attn_mask=masks[mask](), **options)


SDPA: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "nograd": {"grad": False},
    "maskbool": {"mask": "bool"},
    "maskbool4": {"mask": "bool4"},
    "maskfloat": {"mask": "float"},
    "maskfloatgrad": {"mask": "float", "mask_grad": True},
    "mask_odd": {"mask": "bool4", "length": 77},
    "gqa": {"kv_heads": 2, "enable_gqa": True, "is_causal": True},
    "gqa_mask": {"kv_heads": 2, "enable_gqa": True, "mask": "bool4"},
    "drop10": {"dropout_p": 0.1},
    "drop125": {"dropout_p": 0.125},
    "fp32": {"dtype": torch.float32},
    "fp32mask": {"dtype": torch.float32, "mask": "bool"},
    "fp64": {"dtype": torch.float64},
    "fp16": {"dtype": torch.float16},
    "d80": {"size": 80},
    "d72": {"size": 72},
    "d20": {"size": 20},
    "d256": {"size": 256},
    "d256nograd": {"size": 256, "grad": False},
    "d192": {"size": 192},
    "d512": {"size": 512},
    "d192v128": {"size": 192, "value_size": 128},
    "d64v128": {"size": 64, "value_size": 128},
    "q1": {"length": 1, "kv_length": 128, "grad": False},
    "q1causal": {"length": 1, "kv_length": 128, "grad": False, "is_causal": True},
    "cross": {"length": 64, "kv_length": 128},
    "crosscausal": {"length": 64, "kv_length": 128, "is_causal": True},
    "k1": {"length": 1, "kv_length": 1, "grad": False},
    "fp32gqa": {"dtype": torch.float32, "kv_heads": 2, "enable_gqa": True},
}


def sdpa_self(*shape: int, **options: Any) -> Program:
    tensor = bf16(*shape)
    return call(F.scaled_dot_product_attention, tensor, tensor, tensor, **options)


def gqa_3d() -> Program:
    query, key = bf16(8, 128, 64), bf16(8, 128, 64)
    return lambda: F.scaled_dot_product_attention(query[None], key[None], key[None], is_causal=True)


def mha(train: bool, guard: Callable[[], Any] | None = None, need_weights: bool = False, **options: Any) -> Program:
    layer = module(lambda: nn.MultiheadAttention(64, 4, batch_first=True, **options)).train(train)
    x = f32(2, 9, 64, grad=train)
    program = first(layer, x, x, x, need_weights=need_weights)
    return under(guard, program) if guard else program


def encoder_layer(train: bool, **options: Any) -> Program:
    layer = module(lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)).train(train)
    program = call(layer, f32(2, 9, 64, grad=train))
    return program if train else under(torch.no_grad, program)


def encoder() -> Program:
    layers = module(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)).eval()
    return under(torch.no_grad, call(layers, f32(2, 9, 64, grad=False)))


ATTENTION: dict[str, Callable[[], Program]] = {
    **{f"sdpa_{name}": partial(sdpa, **options) for name, options in SDPA.items()},
    "sdpa_3d": lambda: sdpa_self(16, 128, 64),
    "multihead_gqa_3d": gqa_3d,
    "mha_train": lambda: mha(True, dropout=0.1),
    "mha_train_w": lambda: mha(True, need_weights=True),
    "mha_eval_ng": lambda: mha(False, torch.no_grad),
    "mha_eval_infer": lambda: mha(False, torch.inference_mode, need_weights=True),
    "tel_train": lambda: encoder_layer(True),
    "tel_eval_ng": lambda: encoder_layer(False, activation="gelu"),
    "te_eval_pad": encoder,
    "infer_sdpa": lambda: under(
        torch.inference_mode, call(F.scaled_dot_product_attention, *3 * [bf16(3, 4, 16, 64, grad=False)])
    ),
}

# --- dropout and normalization -------------------------------------------------------------------------------------


def batch_norm_module(x: Callable[[], Tensor], make: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(16)) -> Program:
    return call(module(make), x())


def batch_norm(
    *shape: int, train: bool = True, dtype: torch.dtype = torch.float32, affine: bool = True, cl: bool = False
) -> Program:
    x = channels_last(*shape, dtype=dtype) if cl else f32(*shape, dtype=dtype)
    statistics = f32(16, grad=False), f32(16, grad=False)
    weight, bias = (f32(16), f32(16)) if affine else (None, None)
    return call(F.batch_norm, x, *statistics, weight, bias, train)


def conv_bn_relu() -> Program:
    layers = module(lambda: nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)))
    return call(layers, f32(2, 8, 16, 16))


IMAGE = (4, 16, 8, 8)
NORMS: dict[str, Callable[[], Program]] = {
    "dropout": lambda: call(F.dropout, f32(4, 64), 0.1),
    "dropout_bf16": lambda: call(F.dropout, bf16(4, 64), 0.1),
    "dropout_nograd": lambda: call(F.dropout, f32(4, 64, grad=False), 0.1),
    "dropout_p0": lambda: call(F.dropout, f32(4, 64), 0.0),
    "dropout_inplace": lambda: call(F.dropout, f32(4, 64, grad=False), 0.1, inplace=True),
    "dropout2d": lambda: call(F.dropout2d, f32(4, 8, 6, 6), 0.1),
    "alpha_dropout": lambda: call(F.alpha_dropout, f32(4, 8), 0.1, True),
    "dropout_eval": lambda: call(F.dropout, f32(4, 64), 0.1, False),
    "dropout_nn_tr": lambda: call(nn.Dropout(0.5), bf16(2, 8)),
    "rms_norm": lambda: call(F.rms_norm, bf16(4, 64), (64,), bf16(64)),
    "rms_norm_now": lambda: call(F.rms_norm, bf16(4, 64), (64,)),
    "rms_norm_mixed": lambda: call(F.rms_norm, bf16(4, 64), (64,), f32(64)),
    "rms_norm_fp16w32": lambda: call(F.rms_norm, f16(4, 64), (64,), f32(64)),
    "layer_norm": lambda: call(F.layer_norm, bf16(4, 64), (64,), bf16(64), bf16(64)),
    "layer_norm_mixed": lambda: call(F.layer_norm, bf16(4, 64), (64,), f32(64), f32(64)),
    "group_norm": lambda: call(F.group_norm, bf16(2, 32, 8, 8), 8, bf16(32), bf16(32)),
    "group_norm_cl": lambda: call(F.group_norm, channels_last(2, 32, 8, 8), 8),
    "batch_norm_train": lambda: batch_norm_module(lambda: f32(*IMAGE)),
    "batch_norm_train_bf16": lambda: batch_norm_module(lambda: bf16(*IMAGE)),
    "batch_norm_cl": lambda: batch_norm_module(lambda: channels_last(*IMAGE)),
    "batch_norm_eval": lambda: batch_norm_module(lambda: f32(*IMAGE), lambda: nn.BatchNorm2d(16).eval()),
    "batch_norm1d": lambda: batch_norm_module(lambda: f32(4, 16), lambda: nn.BatchNorm1d(16)),
    "bn_sync": lambda: batch_norm_module(lambda: f32(*IMAGE), lambda: nn.SyncBatchNorm(16)),
    "instance_norm": lambda: batch_norm_module(lambda: f32(*IMAGE), lambda: nn.InstanceNorm2d(16)),
    "convbnrelu": conv_bn_relu,
    "fbn_tr": lambda: batch_norm(*IMAGE),
    "fbn_ev": lambda: batch_norm(*IMAGE, train=False),
    "fbn_bf": lambda: batch_norm(*IMAGE, dtype=torch.bfloat16),
    "fbn_now": lambda: batch_norm(*IMAGE, affine=False),
    "fbn_cl": lambda: batch_norm(*IMAGE, cl=True),
    "fbn_d2": lambda: batch_norm(4, 16),
    "fbn_d5": lambda: batch_norm(2, 16, 4, 4, 4),
    "fbn_big": lambda: batch_norm(1024, 16),
    "lrn": lambda: call(F.local_response_norm, f32(2, 8, 6, 6), 3),
    "weight_norm": lambda: call(module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))), f32(4, 16)),
    "spectral_norm": lambda: call(
        nn.utils.parametrizations.spectral_norm(module(lambda: nn.Linear(16, 16))), f32(4, 16)
    ),
    "normalize": lambda: call(F.normalize, f32(4, 8)),
}

# --- products ------------------------------------------------------------------------------------------------------

MATMULS: dict[str, Callable[[], Program]] = {
    "linear2d": lambda: call(F.linear, bf16(4, 64), bf16(32, 64), bf16(32)),
    "linear3d": lambda: call(F.linear, bf16(4, 7, 64), bf16(32, 64), bf16(32)),
    "linear3d_nobias": lambda: call(F.linear, bf16(4, 7, 64), bf16(32, 64)),
    "linear3d_noncontig": lambda: call(F.linear, bf16(7, 4, 64).transpose(0, 1), bf16(32, 64), bf16(32)),
    "linear4d": lambda: call(F.linear, bf16(2, 3, 4, 64), bf16(32, 64), bf16(32)),
    "linear1d": lambda: call(F.linear, bf16(64), bf16(32, 64), bf16(32)),
    "linear3d_m1": lambda: call(F.linear, bf16(1, 1, 64), bf16(32, 64), bf16(32)),
    "linear_gelu": lambda: call(module(lambda: nn.Sequential(nn.Linear(64, 32), nn.GELU())), f32(4, 64)),
    "infer_linear": lambda: under(
        torch.inference_mode, call(F.linear, bf16(3, 4, 64, grad=False), bf16(64, 64, grad=False))
    ),
    "matmul_3d2d": lambda: call(torch.matmul, bf16(4, 7, 64), bf16(64, 32)),
    "matmul_2d3d": lambda: call(torch.matmul, bf16(32, 64), bf16(4, 64, 7)),
    "matmul_4d4d": lambda: call(torch.matmul, bf16(2, 3, 7, 64), bf16(2, 3, 64, 7)),
    "matmul_4d3d": lambda: call(torch.matmul, bf16(2, 3, 7, 64), bf16(3, 64, 7)),
    "matmul_4d2d_ng": lambda: call(torch.matmul, bf16(2, 3, 7, 64, grad=False), bf16(64, 7, grad=False)),
    "einsum_bhqk": lambda: call(torch.einsum, "bhqd,bhkd->bhqk", bf16(2, 4, 8, 16), bf16(2, 4, 9, 16)),
    "einsum_3": lambda: call(torch.einsum, "bqd,de,bke->bqk", bf16(2, 8, 16), bf16(16, 16), bf16(2, 9, 16)),
    "bilinear": lambda: call(module(lambda: nn.Bilinear(8, 9, 5)), f32(4, 8), f32(4, 9)),
    "addmm": lambda: call(torch.addmm, f32(4, 6), f32(4, 5), f32(5, 6)),
    "baddbmm": lambda: call(torch.baddbmm, f32(2, 4, 6), f32(2, 4, 5), f32(2, 5, 6)),
    "dot": lambda: call(torch.dot, f32(9), f32(9)),
    "mv": lambda: call(torch.mv, f32(9, 9), f32(9)),
    "tensordot": lambda: call(torch.tensordot, f32(3, 4, 5), f32(4, 5, 6), 2),
    "bmm_out_fp32": lambda: call(
        torch.bmm, bf16(2, 4, 8, grad=False), bf16(2, 8, 4, grad=False), out_dtype=torch.float32
    ),
    "addmm_act": lambda: call(
        torch._addmm_activation, bf16(6, grad=False), bf16(4, 5, grad=False), bf16(5, 6, grad=False), use_gelu=True
    ),
    "tensor_cpu_scalar": lambda: call(torch.mul, bf16(2, 8), torch.tensor(2.0)),
}


def scaled_mm(public: bool) -> Program:
    a = torch.empty(32, 64, device="meta").to(torch.float8_e4m3fn)
    b = torch.empty(48, 64, device="meta").to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device="meta")
    if not public:
        return call(torch._scaled_mm, a, b, scale, scale, out_dtype=torch.bfloat16)
    whole = F.ScalingType.TensorWise
    return call(F.scaled_mm, a, b, scale, whole, scale, whole, output_dtype=torch.bfloat16)


def grouped_mm(function: Callable[..., Any]) -> Program:
    ends = torch.zeros(4, device="meta", dtype=torch.int32)
    return call(function, bf16(32, 64), bf16(4, 64, 48), offs=ends)


def integer(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(*shape, device="meta", dtype=dtype)


LOW_PRECISION: dict[str, Callable[[], Program]] = {
    "scaled_mm": lambda: scaled_mm(public=False),
    "F_scaled_mm": lambda: scaled_mm(public=True),
    "grouped_mm": lambda: grouped_mm(torch._grouped_mm),
    "F_grouped_mm": lambda: grouped_mm(F.grouped_mm),
    "int_mm": lambda: call(torch._int_mm, integer(torch.int8, 32, 64), integer(torch.int8, 64, 48)),
    "int4_mm": lambda: call(
        aten._weight_int4pack_mm,
        bf16(32, 64, grad=False),
        integer(torch.int32, 6, 1, 32, 4),
        32,
        bf16(2, 48, 2, grad=False),
    ),
    "int8_mm": lambda: call(
        torch._weight_int8pack_mm, bf16(32, 64, grad=False), integer(torch.int8, 48, 64), bf16(48, grad=False)
    ),
}

# --- convolutions, recurrent networks, pooling, images -------------------------------------------------------------

VISION: dict[str, Callable[[], Program]] = {
    "conv2d": lambda: call(module(lambda: nn.Conv2d(8, 16, 3, padding=1)), f32(2, 8, 16, 16)),
    "conv2d_same": lambda: call(module(lambda: nn.Conv2d(8, 16, 4, padding="same")), f32(2, 8, 16, 16)),
    "conv2d_nbf16": lambda: call(F.conv2d, bf16(2, 8, 16, 16), bf16(16, 8, 3, 3)),
    "conv1d": lambda: call(module(lambda: nn.Conv1d(8, 16, 3)), f32(2, 8, 16)),
    "conv3d": lambda: call(module(lambda: nn.Conv3d(8, 16, 3)), f32(2, 8, 6, 6, 6)),
    "convT2d": lambda: call(module(lambda: nn.ConvTranspose2d(8, 16, 3)), f32(2, 8, 6, 6)),
    "lstmcell": lambda: first(module(lambda: nn.LSTMCell(8, 16)), f32(2, 8)),
    "grucell": lambda: call(module(lambda: nn.GRUCell(8, 16)), f32(2, 8)),
    "maxpool": lambda: call(F.max_pool2d, f32(2, 4, 8, 8), 2),
    "maxpool_ng": lambda: call(F.max_pool2d, f32(2, 4, 8, 8, grad=False), 2),
    "avgpool": lambda: call(F.avg_pool2d, f32(2, 4, 8, 8), 2),
    "adapool1": lambda: call(F.adaptive_avg_pool2d, f32(2, 4, 8, 8), 1),
    "adapool3": lambda: call(F.adaptive_avg_pool2d, f32(2, 4, 8, 8), 3),
    "grid_sample_zero": lambda: call(F.grid_sample, f32(2, 4, 8, 8), f32(2, 8, 8, 2), align_corners=False),
    "affine_grid": lambda: call(F.affine_grid, f32(2, 2, 3), (2, 4, 8, 8), align_corners=True),
    "interp_bilinear": lambda: call(F.interpolate, f32(2, 4, 8, 8), scale_factor=2, mode="bilinear"),
    "interp_nearest": lambda: call(F.interpolate, f32(2, 4, 8, 8), scale_factor=2),
    "interp_bicubic_aa": lambda: call(F.interpolate, f32(2, 3, 8, 8), size=4, mode="bicubic", antialias=True),
    "unfold": lambda: call(F.unfold, f32(2, 4, 8, 8), 3),
    "pad_reflect": lambda: call(F.pad, f32(2, 4, 8, 8), (1, 1, 1, 1), mode="reflect"),
    "pad_const": lambda: call(F.pad, f32(2, 4, 8, 8), (1, 1)),
    "pixel_shuffle": lambda: call(F.pixel_shuffle, f32(2, 4, 8, 8), 2),
}

# --- embedding and losses ------------------------------------------------------------------------------------------


def cosine_embedding() -> Program:
    return call(F.cosine_embedding_loss, f32(4, 8), f32(4, 8), f32(4, grad=False))


LOSSES: dict[str, Callable[[], Program]] = {
    "embedding": lambda: call(module(lambda: nn.Embedding(100, 16, padding_idx=0)), index(4, 7)),
    "embedding_bag": lambda: call(module(lambda: nn.EmbeddingBag(100, 16, mode="sum")), index(4, 7)),
    "emb_renorm": lambda: call(module(lambda: nn.Embedding(10, 4, max_norm=1.0)), index(3)),
    "cross_entropy": lambda: call(F.cross_entropy, f32(8, 100), index(8)),
    "cross_entropy_ls": lambda: call(F.cross_entropy, f32(8, 100), index(8), label_smoothing=0.1),
    "cross_entropy_w": lambda: call(F.cross_entropy, f32(8, 100), index(8), f32(100, grad=False)),
    "cross_entropy_prob": lambda: call(F.cross_entropy, f32(8, 100), f32(8, 100, grad=False)),
    "cross_entropy_2d": lambda: call(F.cross_entropy, f32(2, 10, 6, 6), index(2, 6, 6)),
    "cross_entropy_bf16": lambda: call(F.cross_entropy, bf16(8, 100), index(8)),
    "bce_logits": lambda: call(F.binary_cross_entropy_with_logits, f32(8), f32(8, grad=False)),
    "mse": lambda: call(F.mse_loss, f32(8), f32(8, grad=False)),
    "kl_div": lambda: call(F.kl_div, f32(8, 4), f32(8, 4, grad=False), reduction="batchmean"),
    "smooth_l1": lambda: call(F.smooth_l1_loss, f32(8, 4), f32(8, 4, grad=False)),
    "cosine_emb": cosine_embedding,
    "cosine_sim": lambda: call(F.cosine_similarity, f32(4, 8), f32(4, 8)),
    "linear_ce": lambda: call(F.linear_cross_entropy, f32(8, 16), f32(100, 16), index(8)),
}

# --- activations, indexing, reductions, linear algebra -------------------------------------------------------------

ACTIVATIONS = (
    *("gelu", "silu", "softmax", "log_softmax", "glu", "relu", "elu", "mish", "hardswish", "softplus"),
    *("leaky_relu", "celu", "logsigmoid", "tanh", "sigmoid"),
)


def activation(name: str) -> Program:
    return call(getattr(F, name), bf16(4, 8), **({"dim": -1} if "softmax" in name else {}))


def masked_softmax() -> Program:
    x, mask = f32(2, 4, 8, 8), torch.ones(8, 8, device="meta", dtype=torch.bool)
    return lambda: torch.softmax(x.masked_fill(mask, float("-inf")), -1)


def linalg(name: str) -> Program:
    x, position = f32(6, 6), 1 if name == "slogdet" else 0

    def run() -> Tensor:
        result = getattr(torch.linalg, name)(x)
        return result if isinstance(result, Tensor) else result[position]

    return run


def on(tensor: Tensor, program: Callable[[Tensor], Any]) -> Program:
    return lambda: program(tensor)


def indexed(program: Callable[[Tensor, Tensor], Any], *shape: int) -> Program:
    x, i = f32(10, 4), index(*shape)
    return lambda: program(x, i)


def stft() -> Program:
    x = f32(2, 400, grad=False)
    return lambda: torch.stft(x, 64, return_complex=True, window=torch.ones(64, device="meta"))


def isin() -> Program:
    x = index(5)
    return lambda: torch.isin(x, x)


def joined(function: Callable[..., Any]) -> Program:
    x = f32(5)
    return lambda: function([x, x])


TENSOR_OPS: dict[str, Callable[[], Program]] = {
    **{f"act_{name}": partial(activation, name) for name in ACTIVATIONS},
    "softmax_dtype": lambda: call(F.softmax, bf16(4, 8), -1, dtype=torch.float32),
    "log_softmax_dtype": lambda: call(F.log_softmax, bf16(4, 8), -1, dtype=torch.float32),
    "softmax_fp16_dtype": lambda: call(F.softmax, f16(4, 8), -1, dtype=torch.float32),
    "log_softmax_fp16_dtype": lambda: call(F.log_softmax, f16(4, 8), -1, dtype=torch.float32),
    "rrelu": lambda: call(F.rrelu, f32(4, 8), training=True),
    "prelu": lambda: call(module(nn.PReLU), f32(4, 8)),
    "gumbel": lambda: call(F.gumbel_softmax, f32(4, 8)),
    "masked_softmax": masked_softmax,
    "index_get": lambda: indexed(lambda x, i: x[i], 5),
    "index_select": lambda: indexed(lambda x, i: x.index_select(0, i), 5),
    "gather": lambda: indexed(lambda x, i: x.gather(1, i), 10, 4),
    "take_along": lambda: indexed(lambda x, i: torch.take_along_dim(x, i, 1), 10, 4),
    "scatter_add": lambda: call(torch.scatter_add, f32(10, 4), 0, index(10, 4), f32(10, 4)),
    "index_put": lambda: call(torch.index_put, f32(10, 4), (index(5),), f32(5, 4)),
    "index_add": lambda: call(torch.index_add, f32(10, 4), 0, index(5), f32(5, 4)),
    "one_hot": lambda: call(F.one_hot, index(5), 10),
    "topk": lambda: first(torch.topk, f32(10, 40), 3),
    "sort": lambda: first(torch.sort, f32(10, 40), stable=True),
    "argsort": lambda: call(torch.argsort, f32(10, 40, grad=False)),
    "multinomial": lambda: call(torch.multinomial, f32(10, 40, grad=False), 1),
    "cumsum": lambda: call(torch.cumsum, bf16(10, 40), -1),
    "searchsorted": lambda: call(torch.searchsorted, *2 * [f32(10, grad=False)]),
    "tril": lambda: call(torch.tril, f32(8, 8)),
    "roll": lambda: call(torch.roll, f32(8, 8), 1, 0),
    "repeat_interleave_int": lambda: call(torch.repeat_interleave, f32(8, 8), 3, 0),
    "cdist": lambda: call(torch.cdist, *2 * [f32(30, 8)]),
    "norm": lambda: on(f32(30, 8), lambda x: x.norm()),
    "vnorm": lambda: call(torch.linalg.vector_norm, f32(30, 8), dim=-1),
    "var": lambda: call(torch.var, f32(30, 8), -1),
    "std_mean": lambda: first(torch.std_mean, f32(30, 8), -1),
    "logsumexp": lambda: call(torch.logsumexp, f32(30, 8), -1),
    "median": lambda: first(torch.median, f32(30, 8), -1),
    "quantile": lambda: call(torch.quantile, f32(30, 8), 0.5, -1),
    "randperm": lambda: call(torch.randperm, 100, device="meta"),
    "rand": lambda: call(torch.randn, 3, 4, device="meta"),
    "isin": isin,
    "clamp": lambda: call(torch.clamp, f32(5), 0, 1),
    "cat": lambda: joined(torch.cat),
    "stack": lambda: joined(torch.stack),
    "to_bf16": lambda: on(f32(5), lambda x: x.to(torch.bfloat16)),
    "contiguous": lambda: on(f32(5, 6), lambda x: x.t().contiguous()),
    "conj_fft": lambda: on(f32(5, 6), lambda x: torch.fft.rfft(x).abs()),
    "irfft": lambda: on(f32(5, 6), lambda x: torch.fft.irfft(torch.fft.rfft(x))),
    "stft": stft,
    **{
        f"linalg_{name}": partial(linalg, name)
        for name in ("cholesky", "inv", "qr", "svd", "eigh", "det", "slogdet", "lu_factor")
    },
    "linalg_solve": lambda: call(torch.linalg.solve, f32(6, 6), f32(6, 2)),
}

# --- training: averaging, checkpointing, transforms, autocast ------------------------------------------------------


def ema() -> Program:
    model = module(lambda: nn.Linear(4, 4))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
    average.update_parameters(model)
    return lambda: average.update_parameters(model)


def checkpointed(reentrant: bool) -> Program:
    layers = module(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    return call(checkpoint, layers, f32(2, 8), use_reentrant=reentrant)


bf16_autocast = partial(torch.autocast, "cuda", torch.bfloat16)


def autocast(program: Callable[[Tensor, Tensor], Any]) -> Program:
    x, w = f32(64, 64), nn.Parameter(torch.empty(64, 64, device="meta"))
    return under(bf16_autocast, lambda: program(x, w))


def autocast_sdpa(x: Tensor, w: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(tensor.view(1, 1, *tensor.shape) for tensor in (x, w, w)))


AUTOCAST: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda x, w: F.linear(x, w),
    "mm_ln": lambda x, w: F.layer_norm(x @ w, (64,)),
    "sm": lambda x, w: torch.softmax(x @ w, -1),
    "rms": lambda x, w: F.rms_norm(x @ w, (64,)),
    "add": lambda x, w: x + (x @ w),
    "sdpa": autocast_sdpa,
    "ce": lambda x, w: F.cross_entropy(x @ w, index(64)),
    "twice": lambda x, w: (x @ w) @ w,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "sum": lambda x, w: (x @ w).sum(),
    "pow": lambda x, w: (x @ w) ** 2,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "cat": lambda x, w: torch.cat([x, x @ w]),
    "gelu": lambda x, w: F.gelu(x @ w),
    "mse": lambda x, w: F.mse_loss(x @ w, x),
    "drop": lambda x, w: F.dropout(x @ w, 0.1),
    "emb": lambda x, w: F.embedding(index(5), w),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "norm": lambda x, w: (x @ w).norm(),
    "conv": lambda x, w: F.conv1d(x[None], w[:, :, None]),
}


def vmap_sdpa() -> Program:
    q = bf16(2, 3, 4, 16, 64, grad=False)
    return lambda: torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(q)


def grad_sdpa() -> Program:
    q = bf16(3, 4, 16, 64, grad=False)
    return lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())(q)


TRAINING: dict[str, Callable[[], Program]] = {
    "ema_swa": ema,
    "ckpt_nonreent": lambda: checkpointed(reentrant=False),
    "ckpt_reent": lambda: checkpointed(reentrant=True),
    "vmap_sdpa": vmap_sdpa,
    "grad_sdpa": grad_sdpa,
    **{f"ac_{name}": partial(autocast, program) for name, program in AUTOCAST.items()},
    "ac_mha": lambda: under(bf16_autocast, mha(True)),
    "ac_tel": lambda: under(bf16_autocast, encoder_layer(True)),
}


def step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Program:
    parameters = [nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.empty(4, 4, device="meta")

    def run() -> None:
        stepper = optimizer(parameters, **options)
        stepper.step()
        stepper.zero_grad()

    return run


OPTIMIZERS: dict[str, Callable[[], Program]] = {
    "opt_AdamW_fused": lambda: step(torch.optim.AdamW, fused=True),
    "opt_SGD_fused": lambda: step(torch.optim.SGD, lr=0.1, fused=True),
    "opt_Adagrad_fused": lambda: step(torch.optim.Adagrad, fused=True),
}
"""The other recorded optimizers ran the for-loop: their parameters were FakeTensors, which foreach refuses."""

CASES: dict[str, Callable[[], Program]] = {
    **ATTENTION,
    **NORMS,
    **MATMULS,
    **LOW_PRECISION,
    **VISION,
    **LOSSES,
    **TENSOR_OPS,
    **TRAINING,
    **OPTIMIZERS,
}

# --- recorded of torch 2.15 alone -----------------------------------------------------------------------------------


def checkpointed_under_autocast(reentrant: bool) -> Program:
    layers = module(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8)))
    return under(bf16_autocast, call(checkpoint, layers, f32(2, 8), use_reentrant=reentrant))


def transformed(transform: Callable[..., Any], function: Callable[[Tensor], Tensor], **options: Any) -> Program:
    x = f32(3, 4, 16, grad=False)
    return lambda: transform(function, **options)(x)


CASES_OF_2_15: dict[str, Callable[[], Program]] = {
    "vmap_drop": lambda: transformed(torch.vmap, lambda x: F.dropout(x, 0.1), randomness="different"),
    "vmap_rms": lambda: transformed(torch.vmap, lambda x: F.rms_norm(x, (16,))),
    "grad_drop": lambda: transformed(torch.func.grad, lambda x: F.dropout(x, 0.1).sum()),
    "grad_rms": lambda: transformed(torch.func.grad, lambda x: F.rms_norm(x, (16,)).sum()),
    "ckac_nr": lambda: checkpointed_under_autocast(reentrant=False),
    "ckac_re": lambda: checkpointed_under_autocast(reentrant=True),
    "opt_Muon": lambda: step(torch.optim.Muon),
    "opt_AdamW_foreach": lambda: step(torch.optim.AdamW, foreach=True),
}
