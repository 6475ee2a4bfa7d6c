"""torch.autocast("cuda") on meta tensors: lists, weight cache, nesting, threads, custom functions, recomputation."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from as_cuda_stream import Stream, bf16, f32, module, ops_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flopmeter.as_cuda import CudaTarget, autocast, emulate_cuda

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulate_cuda(CudaTarget((9, 0))):
        yield


# --- the lists -----------------------------------------------------------------------------------------------------

HEADER = {
    "lower_precision_fp": """_convolution _convolution.deprecated conv{1d,2d,3d} conv_tbc conv_transpose1d
        conv_transpose{2d,3d}.input convolution cudnn_convolution cudnn_convolution_transpose prelu add{mm,mv,r,bmm}
        matmul einsum mm mv linalg_vecdot linear baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_{lstm,gru}_cell {lstm,gru,rnn_tanh,rnn_relu}_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "fp32": """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        pow.{Tensor_Scalar,Tensor_Tensor,Scalar} softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss
        nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_{nearest1d,nearest2d,nearest3d,linear1d,bilinear2d,trilinear3d,bicubic2d}
        _upsample_nearest_exact{1d,2d,3d} _upsample_{bilinear2d,bicubic2d}_aa""",
    "fp32_set_opt_dtype": """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    "fp32_append_dtype": "norm.Scalar norm.ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
}
"""ATen/autocast_mode.h of torch 2.13, AT_FORALL_*."""


def expanded(names: str) -> set[str]:
    """{a,b} stands for either."""
    found = set()
    for name in re.split(r"\s+", names):
        head, braces, rest = name.partition("{")
        alternatives, _, tail = rest.partition("}")
        found |= {f"{head}{each}{tail}" for each in alternatives.split(",")} if braces else {name}
    return found


def test_each_list_is_the_headers() -> None:
    assert expanded(HEADER["lower_precision_fp"]) == autocast.LOWER_PRECISION
    assert expanded(HEADER["fp32"]) | {"linalg_matrix_sqrth"} == autocast.FP32  # torch 2.14 registers it apart
    assert expanded(HEADER["fp32_set_opt_dtype"]) == autocast.FP32_SET_DTYPE
    assert expanded(HEADER["fp32_append_dtype"]) == set(autocast.FP32_APPEND_DTYPE)
    assert expanded(HEADER["promote"]) == autocast.PROMOTE
    assert expanded(HEADER["banned"]) == autocast.BANNED


def test_the_lists_hold_every_op_that_this_build_autocasts() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    built = {name.removeprefix("aten::") for name in names if has_kernel(name, "AutocastCUDA")}
    built -= {"_cudnn_rnn"}  # a wrapper of its own, and only in CUDA builds
    built = {name for name in built if not re.search(r"\..*[nN]ame", name)}  # named tensors, gone since 2.13
    assert built == set(autocast.autocast_ops())


def dtypes(program: Any, dtype: torch.dtype = BF16) -> torch.dtype:
    with torch.autocast("cuda", dtype):
        result = program()
    return (result if isinstance(result, Tensor) else result[0]).dtype


def test_each_list_does_what_it_says() -> None:
    x, half = f32(8, 8), bf16(8, 8)
    assert dtypes(lambda: x @ x) == BF16
    assert dtypes(lambda: F.layer_norm(half, (8,))) == torch.float32
    assert dtypes(lambda: half.sum()) == torch.float32
    assert dtypes(lambda: torch.sum(half, 0, dtype=BF16)) == BF16  # asked for
    assert dtypes(lambda: torch.softmax(half, -1)) == torch.float32
    assert dtypes(lambda: torch.ops.aten.norm.Scalar(half, 2)) == torch.float32
    assert dtypes(lambda: torch.ops.aten.norm.Scalar(half)) == torch.float32
    assert dtypes(lambda: torch.ops.aten.norm.ScalarOpt_dim(half, 2, [1])) == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.ops.aten.norm.ScalarOpt_dim(half, 2, [1]).shape == half.shape[:1]  # keepdim is False by default
    assert dtypes(lambda: torch.ops.aten.norm.ScalarOpt_dim(half, 2, [1], True)) == torch.float32
    assert dtypes(lambda: torch.dot(x[0], half[0])) == torch.float32  # the widest
    assert dtypes(lambda: torch.dot(half[0], half[0])) == BF16
    assert dtypes(lambda: F.gelu(x)) == torch.float32  # not listed
    assert dtypes(lambda: F.linear(x, x), torch.float16) == torch.float16


def test_fp64_and_integers_are_not_cast() -> None:
    double = f32(4, 4, dtype=torch.float64)
    assert dtypes(lambda: double @ double) == torch.float64
    assert dtypes(lambda: torch.zeros(4, 4, dtype=torch.int32, device="meta").cumsum(0)) == torch.int64


def test_lists_of_tensors_are_cast() -> None:
    assert dtypes(lambda: torch.linalg.multi_dot([f32(4, 4), f32(4, 4), bf16(4, 4)])) == BF16


def test_the_banned_op_raises_torchs_error() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(f32(4), f32(4, grad=False))


def test_a_stray_dtype_in_a_promoting_op_is_torchs_error() -> None:
    half = torch.empty(4, dtype=torch.float16, device="meta")
    with torch.autocast("cuda", BF16), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.dot(half, half)


def test_cross_entropy_casts_its_log_probabilities_for_the_loss() -> None:
    """log_softmax stays in bf16, since the composite asks for a dtype; nll_loss then wants fp32: a pass over [N, V]."""
    logits, labels = bf16(8, 1000), torch.zeros(8, dtype=torch.long, device="meta")
    with torch.autocast("cuda", BF16), Stream() as stream:
        F.cross_entropy(logits, labels)
    kept = [op for op in stream.ops if not op.startswith("detach")]
    assert kept == ["_log_softmax.default:bfloat16", "_to_copy.default:float32", "nll_loss_forward.default:float32"]


# --- state ---------------------------------------------------------------------------------------------------------


def test_regions_nest_and_can_be_disabled() -> None:
    x = f32(4, 4)
    with torch.autocast("cuda", BF16):
        assert (x @ x).dtype == BF16
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
            with torch.autocast("cuda", torch.float16):
                assert (x @ x).dtype == torch.float16
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == BF16
    assert (x @ x).dtype == torch.float32


def test_the_default_dtype_is_cudas() -> None:
    with torch.autocast("cuda"):
        assert (f32(4, 4) @ f32(4, 4)).dtype == torch.float16


def test_older_spellings_and_the_device_type_of_a_tensor_work() -> None:
    x = f32(4, 4)
    with pytest.warns(FutureWarning):
        older = torch.cuda.amp.autocast(dtype=BF16)
    with older:
        assert (x @ x).dtype == BF16
    with torch.autocast(device_type=x.device.type, dtype=BF16):  # "cuda" on CUDA
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled(x.device.type)
        assert (x @ x).dtype == BF16

    @torch.autocast("cuda", dtype=BF16)
    def decorated(x: Tensor) -> Tensor:
        return x @ x

    assert decorated(x).dtype == BF16


def test_the_region_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), torch.autocast("cuda", BF16):
        raise KeyError
    assert (f32(4, 4) @ f32(4, 4)).dtype == torch.float32


def test_autocast_is_of_the_thread_that_asked_for_it() -> None:
    x, results = f32(4, 4), []

    def other_thread() -> None:
        results.append((x @ x).dtype)
        with torch.autocast("cuda", torch.float16):
            results.append((x @ x).dtype)
        results.append((x @ x).dtype)

    with torch.autocast("cuda", BF16):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert (x @ x).dtype == BF16
    assert results == [torch.float32, torch.float16, torch.float32]


def test_cpu_autocast_is_another_switch_for_cpu_tensors_and_cudas_for_those_on_meta() -> None:
    with torch.autocast("cpu", BF16):
        assert (f32(4, 4) @ f32(4, 4)).dtype == BF16
        assert F.layer_norm(bf16(4, 8), (8,)).dtype == torch.float32  # on CUDA's list, and not on the CPU's
        assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == BF16
    with torch.autocast("cuda", BF16):
        assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.float32


def test_under_inference_mode_linear_is_cast() -> None:
    with torch.inference_mode(), torch.autocast("cuda", BF16):
        assert F.linear(f32(4, 4, grad=False), f32(4, 4, grad=False)).dtype == BF16


# --- the weight cache ----------------------------------------------------------------------------------------------


def casts(program: Any) -> int:
    return ops_of(program).count("_to_copy")


def test_a_weight_is_cast_once_a_region_and_an_activation_each_time() -> None:
    layer, x = module(lambda: nn.Linear(4, 4, bias=False)), f32(2, 4, grad=False)
    with torch.autocast("cuda", BF16):
        assert casts(lambda: layer(x)) == 2
        assert casts(lambda: layer(x)) == 1
        with torch.autocast("cuda", BF16):  # an inner end does not clear
            assert casts(lambda: layer(x)) == 1
        assert casts(lambda: layer(x)) == 1
    with torch.autocast("cuda", BF16):
        assert casts(lambda: layer(x)) == 2


def test_the_cache_can_be_off_and_holds_only_leaves_that_learn() -> None:
    layer, x = module(lambda: nn.Linear(4, 4, bias=False)), f32(2, 4, grad=False)
    with torch.autocast("cuda", BF16, cache_enabled=False):
        assert casts(lambda: layer(x)) == casts(lambda: layer(x)) == 2
    layer.requires_grad_(False)
    with torch.autocast("cuda", BF16):
        assert casts(lambda: layer(x)) == casts(lambda: layer(x)) == 2


def test_the_gradient_of_a_shared_cast_reaches_the_weight_in_fp32() -> None:
    layer, x = module(lambda: nn.Linear(4, 4, bias=False)), f32(2, 4, grad=False)
    with torch.autocast("cuda", BF16):
        loss = (layer(x) + layer(x)).sum()
    with Stream() as stream:
        loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert stream.names.count("mm") == 2
    assert stream.names.count("_to_copy") == 1 + 1  # the fp32 sum's gradient, and the weight's, added up in bf16


def test_a_weight_that_dies_in_a_region_does_not_lend_its_cast_to_another() -> None:
    x = f32(2, 4, grad=False)
    with torch.autocast("cuda", BF16):
        for _ in range(20):
            weight = nn.Parameter(torch.empty(4, 4, device="meta"))
            assert casts(lambda weight=weight: F.linear(x, weight)) == 2


# --- custom functions, recomputation, recurrent networks, gradients ------------------------------------------------


def test_custom_fwd_and_bwd_see_autocast() -> None:
    seen: dict[str, Any] = {}

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            seen["forward"] = a.dtype, torch.is_autocast_enabled("cuda")
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            seen["backward"] = torch.is_autocast_enabled("cuda")
            return gradient @ b.t(), a.t() @ gradient

    class Scale(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen["autocast backward"] = torch.is_autocast_enabled("cuda")
            return gradient.float()

    with torch.autocast("cuda", BF16):
        product = Product.apply(bf16(4, 4), f32(4, 4))
        scaled = Scale.apply(f32(4, 4))
    product.sum().backward()
    scaled.sum().backward()
    assert product.dtype == torch.float32
    assert scaled.dtype == BF16
    assert seen == {"forward": (torch.float32, False), "backward": False, "autocast backward": True}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_under_autocast(reentrant: bool) -> None:
    layers = module(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8)))
    with torch.autocast("cuda", BF16), Stream() as forward:
        output = checkpoint(layers, f32(2, 8), use_reentrant=reentrant)
    with Stream() as backward:
        output.backward(torch.empty_like(output))
    products = [op for op in forward.ops if op.startswith("addmm")]
    recomputed = [op for op in backward.ops if op.startswith("addmm")]
    assert products == ["addmm.default:bfloat16"] * 2
    # Without reentry, recomputation stops once the last saved tensor is there: before the second product.
    assert recomputed == products[: 2 if reentrant else 1]
    assert "native_dropout" in backward.names


def test_a_recurrent_network_runs_in_fp16_on_copies_of_its_weights() -> None:
    """Whatever autocast's dtype is: core's wrapper says kHalf."""
    lstm, x = module(lambda: nn.LSTM(8, 16)), f32(5, 2, 8)
    with torch.autocast("cuda", BF16), Stream() as stream:
        output, _ = lstm(x)
    assert output.dtype == torch.float16
    assert stream.names.count("copy_") == 4  # two weights, two biases
    assert stream.names.count("_cudnn_rnn") == 1
    output.sum().backward()
    for parameter in (x, *lstm.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_transforms_see_autocast() -> None:
    x = f32(3, 4, 4, grad=False)
    with torch.autocast("cuda", BF16), Stream() as stream:
        torch.vmap(lambda x: x @ x)(x)
        torch.func.grad(lambda x: (x @ x).sum())(x)
    products = [op for op in stream.ops if op.startswith("bmm")]
    assert len(products) >= 3
    assert all(op.endswith("bfloat16") for op in products)
