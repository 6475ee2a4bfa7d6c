"""The CPU that launches the kernels: what a program costs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopmeter.device.schema import SchemaRecord, by, number, text

_seconds = number("a number of seconds from 0 to 1", least=0, most=1)  # 0: for what-ifs
_factor = number("a number over 0 and at most 1e9", above=0, most=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(SchemaRecord):
    """What a program costs the CPU, in seconds: for each op, view, module call and kernel of compiled code.

    The defaults are those of an AMD EPYC 7742 (Zen 2, 3.4 GHz, the host of a DGX A100). Another CPU has the same costs
    times `relative_time`; a cloud's virtual Xeon of 2020 (2.2 GHz) took 1.4. Set on thirteen published runs of torch
    2.0 and 2.1 that wait for the host, from 3.97 ms (DeepLab, compiled) to 25.8 ms (Llama-2-7B decoding, eager), which
    it predicts with a mean error of 5 % and a largest one of 13 %. Set on one half of them, it predicts the other half
    within 4 to 6 %. Hosts of an H100 and an MI300X with torch 2.7 take .8 to 1.3 times as long, by four traces from
    which the profiler's own time was taken away (about .8 µs an op, .9 µs a Python call, .7 µs a call of the driver).
    `flopmeter calibrate` measures a host.

    launch_seconds: an op that launches a kernel of torch's own, with the Python that calls it.
    library_seconds: what an op takes beyond that if a library (cuBLAS, cuDNN, flash attention) has the kernel: it asks
        for an algorithm, makes descriptors and a workspace. In traces of an H100 a matmul takes the CPU 24 to 40 µs,
        an addition 8 to 12.
    view_seconds: an op that launches none.
    module_call_seconds: nn.Module.__call__ and its forward.
    triton_launch_seconds: a kernel that inductor wrote. 4 to 6 µs of CPU time; 14 in torch 2.0 and 2.1, whose launcher
        is Python. Other kernels in compiled code are called through Python and the dispatcher as in eager code.
    relative_time: of this CPU, by which all of the above are multiplied.
    """

    launch_seconds: float = field(default=6.5e-6, metadata=by(_seconds))
    library_seconds: float = field(default=31e-6, metadata=by(_seconds))
    view_seconds: float = field(default=3.2e-6, metadata=by(_seconds))
    module_call_seconds: float = field(default=6e-6, metadata=by(_seconds))
    triton_launch_seconds: float = field(default=5e-6, metadata=by(_seconds))
    relative_time: float = field(default=1.0, metadata=by(_factor))
    source: str | None = field(default=None, metadata=by(text))

    def op_seconds(self, *, is_library: bool) -> float:
        """A call of an op that launches a kernel."""
        return self.relative_time * (self.launch_seconds + (self.library_seconds if is_library else 0.0))

    @property
    def summary(self) -> str:
        """What the model of the host assumes, in one line."""
        costs = {
            "an op": self.launch_seconds,
            "more for a library's kernel": self.library_seconds,
            "a view": self.view_seconds,
            "a module call": self.module_call_seconds,
            "a compiled kernel": self.triton_launch_seconds,
        }
        told = ", ".join(f"{self.relative_time * seconds * 1e6:.3g} µs {what}" for what, seconds in costs.items())
        return f"{told} ({self.source or 'the default, of an AMD EPYC 7742'})"

    def before_op_seconds(self, views: int, module_calls: int) -> float:
        """Views and module calls that come before it."""
        return self.relative_time * (views * self.view_seconds + module_calls * self.module_call_seconds)
