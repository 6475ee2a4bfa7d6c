"""A norm and two products with an activation function between them (transformer_engine/pytorch/module/
layernorm_mlp.py). In 16 bits GELU and its gradient are in the epilogues of the products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.run.shims.transformer_engine import linear, products
from flopmeter.run.shims.transformer_engine.activations import NAMES, activated, activation_gradient, is_gated
from flopmeter.run.shims.transformer_engine.base import EngineLayer, WeightUse
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand, activation_dtype, flat, operands_of, there
from flopmeter.run.shims.transformer_engine.linear import LayerCall
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit, wait
from flopmeter.run.shims.transformer_engine.quantizing import caster_of, check_shapes


def _between(
    name: str, first: LayerCall, second: LayerCall, x: MatmulOperand, weight: MatmulOperand, bias: Tensor | None
) -> Any:
    """The first product with its activation: the operand of the second, and what the gradient needs."""
    columns = second.is_training and second.weight.parameter.requires_grad
    if name == "gelu" and first.caster is None:
        out, before = products.gemm_gelu(there(x.rows), there(weight.rows).t(), bias)
        return MatmulOperand(out), before
    before = products.output(x, weight, bias, first.dtype)
    return activated(before, name, second.caster, columns), before


def _between_backward(
    name: str, first: LayerCall, second: LayerCall, gradient: MatmulOperand, weight: MatmulOperand, before: Tensor
) -> tuple[MatmulOperand, Tensor | None]:
    """The gradient of the first product, and of its bias if it is made here."""
    if name == "gelu" and first.caster is None:
        return MatmulOperand(products.gemm_gelu_gradient(before, there(gradient.rows), there(weight.rows))), None
    of_out = products.input_gradient(gradient, weight, second.dtype)
    return activation_gradient(of_out, before, name, first.caster, first.weight.parameter.requires_grad)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        weight2: Tensor, bias2: Tensor | None, first: LayerCall, second: LayerCall, name: str,
    ) -> Any:  # fmt: skip
        rows, dtype = flat(x).to(first.dtype), first.dtype
        if first.caster is not None:
            check_shapes(rows, weight)
            check_shapes(rows, weight2)
        part, out_of_norm, statistics = linear.prepared(first, rows, (norm_weight, norm_bias))
        whole, _ = linear.whole_input(first, part, columns=False)
        weights = [
            call.weight.operand(each, call.caster, dtype, call.is_training)
            for call, each in ((first, weight), (second, weight2))
        ]
        biases = [None if each is None else each.to(dtype) for each in (bias, bias2)]
        between, before = _between(name, first, second, whole, weights[0], biases[0])
        out = linear.output_of(second, between, weights[1], biases[1])
        if first.is_training:
            kept = linear.kept_for_gradient(first, part), linear.kept_for_gradient(second, between)
            operands = [each for operand in (*kept, *(each.for_gradients() for each in weights)) for each in operand]
            ctx.save_for_backward(*operands, before, rows, norm_weight, *statistics)
        ctx.call, ctx.second, ctx.name, ctx.shape = first, second, name, x.shape
        ctx.biases = bias is not None, bias2 is not None
        ctx.set_materialize_grads(False)
        first.layer.will_run_backward(ctx)
        out = out.view(-1, *x.shape[1:-1], out.shape[-1])
        return (out, out_of_norm.view(x.shape)) if out_of_norm is not None else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_normed: Tensor | None = None) -> Any:
        first, second, saved = ctx.call, ctx.second, ctx.saved_tensors
        x, between, weight, weight2 = operands_of(saved[:16])
        before, rows, norm_weight, *statistics = saved[16:]
        has_bias, has_bias2 = ctx.biases
        needs, needs2 = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        whole, of_bias2 = linear.whole_gradient(second, flat(gradient), has_bias2)
        whole_x, works = linear.whole_input(first, x, columns=True, is_async=True) if needs else (x, [])
        of_before, of_bias = _between_backward(ctx.name, first, second, whole, weight2, before)
        of_weight = of_weight2 = None
        if needs2:
            of_weight2, of_bias2 = linear.parameter_gradients(second, whole, between, has_bias2, of_bias2)
        of_x, work = linear.input_gradient_of(first, of_before, weight)
        for each in works:
            wait(each)
        if needs:
            of_weight, of_bias = linear.parameter_gradients(first, of_before, whole_x, has_bias, of_bias)
        wait(work)
        of_x, *of_norm = linear.through_norm(of_x, of_normed, rows, statistics, norm_weight)
        first.layer.ran_backward(ctx)
        biases = [made if has else None for made, has in ((of_bias, has_bias), (of_bias2, has_bias2))]
        return of_x.view(ctx.shape), *of_norm, of_weight, biases[0], of_weight2, biases[1], None, None, None


class LayerNormMLP(EngineLayer):
    """transformer_engine.pytorch.LayerNormMLP."""

    products = 2
    fc2_bias: Any

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Any = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        set_parallel_mode: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if activation not in NAMES:
            raise NotImplementedError(f"flopmeter's shim of transformer_engine has no activation {activation!r}")
        self.activation, self.normalization, self.use_bias = activation, normalization, bias
        self.return_bias, self.apply_bias = return_bias, bias and not return_bias
        self.return_layernorm_output, self.set_parallel_mode = return_layernorm_output, set_parallel_mode
        width, both = self.share(ffn_hidden_size, set_parallel_mode), 1 + is_gated(activation)
        self.make_norm(hidden_size, "layer_norm", zero_centered_gamma, normalization)
        self._make("fc1", both * width, hidden_size, "column")
        self.init_method = output_layer_init_method or self.init_method
        self._make("fc2", hidden_size, width, "row")

    def _make(self, prefix: str, rows: int, columns: int, mode: str) -> None:
        mode_or_none = mode if self.set_parallel_mode else None
        self.make_weight(f"{prefix}_weight", torch.empty(rows, columns, **self._new), mode_or_none)
        bias = torch.zeros(rows, **self._new) if self.use_bias else None
        self.make_bias(f"{prefix}_bias", bias, mode_or_none)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        dtype, calls = activation_dtype(x), list[LayerCall]()
        is_split = self.set_parallel_mode and self.tp_size > 1
        for name, mode in (("fc1_weight", "column"), ("fc2_weight", "row")):
            split = WeightSplit(mode if is_split else None, self.tp_group, self.tp_size, self.sequence_parallel)
            weight = WeightUse(self, name, getattr(self, name), is_first_microbatch)
            returns = self.return_layernorm_output and not calls
            is_training = torch.is_grad_enabled()
            caster = caster_of(self, split)
            calls.append(LayerCall(self, weight, caster, split, dtype, is_training, returns))
        bias2 = self.fc2_bias if self.apply_bias and not self.set_parallel_mode else None
        out = _Mlp.apply(
            x, *self.norm(dtype), self.fc1_weight, self.fc1_bias, self.fc2_weight, bias2, *calls, self.activation
        )
        out, normed = out if self.return_layernorm_output else (out, None)
        if self.apply_bias and self.set_parallel_mode:
            out = out + self.fc2_bias.to(dtype)
        return self.result(out, self.fc2_bias, normed)
