"""FlopMeter: the context manager that ties the stages together."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from flopmeter.costs import costs_of, kernels_of
from flopmeter.hardware import Hardware, load_hardware
from flopmeter.memory import peak_memory_bytes
from flopmeter.report import Report
from flopmeter.timing import Host, host_seconds, time_kernels
from flopmeter.trace import Recorder, Trace

Causal = Literal["full", "exact"]
Mode = Literal["eager"]
DEFAULT_HARDWARE = "a100-sxm4-80gb"


class FlopMeter:
    """Meters the PyTorch program that runs inside it.

    hardware: a name of `available_hardware()`, a path to a YAML profile, or a Hardware.
    strict: raise UncountedError at the first op that no rule covers, instead of listing it.
    causal: 'full' counts the whole attention square, as torch's counter does; 'exact' what a mask leaves.
    source: note the caller's file and line with every op (slower).

    The same meter can be entered again: it starts afresh. Entering it inside itself changes nothing.
    """

    def __init__(
        self,
        hardware: str | os.PathLike[str] | Hardware = DEFAULT_HARDWARE,
        *,
        strict: bool = False,
        causal: Causal = "full",
        source: bool = False,
        host: Host | None = None,
    ):
        if causal not in get_args(Causal):
            raise ValueError(f"unknown causal convention {causal!r}; known: {', '.join(get_args(Causal))}")
        self.hardware = load_hardware(hardware)
        self._strict = strict
        self._causal: Causal = causal
        self._source = source
        self._host = host or Host()
        self._recorder: Recorder | None = None
        self._depth = 0

    def __enter__(self) -> FlopMeter:
        if self._depth == 0:
            recorder = Recorder(source=self._source, on_new_call=self._check if self._strict else None)
            recorder.__enter__()
            self._recorder = recorder
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._recorder is not None:
            self._recorder.__exit__(*exception)

    @staticmethod
    def _check(call: Any) -> None:
        costs_of(call, strict=True)

    @property
    def trace(self) -> Trace:
        """What ran so far. Raises RuntimeError before the meter was entered."""
        if self._recorder is None:
            raise RuntimeError("nothing was metered yet: run the program inside `with meter:` first")
        return self._recorder.trace

    def report(self, *, hardware: str | os.PathLike[str] | Hardware | None = None, mode: Mode = "eager") -> Report:
        """Price what was metered so far, on the meter's device or another one."""
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
        device = self.hardware if hardware is None else load_hardware(hardware)
        kernels = kernels_of(self.trace, strict=self._strict)
        return Report(
            kernels=kernels,
            timings=time_kernels(kernels, device, self.trace.switches, self._host),
            hardware=device,
            switches=self.trace.switches,
            mode=mode,
            host_seconds=host_seconds(kernels, self._host),
            peak_memory_bytes=peak_memory_bytes(self.trace),
            causal=self._causal,
        )
