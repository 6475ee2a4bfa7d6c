"""What one open emulation has changed in torch, undone in reverse order when it closes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.library import Library

from flopmeter.as_cuda import torch_private as private
from flopmeter.as_cuda.target import CudaTarget

Kernel = Callable[..., Any]


@dataclass
class Scope:
    """The registrations, patches and notes of one emulation. `close()` undoes all of them."""

    target: CudaTarget
    overrides: dict[OpOverload, Kernel] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _libraries: dict[str, Library] = field(default_factory=dict)
    _undo: ExitStack = field(default_factory=ExitStack)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def note(self, text: str) -> None:
        """State an assumption or a rule once, for the report."""
        self._notes[text] = None

    def override(self, op: OpOverload, kernel: Kernel, *, vmap_key: str | None = "FuncTorchBatched") -> None:
        """Stand before the composite `op` for meta tensors: above autograd, in torch.func.grad and in torch.vmap.

        AutogradMeta is reached by plain meta tensors, AutogradOther by those that torch.func.grad wraps, `vmap_key`
        by those that torch.vmap wraps (it decomposes composites there). In __torch_dispatch__ it is too late, except
        under inference_mode, where composites arrive whole: `overrides` is for the dispatch mode to call then.
        """
        guarded = self.overrides[op] = _for_emulated_tensors(op, kernel)
        for key in ("AutogradMeta", "AutogradOther", *([vmap_key] if vmap_key else [])):
            self.kernel(private.name_of(op), guarded, key)

    def kernel(self, op: str, kernel: Kernel, key: str, *, with_keyset: bool = False) -> None:
        """Register `kernel` for `op` ("aten::name.overload") at dispatch key `key`."""
        with warnings.catch_warnings():
            # Where we replace a kernel of core and give it back on exit, torch warns, once a process.
            warnings.filterwarnings("ignore", message=".*\n?.*Overriding a previously registered kernel")
            private.register(self._library(key), op, kernel, key, with_keyset)

    def meta_kernel_of_composite(self, op: str, kernel: Kernel) -> None:
        """A Meta kernel for an op that has a composite kernel too; see `torch_private.register_unguarded`."""
        private.register_unguarded(self._library("Meta"), op, kernel, "Meta")

    def fall_through(self, key: str) -> None:
        """Make ops without a kernel at `key` pass it by."""
        self._undo.callback(private.unregister, private.fall_through(key))

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` until the scope closes."""
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def on_close(self, function: Callable[..., object], *args: Any) -> None:
        self._undo.callback(function, *args)

    def close(self) -> None:
        self._undo.close()

    def _library(self, key: str) -> Library:
        if key not in self._libraries:
            library = self._libraries[key] = private.library()
            self._undo.callback(private.unregister, library)
        return self._libraries[key]


def _for_emulated_tensors(op: OpOverload, kernel: Kernel) -> Kernel:
    """`kernel` where the first argument is a tensor to emulate; else what `op` does by itself."""

    @functools.wraps(kernel)
    def guarded(first: Any, *args: Any, **kwargs: Any) -> Any:
        if private.is_emulated(first):
            return kernel(first, *args, **kwargs)
        return private.decompose(op, first, *args, **kwargs)

    return guarded
