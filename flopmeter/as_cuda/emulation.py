"""An open emulation: what it has changed in torch, and what it tells. All changes are undone in reverse order when it
closes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.library import Library
from torch.nn.attention import SDPBackend

from flopmeter.as_cuda.attention_rules import MATH, SdpaCall
from flopmeter.as_cuda.target import CudaTarget
from flopmeter.torch_names import dispatcher, private

DispatcherKernel = Callable[..., Any]


@dataclass
class Emulation:
    """The registrations, patches and notes of one emulation, as `emulate_cuda` hands it out. `close()` undoes them.

    overrides: kernels that a dispatch mode has to call itself: for composites, which reach it undecomposed under
        inference_mode, and for ops whose results have other strides on CUDA than on meta.
    attention: the backend of each call of another geometry.
    differences: each says, in words, the first op so far that another target would have run in another way.
    """

    target: CudaTarget
    overrides: dict[OpOverload, DispatcherKernel] = field(default_factory=dict)
    attention: dict[SdpaCall, SDPBackend] = field(default_factory=dict)
    differences: list[Callable[[CudaTarget], str | None]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    _notes: dict[str, None] = field(default_factory=dict)
    _libraries: dict[tuple[str, str], Library] = field(default_factory=dict)
    _undo: ExitStack = field(default_factory=ExitStack)

    @property
    def notes(self) -> tuple[str, ...]:
        """Rules and assumptions that the report should state; may grow while the program runs."""
        return tuple(self._notes)

    @property
    def unfused_attention(self) -> list[SdpaCall]:
        """The attention calls that the target runs without a fused kernel, one for each geometry."""
        return [call for call, backend in self.attention.items() if backend is MATH]

    def difference(self, target: CudaTarget) -> str | None:
        """The first op so far that the other target would have run in another way, in words; None if there is none."""
        return next(filter(None, (differs(target) for differs in self.differences)), None)

    def note(self, text: str) -> None:
        """State an assumption or a rule once, for the report."""
        self._notes[text] = None

    def override(
        self,
        op: OpOverload,
        kernel: DispatcherKernel,
        *,
        vmap_key: str | None = "FuncTorchBatched",
        where: Callable[[Any], bool] = dispatcher.is_emulated,
    ) -> None:
        """Run `kernel` instead of the composite `op` for meta tensors: above autograd, and inside torch.func.grad and
        torch.vmap.

        Plain meta tensors reach the key AutogradMeta, those that torch.func.grad wraps AutogradOther, and those that
        torch.vmap wraps `vmap_key`, where vmap decomposes composites. In __torch_dispatch__ a composite is decomposed
        already, except under inference_mode: then the dispatch mode calls the kernel in `overrides`. `where`: for which
        first arguments.
        """
        guarded = self.overrides[op] = _guarded(op, kernel, where)
        for key in ("AutogradMeta", "AutogradOther", *([vmap_key] if vmap_key else [])):
            self.kernel(op.name(), guarded, key)

    def kernel(self, op: str, kernel: DispatcherKernel, key: str, *, with_keyset: bool = False) -> None:
        """Register `kernel` for `op` ("namespace::name.overload") at dispatch key `key`. One of torch that it replaces
        is active again after ours is removed."""
        with dispatcher.no_warning_of_override():
            self._library(key, op.partition("::")[0]).impl(op, kernel, key, with_keyset=with_keyset)

    def meta_kernel(self, op: str, kernel: DispatcherKernel) -> None:
        """Register a Meta kernel also where `Library.impl` refuses one.

        It refuses ops with a composite kernel. `_fused_rms_norm` and `mish_backward` have an autograd formula as well,
        which the dispatcher takes only where the backend has a kernel, as CUDA does and Meta does not. Before 2.13 it
        also refuses ops that have a Meta kernel from Python, such as the one that fails for int4 weights.
        """
        with dispatcher.no_warning_of_override():
            self._library("Meta").m.impl(op, "Meta", kernel)  # type: ignore[union-attr]

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` until the scope closes."""
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def patch_private(self, name: private.PrivateName, value: Any) -> None:
        """Set a private name of torch until the scope closes."""
        self.patch(name.owner, name.attribute, value)

    def on_close(self, function: Callable[..., object], *args: Any) -> None:
        self._undo.callback(function, *args)

    def close(self) -> None:
        self._undo.close()

    def _library(self, key: str, namespace: str = "aten") -> Library:
        library = self._libraries.get((namespace, key))
        if library is None:
            library = self._libraries[namespace, key] = Library(namespace, "IMPL")
            self._undo.callback(library._destroy)
        return library


def _guarded(op: OpOverload, kernel: DispatcherKernel, where: Callable[[Any], bool]) -> DispatcherKernel:
    """`kernel` where the first argument is one to emulate, else torch's own decomposition of `op`."""

    @functools.wraps(kernel)
    def guarded(first: Any, *args: Any, **kwargs: Any) -> Any:
        if where(first):
            return kernel(first, *args, **kwargs)
        return dispatcher.decompose(op, first, *args, **kwargs)

    return guarded
