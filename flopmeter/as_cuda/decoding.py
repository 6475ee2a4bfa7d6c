"""generate() of Hugging Face models with a static cache compiles the steps after the first, as on CUDA.

Works around: transformers asks for a device named cuda before it compiles.
Until: transformers compiles on meta too, or tensors without memory can call their device cuda.
"""

from __future__ import annotations

import functools
from typing import Any

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names.private import MAY_COMPILE


def install(scope: Emulation) -> None:
    """Installs this for a program that has imported transformers' generation."""
    if not MAY_COMPILE.loaded:
        return
    from transformers import CompileConfig

    plain, mixin = MAY_COMPILE.value, MAY_COMPILE.parent

    @functools.wraps(plain)
    def may_compile(model: Any, model_kwargs: Any, generation_config: Any) -> Any:
        if model.device.type != "meta":
            return plain(model, model_kwargs, generation_config)
        given = generation_config.compile_config
        asked = CompileConfig() if given is None else given
        before, asked._compile_all_devices = asked._compile_all_devices, True
        generation_config.compile_config = asked
        try:
            return plain(model, model_kwargs, generation_config)
        finally:
            asked._compile_all_devices, generation_config.compile_config = before, given

    scope.patch(mixin, plain.__name__, may_compile)
