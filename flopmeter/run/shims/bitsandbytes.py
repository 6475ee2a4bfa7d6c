"""bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes): 8-bit optimizers, linear layers in 8 and 4 bits.

An optimizer runs one kernel a parameter; its states are bytes with one fp32 scale for each block of 256
(csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise; '8-bit Optimizers via Block-wise Quantization', 2110.02861),
and parameters below 4,096 elements keep fp32 states. A 4-bit weight is dequantised before each product, in blocks of 64
whose scales are bytes themselves, in blocks of 256 ('QLoRA', arXiv 2305.14314). An 8-bit layer quantises rows of its
input and multiplies on the int8 unit ('LLM.int8()', arXiv 2208.07339).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.costs import make_contraction, make_cost
from flopmeter.records import Call, Cost, Matmul
from flopmeter.run.shims.kernel import kernel, named

BLOCK = 256  # elements of a state, or scales, with one scale
WEIGHT_BLOCK = 64  # elements of a 4-bit weight
SMALL = 4096  # elements; min_8bit_size of the optimizers
# Operations a parameter. Adam: both moments 7, root and division 3, step 3, decay 1. Lion: means 6, step, decay 3.
ADAM, LION = 14, 9
REQUANTIZE = 2  # a state times its block's scale, and divided by the new one; looking the code up is integer work


def _update_cost(operations: int, roots: int) -> Callable[[Call], Cost]:
    def cost(call: Call) -> Cost:
        states = [spec for spec in call.inputs[2:] if spec.numel == call.inputs[0].numel]
        each = operations + REQUANTIZE * sum(spec.dtype.itemsize == 1 for spec in states)
        n = call.inputs[0].numel
        return make_cost(call, "element-wise", each * n, transcendentals=roots * n)

    return cost


@kernel("bitsandbytes_adam", _update_cost(ADAM, 1), mutates=("p", "first", "second", "scales"))
def _adam(g: Tensor, p: Tensor, first: Tensor, second: Tensor, scales: Tensor | None) -> None: ...


@kernel("bitsandbytes_lion", _update_cost(LION, 0), mutates=("p", "first", "scales"))
def _lion(g: Tensor, p: Tensor, first: Tensor, scales: Tensor | None) -> None: ...


class _Optimizer(torch.optim.Optimizer):
    bits, states, update = 8, 2, staticmethod(_adam)

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *args: Any, min_8bit_size: int = SMALL, **kwargs: Any):
        super().__init__(params, {"lr": lr})
        self._min_8bit_size = min_8bit_size

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter] or self._made(parameter)
            type(self).update(parameter.grad, parameter, *state["moments"], state["scales"])
        return loss

    def _made(self, parameter: Tensor) -> dict[str, Any]:
        is_small = self.bits == 32 or parameter.numel() < self._min_8bit_size
        dtype = torch.float32 if is_small else torch.uint8
        blocks = self.states * -(-parameter.numel() // BLOCK)
        moments = [torch.zeros_like(parameter, dtype=dtype) for _ in range(self.states)]
        scales = None if is_small else parameter.new_zeros(blocks, dtype=torch.float32)
        made = {"moments": moments, "scales": scales}
        self.state[parameter] = made
        return made


class Adam8bit(_Optimizer): ...


class Adam32bit(_Optimizer):
    bits = 32


class Lion8bit(_Optimizer):
    states, update = 1, staticmethod(_lion)


def _dequantize_cost(call: Call) -> Cost:
    return make_cost(call, "element-wise", call.outputs[0].numel)  # each times its block's scale


@kernel("bitsandbytes_dequantize", _dequantize_cost)
def _dequantize(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((rows, columns), dtype=dtype)


def _gemv_cost(call: Call) -> Cost:
    x, out = call.inputs[0], call.outputs[0]
    return make_contraction(call, [Matmul(1, x.numel // x.shape[-1], out.shape[-1], x.shape[-1])])


@kernel("bitsandbytes_gemv_4bit", _gemv_cost)
def _gemv(x: Tensor, packed: Tensor, scales: Tensor, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _quantize_cost(call: Call) -> Cost:
    return make_cost(call, "element-wise", call.inputs[0].numel)  # divided by the largest of its block or row


@kernel("bitsandbytes_quantize_4bit", _quantize_cost)
def _quantize_4bit(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(-(-weight.numel() // 2), dtype=torch.uint8), weight.new_empty(
        -(-weight.numel() // WEIGHT_BLOCK), dtype=torch.float32
    )


@kernel("bitsandbytes_quantize_rows", _quantize_cost)
def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


def _rescale_cost(call: Call) -> Cost:
    return make_cost(call, "element-wise", (2 + (call.argument("bias") is not None)) * call.outputs[0].numel)


@kernel("bitsandbytes_mm_dequant", _rescale_cost)
def _rescale(product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(product, dtype=dtype)


class _Matmul4bit(torch.autograd.Function):
    """Keeps only the packed weight, and dequantises it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear4bit, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.has_bias = layer, bias is not None
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return gradient @ ctx.layer.dequantized(gradient.dtype), None, of_bias


class _Matmul8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.has_bias = bias is not None
        rows, row_scales = _quantize_rows(x.reshape(-1, x.shape[-1]))
        product = torch._int_mm(rows, weight.t())
        out: Tensor = _rescale(product, row_scales, scales, bias, x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, scales = ctx.saved_tensors
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        return gradient @ (weight.to(gradient.dtype) * scales[:, None].to(gradient.dtype)), None, None, of_bias


class QuantState:
    """Where the scales of a 4-bit weight are, and what the weight was. The scales' own scales are in `state2`."""

    def __init__(self, absmax: Tensor, shape: torch.Size, dtype: torch.dtype, state2: Tensor | None) -> None:
        self.absmax, self.shape, self.dtype, self.state2 = absmax, shape, dtype, state2
        self.nested, self.blocksize = state2 is not None, WEIGHT_BLOCK

    def scales(self) -> Tensor:
        if self.state2 is None:
            return self.absmax
        whole: Tensor = _dequantize(self.absmax, self.state2, 1, self.absmax.numel(), torch.float32)
        return whole.view(-1) + self.state2[0]  # the scales' mean was taken off before


def quantize_4bit(A: Tensor, *, compress_statistics: bool = False, **options: Any) -> tuple[Tensor, QuantState]:  # noqa: N803
    packed, scales = _quantize_4bit(A)
    of_scales = None
    if compress_statistics:
        of_scales = scales.new_empty(-(-scales.numel() // BLOCK))
        scales = torch.empty_like(scales, dtype=torch.uint8)
    return packed, QuantState(scales, A.shape, A.dtype, of_scales)


def dequantize_4bit(A: Tensor, quant_state: QuantState, **options: Any) -> Tensor:  # noqa: N803
    rows, columns = quant_state.shape
    whole: Tensor = _dequantize(A, quant_state.scales(), rows, columns, quant_state.dtype)
    return whole


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:  # noqa: N803
    return (*_quantize_rows(A), None)


class _Weight(nn.Parameter):
    """A parameter whose own options nn.Parameter does not know."""

    def __new__(cls, data: Tensor, requires_grad: bool = False, *args: Any, **options: Any) -> Self:
        return super().__new__(cls, data, requires_grad)


class Params4bit(_Weight):
    """A weight that its layer quantises on the device, or that is packed already, as its `quant_state` says."""

    def __init__(
        self,
        data: Tensor,
        requires_grad: bool = False,
        quant_state: QuantState | None = None,
        blocksize: int = WEIGHT_BLOCK,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: nn.Module | None = None,
        bnb_quantized: bool = False,
    ) -> None:
        self.quant_state, self.module, self.bnb_quantized = quant_state, module, bnb_quantized
        self.settings = {"compress_statistics": compress_statistics, "quant_type": quant_type}
        self.settings |= {"blocksize": blocksize, "quant_storage": quant_storage}
        vars(self).update(self.settings)


class Int8Params(_Weight):
    """A weight that its layer quantises on the device: `SCB` are the scales of its rows."""

    def __init__(
        self,
        data: Tensor,
        requires_grad: bool = False,
        has_fp16_weights: bool = False,
        CB: Tensor | None = None,  # noqa: N803
        SCB: Tensor | None = None,  # noqa: N803
    ) -> None:
        self.CB, self.SCB, self.has_fp16_weights = CB, SCB, has_fp16_weights


class _Quantized(nn.Linear):
    """A layer whose weight is quantised when it comes onto the device, or at the first call."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kind, attributes = type(self.weight), dict(vars(self.weight))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if type(self.weight) is not kind:  # torch made a plain parameter of it
            self.weight = self._like(attributes, self.weight.data)
        self._quantize()
        return self

    def _quantize(self) -> None:
        if not self.weight.is_cpu and self.weight.is_floating_point():
            with torch.no_grad():
                self._pack(self.weight)

    def _like(self, attributes: dict[str, Any], data: Tensor) -> nn.Parameter:
        raise NotImplementedError

    def _pack(self, weight: Tensor) -> None:
        raise NotImplementedError


class Linear4bit(_Quantized):
    """bitsandbytes.nn.Linear4bit; fp4 and nf4 differ only in their table."""

    weight: Any

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        super().__init__(input_features, output_features, bias, device)
        self.compute_dtype = compute_dtype
        self.weight = Params4bit(
            self.weight.data, compress_statistics=compress_statistics, quant_type=quant_type,
            quant_storage=quant_storage, module=self,
        )  # fmt: skip

    def _like(self, attributes: dict[str, Any], data: Tensor) -> Params4bit:
        return Params4bit(data, quant_state=attributes["quant_state"], module=self, **attributes["settings"])

    def _pack(self, weight: Any) -> None:
        packed, state = quantize_4bit(weight, **weight.settings)
        self.weight = Params4bit(packed, quant_state=state, module=self, bnb_quantized=True, **weight.settings)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        scales = self.weight.quant_state.scales()
        return _dequantize(self.weight, scales, self.out_features, self.in_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        self._quantize()
        given = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.numel() == x.shape[-1] and not x.requires_grad:
            out: Tensor = _gemv(x, self.weight, self.weight.quant_state.scales(), self.out_features)
            out = out if bias is None else out + bias
        else:
            out = _Matmul4bit.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out.to(given)


class Linear8bitLt(_Quantized):
    """bitsandbytes.nn.Linear8bitLt. Raises NotImplementedError for a threshold: which columns are above it depends on
    values, which nobody knows."""

    weight: Any

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Any = None,
        device: Any = None,
    ) -> None:
        if threshold or has_fp16_weights:
            raise NotImplementedError(
                "flopmeter's shim of bitsandbytes has Linear8bitLt with has_fp16_weights=False and threshold=0 alone"
            )
        super().__init__(input_features, output_features, bias, device)
        self.weight = Int8Params(self.weight.data)

    def _like(self, attributes: dict[str, Any], data: Tensor) -> Int8Params:
        return Int8Params(data, CB=attributes["CB"], SCB=attributes["SCB"])

    def _pack(self, weight: Tensor) -> None:
        rows, scales = _quantize_rows(weight)
        self.weight = Int8Params(rows, CB=rows, SCB=scales)

    def forward(self, x: Tensor) -> Tensor:
        self._quantize()
        return _Matmul8bit.apply(x, self.weight, self.weight.SCB, self.bias)  # type: ignore[no-untyped-call]


_OPTIMIZERS = {
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"), Adam8bit),
    **dict.fromkeys(("Adam", "AdamW", "PagedAdam", "PagedAdamW", "AdamW32bit", "PagedAdamW32bit"), Adam32bit),
    **dict.fromkeys(("Lion8bit", "PagedLion8bit"), Lion8bit),
}
MODULES = {
    "bitsandbytes": {},
    "bitsandbytes.optim": _OPTIMIZERS,
    "bitsandbytes.nn": named(Linear4bit, Linear8bitLt, Params4bit, Int8Params),
    "bitsandbytes.functional": named(quantize_4bit, dequantize_4bit, int8_vectorwise_quant, QuantState),
}
