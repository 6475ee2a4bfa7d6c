"""A profile beside the prediction: the time that each op took, the time that it should take, and what could be won."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple, get_args

from flopmeter.costs import costs_of
from flopmeter.device.hardware import AnyHardware, Hardware, HardwareError, load_hardware
from flopmeter.measured import rebuild
from flopmeter.measured.kineto import DeviceEvent, OpEvent, Profile, ProfileError, Span, read_profile
from flopmeter.measured.result import NO_KERNEL, Check, CheckRow, UnpricedRow
from flopmeter.meter import FlopMeter
from flopmeter.records import Call, Clocks, Cost, HostCopy, Switches
from flopmeter.report.quantities import in_ms
from flopmeter.report.rows import shapes_of
from flopmeter.timing.energy import PowerLaws
from flopmeter.timing.floors import least_seconds
from flopmeter.timing.gemm_kernels import UNNAMED, NamedKernel, as_found_by, legacy_mma_share, named
from flopmeter.timing.host import op_seconds
from flopmeter.timing.timeline import KernelPrices

# How cuBLAS and cuDNN name their kernels; of CUTLASS's in fp32 these are the ones that multiply on Tensor Cores.
_SIGNS_OF_TF32 = ("tf32", "tensorop_s1688gemm")
_TO_OR_FROM_HOST = ("HtoD", "DtoH")  # in the names that CUPTI gives to copies
_STAGED = "Pageable"  # there, of memory that is not page-locked
_ATEN = "aten::"
_SECONDS = 1e-9  # of a nanosecond
_CLOCKS: Mapping[Clocks, str] = {
    "sustained": "the clocks of a long run under the power limit (sustained)",
    "burst": "the boost clock (burst)",
}
_OUTSIDE = "launched outside of any op: compiled code, a replayed graph, a library"
_NOT_SENT = "the trace holds no call that launched it"


def check(path: str | os.PathLike[str], hardware: AnyHardware | None = None, *, clocks: Clocks | None = None) -> Check:
    """Compare a Chrome trace of torch.profiler, recorded with record_shapes=True, with the prediction for `hardware`.

    hardware: a name, a path or a Hardware; by default the device that the trace names. A trace of a CPU names none;
        `flopmeter calibrate` writes a profile of the machine.
    clocks: 'sustained' or 'burst', as of a FlopMeter; by default those that the measured matmuls come nearer to, which
        a note says. A trace does not tell how long the device ran before it.

    Raises ProfileError if the file is no such trace, HardwareError for an unknown device, ValueError for other clocks.
    """
    if clocks not in (None, *get_args(Clocks)):
        raise ValueError(f"clocks must be one of {', '.join(get_args(Clocks))}, not {clocks!r}")
    profile = read_profile(path)
    device = _sharing(_device(Path(path), profile, hardware), profile.ranks)
    meter = FlopMeter(device, as_cuda=profile.is_cuda)
    pricer = _Pricer(device, profile, meter)
    with meter:
        for root in profile.roots:
            for event in rebuild.find_ops(root):
                pricer.add(event)
    return pricer.result(Path(path).name, clocks)


def _device(path: Path, profile: Profile, hardware: AnyHardware | None) -> Hardware:
    if hardware is None:
        if not profile.is_cuda:
            raise ProfileError(
                f"{path} was recorded on a CPU and does not name it: give the hardware "
                "(flopmeter calibrate -o this-cpu.yaml writes the profile of this machine)"
            )
        if profile.device_name is None:
            raise ProfileError(f"{path} does not name its device: give the hardware")
        return load_hardware(profile.device_name)
    device = load_hardware(hardware)
    if device.is_cpu == profile.is_cuda:
        ran, is_one = ("a GPU", "is a CPU") if profile.is_cuda else ("a CPU", "is none")
        raise ProfileError(f"{path} was recorded on {ran}, but {device.name} {is_one}")
    return device


def _sharing(device: Hardware, ranks: int) -> Hardware:
    """The device with its share of the link: ranks copy at the same time, and a switch's devices share it."""
    sharers = _sharers(device, ranks)
    if device.pcie is None or sharers == 1:
        return device
    return device.replace(pcie={"bidirectional_gb_per_s": device.pcie.bidirectional_gb_per_s / sharers})


def _sharers(device: Hardware, ranks: int) -> int:
    return 1 if device.pcie is None or device.host_link is not None else min(ranks, device.pcie.devices)


class _Prediction(NamedTuple):
    """The prediction of one call."""

    row: CheckRow  # without a measurement and its prediction
    seconds: Mapping[Clocks, float]
    macs: int
    model_flops: int

    def measured(self, calls: int, seconds: float, clocks: Clocks) -> CheckRow:
        """The row of these calls, which together took `seconds`."""
        sums = ("floor_seconds", "flops", "bytes")
        of_all = {name: getattr(self.row, name) * calls for name in sums}
        predicted = self.seconds[clocks] * calls
        return self.row._replace(calls=calls, measured_seconds=seconds, predicted_seconds=predicted, **of_all)


class _Prices:
    """Seconds of single kernels on one device, at the clocks of a long run and of a burst."""

    def __init__(self, device: Hardware):
        self.device = device
        self._laws: dict[Clocks, PowerLaws] = {clocks: PowerLaws() for clocks in get_args(Clocks)}

    def of(self, cost: Cost, switches: Switches, ran: NamedKernel, clocks: Clocks) -> tuple[float, str]:
        """Seconds, and the kernel's class."""
        law = self._laws[clocks].of(self.device, switches, clocks)
        if law is not None:
            price = law.price_alone(cost, ran)
        else:
            price = KernelPrices(self.device, switches)(cost, 0.0, 1.0, ran)
        staging = cost.staged_bytes / self.device.host.copy_bytes_per_s  # which a profile has in the copy's own time
        return price.busy.seconds + self.device.kernel_floor_seconds + staging, price.kernel_class


@dataclass
class _Pricer:
    """Collects the ops of a profile; equal calls are rebuilt and priced once."""

    device: Hardware
    profile: Profile
    meter: FlopMeter  # entered
    _known: dict[Any, _Prediction | str] = field(default_factory=dict)  # a text instead says why there is no prediction
    _calls: Counter[Any] = field(default_factory=Counter)
    _nanoseconds: Counter[Any] = field(default_factory=Counter)
    _alone: Counter[Any] = field(default_factory=Counter)  # the same two of calls beside which no other stream ran
    _alone_nanoseconds: Counter[Any] = field(default_factory=Counter)
    _launched_nothing: int = 0
    _assumed_dtype: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._dtype_in_lists = rebuild.commonest_float(self.profile.roots)
        self._prices = _Prices(self.device)

    def add(self, event: OpEvent) -> None:
        launched = list(event.all_launched())
        if self.profile.is_cuda and not launched:
            self._launched_nothing += 1
            return
        is_staged = _is_staged(launched)
        is_tf32 = any(sign in one.name.lower() for one in launched for sign in _SIGNS_OF_TF32)
        ran = _library_kernel(one.name for one in launched)
        key = (event.name, event.inputs, rebuild.type_in_lists(event), is_staged, is_tf32, ran)
        if key not in self._known:
            self._known[key] = self._predicted(event, is_staged, is_tf32, ran)
        nanoseconds = self._measured(event)
        is_unknown = isinstance(self._known[key], str)  # then the ops that it called may be predicted
        for part in (op for child in event.children for op in rebuild.find_ops(child)):
            if is_unknown or _is_saved(part, event):
                nanoseconds -= self._measured(part)
                self.add(part)
        self._calls[key] += 1
        self._nanoseconds[key] += nanoseconds
        if all(one.is_alone for one in launched):
            self._alone[key] += 1
            self._alone_nanoseconds[key] += nanoseconds

    def _measured(self, event: OpEvent) -> int:
        """Nanoseconds in which the event's kernels ran. cuDNN runs groups of a convolution, and layers of an LSTM, in
        parallel on streams of its own."""
        spans = [one.span for one in event.all_launched()] if self.profile.is_cuda else [event.span]
        return _union_length(spans)

    def result(self, name: str, asked: Clocks | None) -> Check:
        matmuls = {of: self._matmuls_to_measured(of) for of in get_args(Clocks)}
        nearer = min(get_args(Clocks), key=lambda of: abs(log(matmuls[of])))
        clocks: Clocks = asked or nearer
        span = _seconds(self.profile.span)
        dtype = self._main_dtype()
        flops = sum(known.model_flops * self._calls[key] for key, known in self._predictions())
        peak = self.device.contraction_peak(dtype).flop_per_s
        return Check(
            title=f"{name} · {self.device.title} · {dtype}",
            hardware=self.device,
            is_cuda=self.profile.is_cuda,
            clocks=clocks,
            rows=tuple(sorted(self._rows(clocks), key=lambda row: -row.to_win_seconds)),
            alone_measured_seconds=sum(self._alone_nanoseconds[key] for key, _ in self._predictions()) * _SECONDS,
            alone_predicted_seconds=sum(known.seconds[clocks] * self._alone[key] for key, known in self._predictions()),
            unpriced=tuple(sorted(_merged(self._unpriced()), key=lambda row: -row.measured_seconds)),
            span_seconds=span,
            busy_seconds=_union_length(self._busy()) * _SECONDS,
            host_seconds=_union_length(root.span for root in self.profile.roots) * _SECONDS,
            mfu=flops / (span * peak) if span else 0.0,
            main_dtype=dtype,
            notes=(*_of_clocks(clocks, matmuls, asked), *self._notes()),
        )

    def _rows(self, clocks: Clocks) -> Iterator[CheckRow]:
        for key, known in self._predictions():
            yield known.measured(self._calls[key], self._nanoseconds[key] * _SECONDS, clocks)

    def _matmuls_to_measured(self, clocks: Clocks) -> float:
        """Predicted by measured time of the matmuls, convolutions included, that clocks change; 1 without any."""
        measured = predicted = 0.0
        for key, known in self._predictions():
            if known.macs and len(set(known.seconds.values())) > 1:
                measured += self._nanoseconds[key] * _SECONDS
                predicted += self._calls[key] * known.seconds[clocks]
        return predicted / measured if measured else 1.0

    def _unpriced(self) -> Iterator[UnpricedRow]:
        for key, known in self._known.items():
            if isinstance(known, str):
                name, seconds = key[0], self._nanoseconds[key] * _SECONDS
                yield UnpricedRow(_short(name), self._calls[key], seconds, known, name.startswith(_ATEN))
        for root in self.profile.roots if self.profile.is_cuda else ():
            for frame in rebuild.find_frames(root):
                if frame.launched:
                    seconds = sum(_seconds(event.span) for event in frame.launched)
                    yield UnpricedRow(_short(frame.name), 1, seconds, _OUTSIDE, frame.name.startswith(_ATEN))
        for event in self.profile.unlinked:
            reason = _OUTSIDE if event.is_sent else _NOT_SENT
            yield UnpricedRow(event.name, 1, _seconds(event.span), reason, is_aten=False)

    def _busy(self) -> Iterator[Span]:
        """The spans in which the device runs something, or a CPU runs an op."""
        if self.profile.is_cuda:
            yield from (event.span for event in self.profile.device_events)
        else:
            yield from (event.span for root in self.profile.roots for event in rebuild.find_ops(root))

    def _predictions(self) -> Iterator[tuple[Any, _Prediction]]:
        for key, known in self._known.items():
            if isinstance(known, _Prediction):
                yield key, known

    def _main_dtype(self) -> str:
        """The dtype in which most multiply-adds are done; fp32 if there are none."""
        macs: Counter[str] = Counter()
        for key, known in self._predictions():
            if known.macs:
                macs[known.row.dtype] += known.macs * self._calls[key]
        return max(macs, key=macs.__getitem__, default="fp32")

    def _notes(self) -> Iterator[str]:
        if earlier := self.profile.earlier:
            seconds = sum(_seconds(event.span) for event in earlier)
            yield f"left out: {len(earlier)} kernels, {in_ms(seconds)} ms, that were sent before the profile began"
        if self._launched_nothing:
            yield f"{self._launched_nothing} ops launched nothing on the device: views, allocation, work on the host"
        if self._assumed_dtype:
            names = ", ".join(sorted(self._assumed_dtype))
            dtype = str(self._dtype_in_lists).removeprefix("torch.")
            yield f"assumed: the tensors in the lists of {names} are {dtype}; the trace does not tell their types"
        if any(key[1] is not None and key[1].strides is None for key, _ in self._predictions()):
            yield "assumed: tensors are contiguous; this trace, from an old profiler, has no strides"
        if any(key[1] is not None and key[1].concrete is None for key, _ in self._predictions()):
            yield "assumed: numbers, and lists of them, are the defaults, a dimension the last: the trace has none"
        if _sharers(self.device, self.profile.ranks) > 1:
            yield "assumed: ranks copy from the host at the same time, over a link that their devices share"
        if any(as_found_by(key[-1], self.device) is not self.device for key, _ in self._predictions()):
            share = f"{100 * legacy_mma_share(self.device):.0f} %"
            yield f"kernels with Ampere's instructions, by their names, are priced as such: {share} of the peak here"
        if any(key[-1].tile for key, _ in self._predictions()):
            yield "kernels of libraries are priced with the tile that their names tell, not with the fastest"
        if self.profile.is_cuda:
            yield "measured: the time of an op's kernels; predicted: the same, without launching them"
        else:
            yield "measured: an op with all that it calls, slowed by the profiler; predicted: its dispatch and its work"
        yield "floor: FLOPs at the peak or bytes at the bandwidth, whichever takes longer; to win: down to the floor"

    # --- one call ---

    def _predicted(self, event: OpEvent, is_staged: bool | None, is_tf32: bool, ran: NamedKernel) -> _Prediction | str:
        try:
            arguments = rebuild.arguments_of(event, self._dtype_in_lists)
            calls = self._recorded(arguments)
            costs = [cost for call in calls for cost in costs_of(call)]
            if is_staged is not None:
                costs = [replace(cost, work=HostCopy(cost.bytes_written, is_staged)) for cost in costs]
            prediction = _priced(event, calls, costs, self._prices, ran, Switches(is_tf32, is_tf32, False))
        except (rebuild.NotRebuilt, HardwareError) as reason:
            return str(reason)
        if arguments.assumes_dtype:
            self._assumed_dtype.add(prediction.row.name)
        return prediction

    def _recorded(self, arguments: rebuild.RebuiltCall) -> list[Call]:
        """The calls that the tracer records: on meta some ops consist of other ops."""
        before = len(self.meter.trace.ops)
        unrun = rebuild.run(arguments)
        return [unrun] if unrun is not None else [op.call for op in self.meter.trace.ops[before:]]


def _is_saved(part: OpEvent, event: OpEvent) -> bool:
    """Whether the part is autograd's copy of what the op overwrites, as for the gradient of silu_."""
    return part.name == "aten::clone" and event.name.endswith("_")


def _is_staged(launched: list[DeviceEvent]) -> bool | None:
    """Whether copies over the link, if these are nothing else, are from or to memory that is not page-locked."""
    if not launched or not all(one.is_copy and any(way in one.name for way in _TO_OR_FROM_HOST) for one in launched):
        return None
    return any(_STAGED in one.name for one in launched)


def _library_kernel(names: Iterable[str]) -> NamedKernel:
    """The kernel whose name tells something; if several have different tiles, none of their tiles."""
    kernels_of_library = {found for name in names if (found := named(name)) != UNNAMED}
    if len(kernels_of_library) == 1:
        return kernels_of_library.pop()
    return NamedKernel(any(one.has_ampere_instructions for one in kernels_of_library))


def _priced(
    event: OpEvent, calls: list[Call], costs: list[Cost], prices: _Prices, ran: NamedKernel, switches: Switches
) -> _Prediction:
    """`ran`: the kernel of a library; the floor is that of the device with any."""
    name, device = _short(event.name), prices.device
    shapes = shapes_of(calls[0].inputs if calls else ())
    host = device.host if device.is_cpu else None  # for a GPU only the device's time is compared
    if not costs:
        dispatch = host.before_op_seconds(views=1, module_calls=0) if host else 0.0
        row = CheckRow(name, shapes, NO_KERNEL, "")
        return _Prediction(row, dict.fromkeys(get_args(Clocks), dispatch), 0, 0)
    of_each = {
        clocks: [prices.of(cost, switches, ran if cost.macs else UNNAMED, clocks) for cost in costs]
        for clocks in get_args(Clocks)
    }
    (_, kernel_class), longest = max(zip(of_each["sustained"], costs, strict=True), key=lambda pair: pair[0][0])
    row = CheckRow(
        name,
        shapes,
        longest.op_class,
        switches.matmul_dtype(longest),
        floor_seconds=sum(least_seconds(cost, device, switches) for cost in costs),
        flops=sum(cost.executed_flops for cost in costs),
        bytes=sum(cost.bytes for cost in costs),
        kernel_class=kernel_class,
    )
    dispatch = op_seconds(longest, host) if host else 0.0
    seconds = {clocks: sum(each for each, _ in kernels) + dispatch for clocks, kernels in of_each.items()}
    return _Prediction(row, seconds, sum(cost.macs for cost in costs), sum(cost.model_flops for cost in costs))


def _of_clocks(clocks: Clocks, matmuls: Mapping[Clocks, float], asked: Clocks | None) -> Iterator[str]:
    """The clocks of the prediction, and how far off the matmuls are at each. Nothing where all are the same."""
    if len(set(matmuls.values())) > 1:
        other = next(of for of in matmuls if of != clocks)
        why = "as asked" if asked else "to which the matmuls come nearer"
        yield (
            f"predicted at {_CLOCKS[clocks]}, {why}: {matmuls[clocks]:.2f} of their measured time;"
            f" at {_CLOCKS[other]} {matmuls[other]:.2f}"
        )


def _short(name: str) -> str:
    return name.removeprefix(_ATEN)


def _union_length(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of these spans: time in several of them counts once."""
    total = until = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _seconds(span: Span) -> float:
    return (span.end - span.start) * _SECONDS


def _merged(rows: Iterable[UnpricedRow]) -> list[UnpricedRow]:
    """One row for each name and reason."""
    groups: dict[tuple[str, str], list[UnpricedRow]] = {}
    for row in rows:
        groups.setdefault((row.name, row.reason), []).append(row)
    return [
        group[0]._replace(
            calls=sum(row.calls for row in group), measured_seconds=sum(row.measured_seconds for row in group)
        )
        for group in groups.values()
    ]
