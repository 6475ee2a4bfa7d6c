"""The emulation of CUDA's dispatch: recorded streams, composites, RNNs, optimizers, module fast paths."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from as_cuda_cases import CASES as CASES_OF_ALL
from as_cuda_cases import CASES_OF_2_15
from as_cuda_stream import Program, Stream, bf16, f16, f32, module, ops_of, record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter import FlopMeter
from flopmeter.as_cuda import CudaTarget, Emulation, dynamo, emulate_cuda
from flopmeter.torch_names import dispatcher

H100 = CudaTarget((9, 0))


def _recordings(name: str) -> dict[str, dict[str, dict[str, str]]]:
    streams: dict[str, dict[str, dict[str, str]]] = json.loads((Path(__file__).parent / "data" / name).read_text())
    return streams


RUNNING = dispatcher.running_version()
OF_2_13, CHANGED_IN_2_15 = _recordings("cuda_streams.json"), _recordings("cuda_streams_2.15.json")
RECORDED = {**OF_2_13, **(CHANGED_IN_2_15 if RUNNING >= (2, 15) else {})}
CASES = {**CASES_OF_ALL, **(CASES_OF_2_15 if RUNNING >= (2, 15) else {})}

DIFFERENT = {
    "one_hot": "recorded with fake tensors, which one_hot takes for meta's; a GPU's it scatters into zeros (Onehot.cpp)"
}
"""Cases whose stream is not the recorded one, with the reason. A case that starts to match must leave."""


@pytest.fixture
def h100() -> Iterator[Emulation]:
    with emulate_cuda(H100) as emulation:
        yield emulation


def recorded(name: str, sm: int) -> dict[str, str]:
    """`lift_fresh` is the host's probe of bf16 support, once a process (or a counter of steps): it runs no kernel."""
    (streams,) = [streams for sms, streams in RECORDED[name].items() if str(sm) in sms.removeprefix("sm").split("_")]
    return {part: _without_numbers_of_the_host(ops) for part, ops in streams.items()}


def _without_numbers_of_the_host(ops: str) -> str:
    return " ".join(op for op in ops.split() if "lift_fresh" not in op)


# --- against the recorded streams ----------------------------------------------------------------------------------


of_a_recorded_torch = pytest.mark.skipif(
    RUNNING not in dispatcher.COMPARED_VERSIONS, reason="the streams are those of other torches"
)


@of_a_recorded_torch
@pytest.mark.parametrize("sm", [75, 80, 90])
def test_every_recorded_program_dispatches_the_ops_that_cuda_did(sm: int) -> None:
    assert CASES.keys() == RECORDED.keys()
    was_recorded_without = torch.backends.opt_einsum.flags(enabled=False)  # type: ignore[no-untyped-call]
    with was_recorded_without, emulate_cuda(CudaTarget(divmod(sm, 10))):
        different = {name for name, case in CASES.items() if record_or_error(case) != recorded(name, sm)}
    assert different == DIFFERENT.keys()


def record_or_error(case: Callable[[], Program]) -> dict[str, str]:
    """An error is recorded as CUDA's, with what went before."""
    try:
        return {part: _without_numbers_of_the_host(ops) for part, ops in record(case).items()}
    except RuntimeError as error:
        return {"fwd": f"!! RuntimeError: {error}"}


@of_a_recorded_torch
def test_the_recordings_are_not_what_meta_does_by_itself() -> None:
    """Else the test above would prove nothing. 161 of 243 agree without the emulation, or up to 188 on sm 7.5."""
    names = [name for name in CASES if not name.startswith("opt_")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast says that it is off
        same = sum(_record_or_none(name) == recorded(name, 90) for name in names if name != "int4_mm")
    assert same < 170


def _record_or_none(name: str) -> dict[str, str] | None:
    try:
        return record(CASES[name])
    except RuntimeError:  # checkpointing under autocast
        return None


# --- composites ----------------------------------------------------------------------------------------------------


def test_dropout_is_one_kernel_with_a_bool_mask(h100: Emulation) -> None:
    assert ops_of(lambda: F.dropout(f32(4, 64), 0.1)) == ["empty", "native_dropout"]


def test_dropout_of_nothing_launches_nothing(h100: Emulation) -> None:
    """Dropout.cpp returns an input without elements as it is."""
    x = f32(0, 64)
    assert ops_of(lambda: F.dropout(x, 0.1)) == []


def test_rms_norm_is_fused_where_weight_and_input_agree(h100: Emulation) -> None:
    x = bf16(4, 64)
    assert "_fused_rms_norm" in ops_of(lambda: F.rms_norm(x, (64,), bf16(64)))
    assert "_fused_rms_norm" not in ops_of(lambda: F.rms_norm(x, (64,), f32(64)))


def test_rms_norm_keeps_one_statistic_a_row_in_fp32(h100: Emulation) -> None:
    _, reciprocal = torch.ops.aten._fused_rms_norm(bf16(2, 3, 8, 16), [8, 16], None, None)
    assert reciprocal.shape == (2, 3, 1, 1)
    assert reciprocal.dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "weight_dtype", "dtype", "cudnn"),
    [
        ((8, 16, 4, 4), torch.float32, torch.float32, True),
        ((8, 16, 4, 4), torch.float32, torch.float16, True),  # autocast's case
        ((8, 16, 4, 4), torch.float16, torch.float16, False),
        ((8, 16, 4, 4), torch.float32, torch.bfloat16, False),
        ((8, 16), torch.float32, torch.float32, False),
        ((880802, 16, 1), torch.float32, torch.float32, False),
    ],
)
def test_batch_norm_is_cudnns_where_cudnn_takes_the_case(
    h100: Emulation, shape: tuple[int, ...], weight_dtype: torch.dtype, dtype: torch.dtype, cudnn: bool
) -> None:
    x = torch.empty(shape, device="meta", dtype=dtype)
    weight, bias = (torch.empty(16, device="meta", dtype=weight_dtype) for _ in range(2))
    mean, var = f32(16, grad=False), f32(16, grad=False)
    ran = ops_of(lambda: F.batch_norm(x, mean, var, weight, bias, training=True))
    assert ("cudnn_batch_norm" in ran) is cudnn
    with torch.backends.cudnn.flags(enabled=False):
        assert "cudnn_batch_norm" not in ops_of(lambda: F.batch_norm(x, mean, var, weight, bias, training=True))


def test_batch_norm_of_a_wrong_size_is_torchs_error(h100: Emulation) -> None:
    with pytest.raises(RuntimeError, match="running_mean should contain 16 elements"):
        F.batch_norm(f32(8, 16, 4, 4), f32(4, grad=False), f32(4, grad=False), f32(4), f32(4), training=True)


def test_vmap_and_grad_of_dropout_and_rms_norm_reach_the_fused_kernels(h100: Emulation) -> None:
    x = f32(3, 4, 16, grad=False)
    assert "native_dropout" in ops_of(lambda: torch.func.grad(lambda x: F.dropout(x, 0.1).sum())(x))
    assert "native_dropout" in ops_of(lambda: torch.vmap(lambda x: F.dropout(x, 0.1), randomness="different")(x))
    assert "_fused_rms_norm" in ops_of(lambda: torch.func.grad(lambda x: F.rms_norm(x, (16,)).sum())(x))
    gradient = torch.vmap(torch.func.grad(lambda x: F.dropout(x, 0.1).sum()), randomness="different")(x)
    assert gradient.shape == x.shape


def test_layer_norm_of_another_type_than_its_input_raises_as_on_cuda(h100: Emulation) -> None:
    """Torch's simulated CUDA tensors have said so since 2.14; autocast and an input without rows are let through."""
    if RUNNING < (2, 14):
        pytest.skip("this torch's simulated CUDA tensors run on")
    layer = module(lambda: nn.LayerNorm(64))
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        layer(bf16(4, 64))
    assert ops_of(lambda: layer(bf16(0, 64)))[-1] == "native_layer_norm"
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(bf16(4, 64)).dtype == torch.float32


# --- recurrent networks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_is_one_op_forward_and_one_backward(h100: Emulation, kind: type[nn.RNNBase]) -> None:
    network = module(lambda: kind(8, 16, 2, bidirectional=True, batch_first=True, dropout=0.1))
    x = f32(3, 5, 8)
    with Stream() as forward:
        output, _ = network(x)
    with Stream() as backward:
        output.sum().backward()
    assert output.shape == (3, 5, 32)
    assert forward.names.count("_cudnn_rnn") == backward.names.count("_cudnn_rnn_backward") == 1
    assert not {"mm", "addmm", "bmm"} & {*forward.names, *backward.names}
    for parameter in (x, *network.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape


def test_a_projected_lstm_and_packed_sequences_are_one_op_too(h100: Emulation) -> None:
    lstm = module(lambda: nn.LSTM(8, 16, proj_size=4, bias=False))
    packed = nn.utils.rnn.pack_padded_sequence(f32(5, 2, 8), torch.tensor([5, 3]))
    with Stream() as stream:
        output, (hidden, cell) = lstm(packed)
    assert stream.names.count("_cudnn_rnn") == 1
    assert (output.data.shape, hidden.shape, cell.shape) == ((8, 4), (1, 2, 4), (1, 2, 16))


def test_a_bf16_lstm_is_cudnns_from_ampere_on(h100: Emulation) -> None:
    lstm = module(lambda: nn.LSTM(8, 16, dtype=torch.bfloat16))
    assert "_cudnn_rnn" in ops_of(lambda: lstm(bf16(5, 2, 8)))


def test_a_bf16_lstm_on_turing_is_not_cudnns_and_says_so() -> None:
    lstm = module(lambda: nn.LSTM(8, 16, dtype=torch.bfloat16))
    with emulate_cuda(CudaTarget((7, 5))) as emulation:
        assert "_cudnn_rnn" not in ops_of(lambda: lstm(bf16(5, 2, 8)))
    assert any("not a cuDNN dtype" in note for note in emulation.notes)


# --- optimizers ----------------------------------------------------------------------------------------------------


def parameters_with_gradients(count: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def device_ops(program: Any) -> Counter[str]:
    """Ops with a tensor on meta, without the zeros that make optimizer states."""

    ops: Counter[str] = Counter()

    class OnMeta(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, result))
            if any(isinstance(tensor, Tensor) and tensor.device.type == "meta" for tensor in tensors):
                ops[func._schema.name.removeprefix("aten::")] += 1
            return result

    with OnMeta():
        program()
    return ops


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax"])
def test_an_optimizer_over_300_tensors_is_a_handful_of_foreach_kernels(h100: Emulation, name: str) -> None:
    optimizer = getattr(torch.optim, name)(parameters_with_gradients(300), lr=0.1)
    optimizer.step()  # makes the states
    ran = device_ops(optimizer.step)
    assert ran.total() <= 24
    assert all(op.startswith("_foreach_") for op in ran), ran


def test_the_adamw_step_is_these_kernels(h100: Emulation) -> None:
    """Decay, first moment, second moment (2), root, bias correction, eps, update, as torch/optim/adam.py reads."""
    optimizer = torch.optim.AdamW(parameters_with_gradients(300))
    optimizer.step()
    assert device_ops(optimizer.step) == Counter(
        _foreach_mul_=2,
        _foreach_lerp_=1,
        _foreach_addcmul_=1,
        _foreach_sqrt=1,
        _foreach_div_=1,
        _foreach_add_=1,
        _foreach_addcdiv_=1,
    )


@pytest.mark.parametrize("has_tensor", [False, True])
@pytest.mark.parametrize(
    ("name", "kernel"), [("AdamW", "_fused_adamw_"), ("Adam", "_fused_adam_"), ("SGD", "_fused_sgd_")]
)
def test_a_fused_optimizer_is_one_kernel(h100: Emulation, name: str, kernel: str, has_tensor: bool) -> None:
    optimizer = getattr(torch.optim, name)(parameters_with_gradients(300), lr=0.1, fused=True)
    if has_tensor:  # as a schedule that is compiled needs it; the constructor would ask for its value
        optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    optimizer.step()
    ran = device_ops(optimizer.step)
    assert ran[kernel] == 1
    assert ran.total() <= 2  # Adam also advances its step counters


def test_a_capturable_optimizer_keeps_its_step_on_the_device(h100: Emulation) -> None:
    optimizer = torch.optim.AdamW(parameters_with_gradients(3), capturable=True)
    optimizer.step()
    assert all(state["step"].device.type == "meta" for state in optimizer.state.values())
    assert device_ops(optimizer.step)["_foreach_pow"] == 2


def test_gradient_clipping_is_foreach(h100: Emulation) -> None:
    ran = device_ops(lambda: nn.utils.clip_grad_norm_(parameters_with_gradients(300), 1.0))
    assert ran["_foreach_norm"] == ran["_foreach_mul_"] == 1
    assert ran["linalg_vector_norm"] == 1
    ran = device_ops(lambda: nn.utils.clip_grad_value_(parameters_with_gradients(300), 1.0))
    assert ran["_foreach_clamp_min_"] == ran["_foreach_clamp_max_"] == 1


def test_the_grad_scaler_is_enabled_and_unscales_in_one_kernel(h100: Emulation) -> None:
    """step() asks found_inf for its value, which no meta tensor has; fused optimizers take it as a tensor."""
    (weight,) = parameters = [nn.Parameter(torch.empty(4, 4, device="meta"))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    with Stream() as stream:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert {"mul", "_fused_adamw_", "_amp_update_scale_"} <= {*stream.names}
    plain = torch.optim.SGD(parameters, lr=0.1)
    with Stream() as stream:
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(plain)
    assert stream.names.count("_amp_foreach_non_finite_check_and_unscale_") == 1


# --- module fast paths, torch.compile --------------------------------------------------------------


def test_inference_of_attention_modules_is_one_op(h100: Emulation) -> None:
    x = f32(2, 9, 64, grad=False)
    attention = module(lambda: nn.MultiheadAttention(64, 4, batch_first=True)).eval()
    layer = module(lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)).eval()
    with torch.no_grad():
        assert ops_of(lambda: attention(x, x, x)) == ["_native_multi_head_attention"]
        assert ops_of(lambda: layer(x)) == ["_transformer_encoder_layer_fwd"]
    assert len(ops_of(lambda: layer(x))) > 10  # with gradients: the layer's own ops


def test_a_padding_mask_keeps_the_encoder_dense_and_is_noted(h100: Emulation) -> None:
    encoder = module(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)).eval()
    padding = torch.zeros(2, 9, dtype=torch.bool, device="meta")
    with torch.no_grad():
        ran = ops_of(lambda: encoder(f32(2, 9, 64, grad=False), src_key_padding_mask=padding))
    assert ran.count("_transformer_encoder_layer_fwd") == 2
    assert any("padding mask" in note for note in h100.notes)


def test_dynamo_knows_torchs_own_functions_after_a_run_that_looked_them_up_first() -> None:
    """It keeps tables by function, which it makes when it first needs them; DistributedDataParallel empties them."""
    import torch._dynamo.trace_rules as rules

    rules.get_torch_obj_rule_map.cache_clear()
    with emulate_cuda(H100):
        torch.compile(lambda x: x + 1)(torch.empty(4, device="meta"))
    assert {torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling} <= rules.get_torch_obj_rule_map().keys()


def test_a_compiled_function_runs_eagerly_and_marks_its_calls(h100: Emulation) -> None:
    seen = []

    @torch.compile
    def inner(x: Tensor) -> Tensor:
        seen.append(dynamo.compiled_region())
        return x.sin()

    @torch.compile(fullgraph=True)  # under a dispatch mode alone this raises: it finds no compiled frame
    def outer(x: Tensor) -> Tensor:
        seen.append(dynamo.compiled_region())
        return inner(x) * 2

    with Stream() as stream:
        outer(f32(4))
        seen.append(dynamo.compiled_region())
        inner(f32(4))
    assert seen == [1, 1, None, 2]  # a compiled call inside of one is inlined by the compiler
    assert [name for name in stream.names if name != "empty"] == ["sin", "mul", "sin"]
    assert any("torch.compile" in note for note in h100.notes)


def test_a_compiled_call_that_raises_leaves_its_region(h100: Emulation) -> None:
    @torch.compile
    def fails(x: Tensor) -> Tensor:
        raise KeyError("the program's own")

    with pytest.raises(KeyError, match="the program's own"):
        fails(f32(4))
    assert dynamo.compiled_region() is None


def test_a_program_without_torch_compile_gets_no_note_of_it(h100: Emulation) -> None:
    F.gelu(f32(4))
    assert not any("torch.compile" in note for note in h100.notes)


# --- inference_mode ------------------------------------------------------------------------------------------------


def test_under_inference_mode_the_overrides_are_for_the_mode_to_call(h100: Emulation) -> None:
    """There composites reach __torch_dispatch__ whole; on CUDA too."""

    class Decomposing(Stream):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in h100.overrides:
                with self:
                    return h100.overrides[func](*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    q = bf16(2, 4, 128, 64, grad=False)
    lstm = module(lambda: nn.LSTM(8, 16))
    with torch.inference_mode():
        with Decomposing() as stream:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            F.softmax(f16(4, 8, grad=False), -1, dtype=torch.float32)
            lstm(f32(5, 2, 8, grad=False))
        assert {"_scaled_dot_product_cudnn_attention", "_softmax", "_cudnn_rnn"} <= {*stream.names}
        assert ops_of(lambda: F.scaled_dot_product_attention(q, q, q)) == ["scaled_dot_product_attention"]


@pytest.mark.skipif(RUNNING < (2, 15), reason="before it, group norm copies into rows first")
def test_group_norm_keeps_channels_last_and_copies_nothing() -> None:
    x = f32(8, 64, 56, 56, grad=False).to(memory_format=torch.channels_last).requires_grad_()
    with FlopMeter("h100-sxm5-80gb") as meter:
        out = F.group_norm(x, 8, f32(64), f32(64))
        out.backward(torch.empty_like(out))
    forward, backward = meter.report().kernels[0], meter.report().kernels[-1]
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert [kernel.cost.name for kernel in meter.report().kernels if kernel.cost.bytes > 1e6 and kernel.cost.flops] == [
        "native_group_norm",
        "native_group_norm_backward",
    ]
    image, vector, statistics = 4 * x.numel(), 4 * 64, 4 * 2 * 8 * 8
    assert (forward.cost.bytes_read, forward.cost.bytes_written) == (image + 2 * vector, image + statistics)
    assert backward.cost.bytes_read == 2 * image + vector + statistics
