"""bitsandbytes (github.com/bitsandbytes-foundation/bitsandbytes): 8-bit optimizers, linear layers in 8 and 4 bits.

An optimizer runs one kernel a parameter and waits for it (optim/optimizer.py, `step`); its states are bytes with one
fp32 scale for each block of 256 (csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise; '8-bit Optimizers via Block-wise
Quantization', 2110.02861), and parameters below 4,096 elements keep fp32 states. Paged states count as memory of the
GPU. A 4-bit weight is dequantised before each product, in blocks of 64 whose scales are bytes themselves, in blocks of
256 ('QLoRA', arXiv 2305.14314). An 8-bit layer quantises rows of its input and multiplies on the int8 unit
('LLM.int8()', arXiv 2208.07339).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flopmeter.costs import make_contraction, make_cost
from flopmeter.records import Call, Cost, Matmul
from flopmeter.run.shims.kernel import kernel, named

BLOCK = 256  # elements of a state, or scales, with one scale
WEIGHT_BLOCK = 64  # elements of a 4-bit weight
SMALL = 4096  # elements; min_8bit_size of the optimizers
# Operations a parameter. Adam: both moments 7, root and division 3, step 3, decay 1. Lion: means 6, step, decay 3.
# RMSprop: mean 4, root and division 3, step 2.
ADAM, LION, RMSPROP = 14, 9, 9
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


@kernel("bitsandbytes_rmsprop", _update_cost(RMSPROP, 1), mutates=("p", "first", "scales"))
def _rmsprop(g: Tensor, p: Tensor, first: Tensor, scales: Tensor | None) -> None: ...


class GlobalOptimManager:
    """What a program wants for single parameters: of its options `optim_bits` is of consequence here."""

    def __init__(self) -> None:
        self._of_modules: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._of_parameters = WeakIdKeyDictionary()

    @staticmethod
    def get_instance() -> GlobalOptimManager:
        return _MANAGER

    def register_parameters(self, params: Any) -> None:
        """It needs to know nothing before an optimizer makes its states."""

    def register_module_override(self, module: nn.Module, param_name: str, config: dict[str, Any]) -> None:
        self._of_modules.setdefault(module, {})[param_name] = config

    def override_config(
        self, parameters: Any, key: Any = None, value: Any = None, key_value_dict: dict[str, Any] | None = None
    ) -> None:
        for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
            self._of_parameters[parameter] = {**({} if key is None else {key: value}), **(key_value_dict or {})}

    def bits(self, parameter: Tensor) -> int | None:
        wanted = [
            config
            for module, configs in self._of_modules.items()
            for name, config in configs.items()
            if getattr(module, name, None) is parameter
        ]
        return next((each["optim_bits"] for each in [self._of_parameters.get(parameter, {}), *wanted] if each), None)


_MANAGER = GlobalOptimManager()


class _Optimizer(torch.optim.Optimizer):
    bits: int | None = None  # None: what its argument says
    states, update = 2, staticmethod(_adam)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *args: Any,
        optim_bits: int = 32,
        min_8bit_size: int = SMALL,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._bits, self._min_8bit_size = self.bits or optim_bits, min_8bit_size

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter] or self._made(parameter)
            type(self).update(parameter.grad, parameter, *state["moments"], state["scales"])
            torch.cuda.synchronize()
        return loss

    def _made(self, parameter: Tensor) -> dict[str, Any]:
        bits = _MANAGER.bits(parameter) or self._bits
        in_full = bits == 32 or parameter.numel() < self._min_8bit_size
        dtype = torch.float32 if in_full else torch.uint8
        blocks = self.states * -(-parameter.numel() // BLOCK)
        moments = [torch.zeros_like(parameter, dtype=dtype) for _ in range(self.states)]
        scales = None if in_full else parameter.new_zeros(blocks, dtype=torch.float32)
        made = {"moments": moments, "scales": scales}
        self.state[parameter] = made
        return made


class Adam(_Optimizer): ...


class Adam8bit(Adam):
    bits = 8


class Adam32bit(Adam):
    bits = 32


class Lion(_Optimizer):
    states, update = 1, staticmethod(_lion)


class Lion8bit(Lion):
    bits = 8


class Lion32bit(Lion):
    bits = 32


class RMSprop(_Optimizer):
    states, update = 1, staticmethod(_rmsprop)


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
    return _dequantize(A, quant_state.scales(), rows, columns, quant_state.dtype)


def get_ptr(A: Tensor | None) -> ctypes.c_void_p | None:  # noqa: N803
    return None if A is None else ctypes.c_void_p(A.data_ptr())


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, None]:  # noqa: N803
    return (*_quantize_rows(A), None)


class _Weight(nn.Parameter):
    """A parameter that is quantised when it comes onto the device, alone or in a layer, or at the layer's first call.
    nn.Parameter does not know its options, which libraries pass on as its `__dict__`."""

    def __new__(cls, data: Tensor, requires_grad: bool = False, *args: Any, **options: Any) -> Self:
        return super().__new__(cls, data, requires_grad)

    def of(self, data: Tensor) -> Self:
        """A copy of this parameter with other data."""
        return type(self)(data, **vars(self))

    def quantised(self) -> Self:
        """Itself on the CPU, and where it is quantised already."""
        if self.is_cpu or not self.is_floating_point():
            return self
        with torch.no_grad():
            return self.pack()

    def pack(self) -> Self:
        raise NotImplementedError

    def to(self, *args: Any, **options: Any) -> Any:
        moved = self.data.to(*args, **options)
        whole_again = moved.is_floating_point() and not self.is_floating_point()
        return moved if whole_again else self.of(moved).quantised()

    def cuda(self, *args: Any, **options: Any) -> Self:
        return self.of(self.data.cuda(*args, **options)).quantised()


class Params4bit(_Weight):
    """A weight with two elements a byte, or one that is packed already, as its `quant_state` says."""

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
        **options: Any,
    ) -> None:
        self.quant_state, self.module, self.bnb_quantized = quant_state, module, bnb_quantized
        self.blocksize, self.compress_statistics = blocksize, compress_statistics
        self.quant_type, self.quant_storage = quant_type, quant_storage

    def pack(self) -> Self:
        packed, state = quantize_4bit(self.data, compress_statistics=self.compress_statistics)
        return type(self)(packed, **vars(self) | {"quant_state": state, "bnb_quantized": True})


class Int8Params(_Weight):
    """A weight of bytes: `SCB` are the scales of its rows."""

    def __init__(
        self,
        data: Tensor,
        requires_grad: bool = False,
        has_fp16_weights: bool = False,
        CB: Tensor | None = None,  # noqa: N803
        SCB: Tensor | None = None,  # noqa: N803
        **options: Any,
    ) -> None:
        self.CB, self.SCB, self.has_fp16_weights = CB, SCB, has_fp16_weights

    def pack(self) -> Self:
        rows, scales = _quantize_rows(self.data)
        return type(self)(rows, CB=rows, SCB=scales)


class _Quantized(nn.Linear):
    weight: Any

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        weight, kind, attributes = self.weight, type(self.weight), dict(vars(self.weight))
        super()._apply(lambda tensor: fn(tensor.data if tensor is weight else tensor), recurse)
        if type(self.weight) is not kind:  # torch made a plain parameter of it
            self.weight = kind(self.weight.data, **attributes)
        self._quantize()
        return self

    def _quantize(self) -> None:
        self.weight = self.weight.quantised()


class Linear4bit(_Quantized):
    """bitsandbytes.nn.Linear4bit; fp4 and nf4 differ only in their table."""

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

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_4bit(self.weight, self.weight.quant_state).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self._quantize()
        given = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.numel() == x.shape[-1] and not x.requires_grad:
            out: Tensor = _gemv(x, self.weight, self.weight.quant_state.scales(), self.out_features)
            out = out if bias is None else out + bias
        else:
            out = _Matmul4bit.apply(x, self, bias)
        return out.to(given)


class Linear8bitLt(_Quantized):
    """bitsandbytes.nn.Linear8bitLt. Raises NotImplementedError for a threshold: which columns are above it depends on
    values, which nobody knows."""

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

    def forward(self, x: Tensor) -> Tensor:
        self._quantize()
        return _Matmul8bit.apply(x, self.weight, self.weight.SCB, self.bias)


class Embedding(nn.Embedding):
    """Its weight's states stay in fp32."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _MANAGER.register_module_override(self, "weight", {"optim_bits": 32})


class StableEmbedding(Embedding):
    """An embedding followed by a layer norm."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, device: Any = None, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, device=device, **options)
        self.norm = nn.LayerNorm(embedding_dim, device=device)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(input).to(torch.get_default_dtype()))
        return out.to(self.weight.dtype)


_OPTIMIZERS = {
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit"), Adam8bit),
    **dict.fromkeys(("Adam32bit", "AdamW32bit", "PagedAdam32bit", "PagedAdamW32bit"), Adam32bit),
    **dict.fromkeys(("Adam", "AdamW", "PagedAdam", "PagedAdamW"), Adam),
    **dict.fromkeys(("Lion8bit", "PagedLion8bit"), Lion8bit),
    **dict.fromkeys(("Lion32bit", "PagedLion32bit"), Lion32bit),
    **dict.fromkeys(("Lion", "PagedLion"), Lion),
    **named(RMSprop, GlobalOptimManager),
}
DISTRIBUTION = "bitsandbytes"
MODULES = {
    "bitsandbytes": {"__version__": "0.50.2", "supported_torch_devices": {"cpu", "cuda"}},
    "bitsandbytes.optim": _OPTIMIZERS,
    "bitsandbytes.nn": named(Linear4bit, Linear8bitLt, Params4bit, Int8Params, Embedding, StableEmbedding),
    "bitsandbytes.functional": {
        **named(quantize_4bit, dequantize_4bit, int8_vectorwise_quant, get_ptr, QuantState),
        "lib": SimpleNamespace(),  # as where its kernels could not be loaded: none is called by pointers
    },
}
