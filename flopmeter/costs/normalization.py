"""Statistical normalization: softmax, layer, batch, group and RMS norms.

FLOPs per element; the statistics' own work per row or channel is left out, as in the paper's table.
"""

from __future__ import annotations

import torch

from flopmeter.costs.rules import make_cost, rule
from flopmeter.records import NORMALIZATION, Call, Cost, TensorSpec

aten = torch.ops.aten


@rule(aten._softmax, aten._log_softmax)
def softmax(call: Call) -> Cost:
    """Subtract the maximum, exp, sum, divide (log: subtract the logarithm): 4; the maximum is 0."""
    n = call.inputs[0].numel
    return make_cost(call, NORMALIZATION, 4 * n, transcendentals=n)


@rule(aten._safe_softmax)
def safe_softmax(call: Call) -> Cost:
    """Softmax whose fully masked rows become 0. CUDA runs it as softmax, then eq, all and where:
    x is read by the softmax and by eq, the result read and written again by where."""
    x, out = call.inputs[0], call.outputs[0]
    mask_bytes = x.numel
    read = 2 * x.nbytes + mask_bytes + out.nbytes
    return make_cost(
        call, NORMALIZATION, 4 * x.numel, transcendentals=x.numel, read=read, written=2 * out.nbytes + mask_bytes
    )


@rule(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: Call) -> Cost:
    """y·dy, its sum, subtract, multiply: 4 (log: sum of dy, exp, multiply, subtract)."""
    n = call.inputs[0].numel
    is_log = call.func.overloadpacket is aten._log_softmax_backward_data
    return make_cost(call, NORMALIZATION, 4 * n, transcendentals=n if is_log else 0)


@rule(aten.native_layer_norm, aten.native_group_norm)
def layer_norm(call: Call) -> Cost:
    """Sum 1, sum of squares 2, centre 1, divide 1, then weight 1 and bias 1 where there are any."""
    x, *affine = call.inputs
    return make_cost(call, NORMALIZATION, (5 + len(affine)) * x.numel)


@rule(aten.native_layer_norm_backward, aten.native_group_norm_backward)
def layer_norm_backward(call: Call) -> Cost:
    """Gradients of the input 10, of the weight 2, of the bias 1, as the output mask asks for them."""
    per_element = sum(flops for flops, wanted in zip((10, 2, 1), call.argument("output_mask"), strict=True) if wanted)
    return make_cost(call, NORMALIZATION, per_element * call.inputs[0].numel)


@rule(aten._fused_rms_norm)
def rms_norm(call: Call) -> Cost:
    """Square and sum 2, multiply by the reciprocal root 1, weight 1."""
    x, *weight = call.inputs
    return make_cost(call, NORMALIZATION, (3 + len(weight)) * x.numel)


@rule(aten._fused_rms_norm_backward)
def rms_norm_backward(call: Call) -> Cost:
    """Input: dy·w 1, its sum with x 2, normalized x 1, scale and subtract 2, times the reciprocal root 1;
    weight: multiply and sum 2."""
    wants_input, wants_weight = call.argument("output_mask")
    return make_cost(call, NORMALIZATION, (7 * wants_input + 2 * wants_weight) * call.inputs[0].numel)


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
)
def batch_norm(call: Call) -> Cost:
    """Training: as layer norm, 5, weight 1, bias 1. Evaluation, with known statistics: centre 1, divide 1,
    weight 1, bias 1."""
    x = call.inputs[0]
    affine = sum(call.argument(name) is not None for name in ("weight", "bias"))
    return make_cost(call, NORMALIZATION, ((5 if _is_training(call) else 2) + affine) * x.numel)


@rule(aten.native_batch_norm_backward, aten.batch_norm_backward, aten.cudnn_batch_norm_backward)
def batch_norm_backward(call: Call) -> Cost:
    """Training: input 10, weight 2, bias 1. Evaluation: the statistics are constants, so the input's
    gradient is dy times weight times the reciprocal root, 2."""
    names = {argument.name for argument in call.func._schema.arguments}
    is_training = call.argument("train") if "train" in names else call.argument("update") if "update" in names else True
    mask = call.argument("output_mask") if "output_mask" in names else (True, True, True)
    flops = (10 if is_training else 2, 2, 1)
    grad = call.argument("grad_out") if "grad_out" in names else call.inputs[1]
    assert isinstance(grad, TensorSpec)
    return make_cost(call, NORMALIZATION, sum(f for f, wanted in zip(flops, mask, strict=True) if wanted) * grad.numel)


def _is_training(call: Call) -> bool:
    """The no-training overloads have no such argument."""
    packet = call.func.overloadpacket
    if packet is aten._batch_norm_with_update:
        return True
    if packet in (aten._native_batch_norm_legit_no_training, aten._batch_norm_no_update):
        return False
    return bool(call.argument("training"))
