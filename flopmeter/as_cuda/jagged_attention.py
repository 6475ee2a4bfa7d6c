"""scaled_dot_product_attention of jagged tensors: the backend that CUDA chooses.

Works around: torch.nested asks what kernels a tensor may have on its own device, and meta has none but the math one.
Until: tensors without memory can call their device cuda on a torch without CUDA.

torch.nested checks what jagged tensors add to the rules, goes through the backends in an order of its own (flash,
memory-efficient, math, cuDNN), and calls the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flopmeter.as_cuda.attention_rules import CUDNN, EFFICIENT, FLASH, Operand, SdpaCall, Settings, rules_for
from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher, private
from flopmeter.torch_names.around import around

ASKED = {FLASH: private.JAGGED_FLASH, EFFICIENT: private.JAGGED_EFFICIENT, CUDNN: private.JAGGED_CUDNN}


def install(scope: Emulation) -> None:
    """Answer for jagged tensors on meta which backends the target has, and that they are on a GPU: torch.nested looks
    for torch's counter among the modes of those on meta, in a module that it does not import."""
    scope.patch_private(private.JAGGED_ON_META, lambda tensor: False)
    scope.patch_private(private.JAGGED_DUMMY, _unmetered(private.JAGGED_DUMMY.value))
    for backend, name in ASKED.items():
        _answer(scope, backend, name)


@around
def _unmetered(dummy: Callable[[], Tensor]) -> Tensor:
    """Makes the first jagged tensor outside of the meter: torch then makes one on meta, also where there is a GPU,
    which is no kernel of the program. Outside of inference mode, since that one serves later programs too."""
    if torch.compiler.is_compiling():
        return dummy()
    with private.no_dispatch_modes(), torch.inference_mode(False):
        return dummy()


def _answer(scope: Emulation, backend: SDPBackend, name: private.PrivateName) -> None:
    of_its_device = name.value
    rules = rules_for(dispatcher.running_version()).of(backend)

    def can_use(params: Any, debug: bool = False) -> bool:
        if not dispatcher.is_emulated(params.query._values):  # a plain tensor, which tells its true device
            return bool(of_its_device(params, debug))
        call = SdpaCall(
            query=_operand(params.query),
            key=_operand(params.key),
            value=_operand(params.value),
            mask=None if params.attn_mask is None else Operand.of(params.attn_mask),
            dropout_p=params.dropout,
            is_causal=params.is_causal,
            enable_gqa=params.enable_gqa,
            settings=Settings.now(),
            target=scope.target,
        )
        return backend in call.settings.enabled and all(rule(call) for rule in rules)

    scope.patch_private(name, can_use)


def _operand(jagged: Any) -> Operand:
    """The operand with all tokens in place of the length that differs: [batch, heads, tokens, size]."""
    tokens: Tensor = jagged._values
    shape, strides = (jagged.size(0), *tokens.shape), (tokens.numel(), *tokens.stride())
    return Operand(shape, strides, tokens.dtype, int(tokens.storage_offset()), jagged.requires_grad)
