"""Its benchmarks (flash_attn/utils/benchmark.py): calls under torch.utils.benchmark, which takes predicted time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

Measured = tuple[benchmark.Timer, benchmark.Measurement]


def benchmark_forward(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    call, timing = _call(function, inputs, options)
    return _timed("Forward pass", call, **timing)


def benchmark_backward(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    """`grad` is that of the result; else it is random."""
    gradient = options.pop("grad", None)
    call, timing = _call(function, inputs, options)
    out = call()
    out = out[0] if isinstance(out, tuple) else out
    gradient = torch.randn_like(out) if gradient is None else gradient
    return _timed("Backward pass", lambda: _backward(inputs, out, gradient), **timing)


def benchmark_combined(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    gradient = options.pop("grad", None)
    call, timing = _call(function, inputs, options)

    def both() -> None:
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        _backward(inputs, out, torch.randn_like(out) if gradient is None else gradient)

    return _timed("Forward + Backward pass", both, **timing)


def benchmark_fwd_bwd(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Measured, Measured]:
    forward_alone = {name: value for name, value in options.items() if name != "grad"}
    return benchmark_forward(function, *inputs, **forward_alone), benchmark_backward(function, *inputs, **options)


def benchmark_all(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Measured, Measured, Measured]:
    return *benchmark_fwd_bwd(function, *inputs, **options), benchmark_combined(function, *inputs, **options)


_TIMING = ("repeats", "desc", "verbose")


def _call(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The function on its inputs, under autocast if `amp`; and the options of the timing among these."""
    timing = {name: options.pop(name) for name in _TIMING if name in options}
    is_on, dtype = options.pop("amp", False), options.pop("amp_dtype", torch.float16)

    def call() -> Any:
        with torch.autocast("cuda", dtype=dtype, enabled=is_on):
            return function(*inputs, **options)

    return call, timing


def _backward(inputs: tuple[Any, ...], out: Tensor, gradient: Tensor) -> None:
    for each in inputs:
        if isinstance(each, Tensor):
            each.grad = None
    out.backward(gradient, retain_graph=True)


def _timed(what: str, run: Callable[[], Any], repeats: int = 10, desc: str = "", verbose: bool = True) -> Measured:
    timer = benchmark.Timer(stmt="run()", globals={"run": run}, num_threads=torch.get_num_threads())
    found = timer.timeit(repeats)
    if verbose:
        print(desc, f"- {what}", found, sep="\n")
    return timer, found
