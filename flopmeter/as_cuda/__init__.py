"""Meta tensors dispatch what CUDA would.

    with emulate_cuda(CudaTarget((9, 0))) as emulation:
        model(x).sum().backward()      # on meta tensors: the aten ops of an sm 9.0 device

PyTorch's composites look at the device, autocast has no kernels for meta, and optimizers choose their implementation by
device type. Inside the context all of these do for meta tensors what they do on CUDA; CPU tensors and FakeTensors are
not affected. Kernels are registered on entry and removed on exit (a few milliseconds each), so nothing changes outside
of the context. Registrations and patches hold for the whole process, so only one emulation can be open at a time.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flopmeter.as_cuda import (
    amp_wishes,
    attention,
    autocast,
    decoding,
    dynamo,
    fast_paths,
    flex_attention,
    jagged_attention,
)
from flopmeter.as_cuda.attention_rules import RULES, rules_version
from flopmeter.as_cuda.emulation import Emulation
from flopmeter.as_cuda.kernels import (
    composites,
    convolution,
    layouts,
    linalg,
    meta_kernels,
    packages,
    rnn,
    sparse,
    zero_tensors,
)
from flopmeter.as_cuda.target import CudaTarget
from flopmeter.torch_names import dispatcher, private

__all__ = ["CudaTarget", "Emulation", "emulate_cuda"]

amp_wishes.watch()

_DETERMINISTIC = (
    "torch.use_deterministic_algorithms is on: sums into indices and scatters, which sort their indices then, are "
    "priced as the kernels that they are by default"
)
_lock = threading.Lock()
_open: Emulation | None = None


@contextmanager
def emulate_cuda(target: CudaTarget, *, compiled_run_eagerly: bool = True) -> Iterator[Emulation]:
    """Dispatch programs on meta tensors as CUDA would on `target`. Contexts of one target nest.

    `compiled_run_eagerly`: torch.compile'd functions run eagerly, each call a region; else torch.compile is left alone.

    Raises:
        RuntimeError: an emulation of another target, or of another thread, is open.
    """
    global _open
    with _lock:
        outer = _open
        if outer is not None:
            _check_nesting(outer, target)
        emulation = _open = outer or _install(target)
    if outer is not None:
        yield emulation
        return
    if compiled_run_eagerly:
        _install_feature(emulation, private.COMPILE, dynamo.install)
    try:
        yield emulation
    finally:
        with _lock:
            _open = None
            if torch.are_deterministic_algorithms_enabled():
                emulation.note(_DETERMINISTIC)
            emulation.close()


def _check_nesting(outer: Emulation, target: CudaTarget) -> None:
    if outer.thread != threading.get_ident():
        raise RuntimeError(
            "a CUDA emulation is open in another thread, and its kernels are registered for the whole process: "
            "meter one program at a time, or in processes of their own"
        )
    if (outer.target.compute_capability, outer.target.cudnn_version) != (
        target.compute_capability,
        target.cudnn_version,
    ):
        raise RuntimeError(
            f"a CUDA emulation of compute capability {_dotted(outer.target)} (cuDNN {outer.target.cudnn_version}) is "
            f"open: one of {_dotted(target)} (cuDNN {target.cudnn_version}) cannot be nested in it; close it first"
        )


def _dotted(target: CudaTarget) -> str:
    major, minor = target.compute_capability
    return f"{major}.{minor}"


_FEATURES: dict[str, Callable[[Emulation], None]] = {
    private.ATTENTION: attention.install,
    private.JAGGED: jagged_attention.install,
    private.COMPOSITES: composites.install,
    private.FUNCTORCH: composites.install_functorch,  # stands before kernels that meta_kernels brings
    private.RNN: rnn.install,
    private.SPARSE: sparse.install,
    private.CTC_LOSS: composites.install_ctc_loss,
    private.INT8: fast_paths.install_int8_products,
    private.INT4: meta_kernels.install_int4,
    private.GROUPED: meta_kernels.install_grouped,
    private.GRADIENTS: meta_kernels.install_folds,
    private.AUTOCAST: autocast.install,
    private.FOREACH: fast_paths.install_optimizers,
    private.CHECKPOINT: fast_paths.install_checkpoint,
    private.MHA_FAST_PATH: fast_paths.install_mha,
    private.FLEX_ATTENTION: flex_attention.install,
    private.STATIC_CACHES: decoding.install,
}


def _install(target: CudaTarget) -> Emulation:
    scope = Emulation(target)
    for text in target.notes:
        scope.note(text)
    try:
        _install_feature(scope, private.DISPATCHER, _install_features)
        _note_torch_version(scope)
    except BaseException:
        scope.close()
        raise
    return scope


def _install_features(scope: Emulation) -> None:
    meta_kernels.install(scope)
    convolution.install(scope)
    linalg.install(scope)
    layouts.install(scope)
    packages.install(scope)
    zero_tensors.install(scope)
    for feature, install in _FEATURES.items():
        _install_feature(scope, feature, install)


def _install_feature(scope: Emulation, feature: str, install: Callable[[Emulation], None]) -> None:
    """Run the installer, or note what this torch lacks for it."""
    missing = dispatcher.missing(feature)
    if missing:
        scope.note(f"not emulated: {feature}; this torch has no {', no '.join(missing)}")
    else:
        install(scope)


def _note_torch_version(scope: Emulation) -> None:
    """If no recordings of this torch on CUDA were compared, the report says so; an unsupported torch warns once."""
    version = dispatcher.running_version()
    if version in dispatcher.COMPARED_VERSIONS:
        return
    running, known = (".".join(map(str, each)) for each in (version, rules_version(version)))
    which = "its own CUDA build, of which no stream was recorded" if running == known else f"CUDA torch {known}"
    newest = ", the newest that flopmeter knows" if version > max(RULES) else ""
    scope.note(f"torch {running}: ops are dispatched by the rules of {which}{newest}")
    if version not in dispatcher.SUPPORTED_VERSIONS:
        _warn_once("; ".join(scope.notes))


@functools.cache
def _warn_once(said: str) -> None:
    warnings.warn(said, stacklevel=6)
