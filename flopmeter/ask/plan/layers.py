"""What one layer of each kind costs a rank, and what is outside of the layers, metered once for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flopmeter.ask.plan.blocks import Blocks, blocks_of
from flopmeter.ask.plan.experts import experts_of, with_routing
from flopmeter.ask.plan.fp8 import fp8_numel
from flopmeter.ask.plan.overlap import hidden_seconds
from flopmeter.ask.plan.program import PARAMETERS, Where, backward, give_gradients, optimizer_step, split_layers
from flopmeter.ask.plan.schedules import PassKind
from flopmeter.ask.plan.splits import PlanError, Shape
from flopmeter.ask.plan.subject import Subject, in_words
from flopmeter.ask.what_if import improved
from flopmeter.costs import UncountedError
from flopmeter.costs.data_movement.communication import dtensor_notes
from flopmeter.device.hardware import HardwareError
from flopmeter.distributed import world
from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.meter import FlopMeter
from flopmeter.models.hub_inputs import TargetError
from flopmeter.records import DEFAULT_STREAM, Op
from flopmeter.report.report import Report
from flopmeter.timing.host import HostStep, host_steps

AT_ONCE = 1e9  # a host as many times as fast
BEFORE, AFTER = -1, -2  # instead of a layer's number: the embedding; and the norm, the head and the loss


@dataclass(frozen=True, slots=True)
class PassCost:
    """A forward or a backward pass of one microbatch. The first four are shares of `seconds`, the device's."""

    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    communication_seconds: float = 0.0  # of collectives that the pass waits for
    overhead_seconds: float = 0.0  # of kernels too small to outlast their launch
    host_seconds: float = 0.0  # until the host has launched all kernels
    model_flops: int = 0

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.memory_seconds + self.communication_seconds + self.overhead_seconds

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: PassCost) -> PassCost:
        return PassCost(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


class PartCost(NamedTuple):
    """A layer, or what is before or after the layers, on one rank."""

    forward: PassCost
    backward: PassCost  # recomputation included
    parameters: int  # of this rank, before FSDP shards them
    blocks: Blocks = Blocks()  # of memory
    expert_parameters: int = 0  # of `parameters`, those of this rank's experts
    weights: PassCost = PassCost()  # of `backward`, what makes nothing but gradients of parameters
    held_bytes: int = 0  # gradients of activations that `weights` needs
    fp8_parameters: int = 0  # of `parameters`, those that are gathered in fp8
    frozen_parameters: int = 0  # of `parameters`, those without gradients
    trained_tensors: int = 0  # that an optimizer steps
    expert_tensors: int = 0  # of these, those of experts

    @property
    def activation_bytes(self) -> int:
        """That a microbatch leaves until its backward pass."""
        return self.blocks.kept_bytes

    @property
    def trained_parameters(self) -> int:
        return self.parameters - self.frozen_parameters

    @property
    def trained_share(self) -> float:
        return self.trained_parameters / self.parameters if self.parameters else 1.0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters, in the types in which products read them."""
        return PARAMETERS.itemsize * self.parameters - (PARAMETERS.itemsize - 1) * self.fp8_parameters


class LayerCosts(NamedTuple):
    """Everything that the splits of one shape need to know."""

    layers: Mapping[int, PartCost]  # by kind
    before: PartCost
    after: PartCost
    boundary_bytes: int  # of what one layer hands to the next: a message between stages
    optimizer_seconds_per_parameter: float  # of a shard
    optimizer_bytes_per_parameter: float  # that its step takes for itself
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    optimizer_host_seconds: tuple[float, float] = (0.0, 0.0)  # of its step, and for each of its tensors besides


def try_layers(subject: Subject, where: Where, shape: Shape, *, async_tp: bool = False) -> LayerCosts | str:
    """The same as `meter_layers`, or in words why the model does not run in this shape: plans for tensor parallelism
    that transformers never tried end in all kinds of errors."""
    try:
        return meter_layers(subject, where, shape, async_tp=async_tp)
    except (PlanError, TargetError, HardwareError, DataDependentError, UncountedError):
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if shape.runs_as_written:
            raise PlanError(f"{subject.name} does not run: {in_words(error)}") from error
        return in_words(error)


def meter_layers(subject: Subject, where: Where, shape: Shape, *, async_tp: bool = False) -> LayerCosts:
    """Two layers of the most frequent kind and one of each other kind run forward and backward. The second one of the
    first kind is taken: it is neither the first to run nor the last."""
    kinds = sorted(set(subject.kinds), key=lambda kind: -subject.kinds.count(kind))
    model, report, boundary = _metered(subject, where, shape, [kinds[0], *kinds])
    blocks = subject.layers_of(model)
    steps = host_steps(report.launches, report.hardware, report.hardware.host)
    report = improved(report, "overhead", AT_ONCE)
    hidden = hidden_seconds(report, shape.tp) if async_tp and shape.tp > 1 else None
    parts = _PartsOfReport(report, steps, f"{type(model).__name__}.{subject.layers}.", hidden)
    experts = [sum(each.numel() for module in experts_of(block) for each in module.parameters()) for block in blocks]
    inside, frozen = ([_numel_of(block, which) for block in blocks] for which in (None, False))
    outside, frozen_outside = _numel_of(model) - sum(inside), _numel_of(model, False) - sum(frozen)
    embedding = next(model.parameters())
    first = min(_local_numel(embedding), outside)
    frozen_first = 0 if embedding.requires_grad else first
    layers = {
        kind: parts.cost(place, inside[place], experts[place])._replace(
            fp8_parameters=fp8_numel(blocks[place]),
            frozen_parameters=frozen[place],
            trained_tensors=len(_trained(blocks[place])),
            expert_tensors=sum(len(_trained(module)) for module in experts_of(blocks[place])),
        )
        for place, kind in enumerate(kinds, 1)
    }
    if not boundary or not all(cost.forward.seconds for cost in layers.values()):
        raise PlanError(
            f"nothing ran in {subject.layers} of {subject.name}: plan needs a model that calls them as "
            "modules, block(x), not in a function that torch.compile compiles (mode='compiled' compiles layers)"
        )
    trained_outside = len(_trained(model)) - sum(len(_trained(block)) for block in blocks)
    trained_first = min(int(embedding.requires_grad), trained_outside)
    return LayerCosts(
        layers=layers,
        before=parts.cost(BEFORE, first)._replace(frozen_parameters=frozen_first, trained_tensors=trained_first),
        after=parts.cost(AFTER, outside - first)._replace(
            frozen_parameters=frozen_outside - frozen_first, trained_tensors=trained_outside - trained_first
        ),
        boundary_bytes=boundary[0],
        **_optimizer(blocks[1], where),
        notes=_notes_of_any_run(report),
        assumptions=report.assumptions,
    )


def _metered(subject: Subject, where: Where, shape: Shape, layers: list[int]) -> tuple[nn.Module, Report, list[int]]:
    """One rank's part of a model with these layers, the report of a microbatch, and the bytes that the last of the
    layers hands on at each call."""
    ranks = max(shape.cp, shape.ep) * shape.tp  # of cp and ep one divides the other
    sizes = {"rest": ranks // (shape.cp * shape.tp), "cp": shape.cp, "tp": shape.tp}
    with world(ranks, sizes, gpus_per_node=where.cluster.gpus_per_node) as mesh:
        model = subject.model(layers)
        _cast(model)
        split_layers(subject, model, mesh, shape.recompute, range(0, shape.ep * shape.tp, shape.tp))
        boundary = _watch_boundary(subject.layers_of(model)[-1])
        tokens = torch.empty(shape.microbatch, where.length, dtype=torch.long, device="meta")
        with FlopMeter(where.hardware, cluster=where.cluster, **with_routing(shape.ep, where.meter_options)) as meter:
            backward(subject, model, mesh, tokens)
        return model, meter.report(mode=where.mode), boundary


def _notes_of_any_run(report: Report) -> tuple[str, ...]:
    """Without what is told of the host in this short program."""
    host = report.hardware.host
    of_this_one = {host.summary, *dtensor_notes(report.kernels, host)}
    return tuple(note for note in report.notes if note not in of_this_one)


def _cast(model: nn.Module) -> None:
    """FSDP2's mixed precision casts parameters, not buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(PARAMETERS)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _local_numel(tensor: Tensor) -> int:
    return _local(tensor).numel()


def _numel_of(module: nn.Module, trained: bool | None = None) -> int:
    """The number of parameters on this rank: all of them, or only the trained or the frozen ones."""
    return sum(_local_numel(each) for each in module.parameters() if trained in (None, each.requires_grad))


def _watch_boundary(block: nn.Module) -> list[int]:
    found: list[int] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        hidden = _local(output[0] if isinstance(output, tuple) else output)
        found.append(hidden.nbytes)

    block.register_forward_hook(note)
    return found


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def _optimizer(block: nn.Module, where: Where) -> dict[str, Any]:
    """Seconds and bytes for each trained parameter, from a layer in fp32; a shard is assumed to take its share. The
    host's come of steps on one and on two such layers, whose parameters are DTensors, as FSDP2 makes them."""
    shapes = [_local(each).shape for each in _trained(block) or block.parameters()]
    with world(1) as mesh:
        one, two = (_optimizer_report(shapes * layers, mesh, where) for layers in (1, 2))
    numel = sum(shape.numel() for shape in shapes)
    each = (two.launch_seconds - one.launch_seconds) / len(shapes)
    return {
        "optimizer_seconds_per_parameter": (one.seconds - one.idle_seconds) / numel,
        "optimizer_bytes_per_parameter": max(one.memory.timeline["temporaries"]) / numel,
        "optimizer_host_seconds": (one.launch_seconds - each * len(shapes), each),
    }


def _optimizer_report(shapes: list[torch.Size], mesh: DeviceMesh, where: Where) -> Report:
    """The second step of an optimizer; the first one makes its state."""
    shards = [DTensor.from_local(torch.empty(shape, device="meta"), mesh, [Shard(0)]) for shape in shapes]
    step = optimizer_step([each.requires_grad_() for each in shards])
    give_gradients(shards)
    step()
    give_gradients(shards)
    with FlopMeter(where.hardware, **where.meter_options) as meter:
        step()
    return meter.report(mode=where.mode)


class _PartsOfReport:
    """Which time and memory of a report belongs to which layer."""

    def __init__(
        self, report: Report, steps: Sequence[HostStep], prefix: str, hidden: Sequence[float] | None = None
    ) -> None:
        """`report`: of a host that takes no time, and `steps` those that it takes. `hidden`: seconds of each kernel's
        wait for collectives that do not count."""
        self._report, self._steps, self._prefix = report, steps, prefix
        self._hidden = hidden or [0.0] * len(report.kernels)
        self._gradients = self._find_gradients()
        self._passes: dict[tuple[int, PassKind], PassCost] = {}
        for part, kind, cost in self._spans():
            self._passes[part, kind] = self._passes.get((part, kind), PassCost()) + cost
        place = _Place(prefix)
        parts = [place(op.module, op.phase) for op in report.memory.trace.ops]
        self._blocks = blocks_of(report.memory, parts, self._gradients)
        self._held = self._held_for_weights()

    def cost(self, part: int, parameters: int, experts: int = 0) -> PartCost:
        forward, backward, weights = (self._passes.get((part, kind), PassCost()) for kind in get_args(PassKind))
        blocks, held = self._blocks.get(part, Blocks()), self._held.get(part, 0)
        return PartCost(forward, backward + weights, parameters, blocks, experts, weights, held)

    def _find_gradients(self) -> set[int]:
        """Storages that became gradients of parameters."""
        trace = self._report.memory.trace
        return {
            made
            for place, leaf in trace.accumulations
            if trace.storages[leaf].role == "parameters"
            for made in trace.ops[place].makes
        }

    def _makes_gradients(self, op: Op) -> bool:
        """Whether the op makes gradients of parameters and nothing else."""
        return op.phase == "backward" and bool(op.call.outputs) and op.makes <= self._gradients

    def _held_for_weights(self) -> dict[int, int]:
        """For each part, the bytes made in the backward pass from which gradients of parameters are computed."""
        trace, place = self._report.memory.trace, _Place(self._prefix)
        first = next((number for number, op in enumerate(trace.ops) if op.phase == "backward"), len(trace.ops))
        found: dict[int, set[int]] = {}
        for op in trace.ops:
            part, _ = place(op.module, op.phase)
            if self._makes_gradients(op):
                made = (each for each in op.reads - self._gradients if trace.storages[each].born >= first)
                found.setdefault(part, set()).update(made)
        return {part: sum(trace.storages[each].nbytes for each in held) for part, held in found.items()}

    def _spans(self) -> Iterator[tuple[int, PassKind, PassCost]]:
        """The computing stream, cut at the end of each kernel: its wait for a collective belongs to the kernel that
        waits. Where the host keeps the device waiting is a question to the whole step."""
        report, place = self._report, _Place(self._prefix)
        end = 0.0
        for kernel, timing, hidden, step in zip(report.kernels, report.timings, self._hidden, self._steps, strict=True):
            part, is_backward = place(kernel.op.module, kernel.op.phase)
            kind: PassKind = "backward" if is_backward else "forward"
            kind = "weights" if is_backward and self._makes_gradients(kernel.op) else kind
            host = step.before + step.further
            if timing.stream != DEFAULT_STREAM:
                yield part, kind, PassCost(host_seconds=host)
                continue
            waited = max(0.0, timing.start_seconds - end)  # no rounding error is a wait
            communication = min(waited, timing.link_wait_seconds) + timing.seconds * timing.is_collective - hidden
            work = 0.0 if timing.is_collective else timing.work_seconds
            yield (
                part,
                kind,
                PassCost(
                    compute_seconds=work if timing.is_compute else 0.0,
                    memory_seconds=0.0 if timing.is_compute else work,
                    communication_seconds=communication,
                    overhead_seconds=0.0 if timing.is_collective else timing.floor_seconds,
                    host_seconds=host,
                    model_flops=report.counted_model_flops(kernel),
                ),
            )
            end = timing.end_seconds


class _Place:
    """The part of a kernel, in the order of the program: its layer; outside of layers, before or after the first."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._last, self._is_backward = prefix, BEFORE, False

    def __call__(self, module: str, phase: str) -> tuple[int, bool]:
        if not self._is_backward and phase != "forward":
            self._is_backward, self._last = True, AFTER
        if module.startswith(self._prefix):
            self._last = int(module.removeprefix(self._prefix).partition(".")[0])
        elif self._last >= 0 and module.count("."):
            self._last = BEFORE if self._is_backward else AFTER
        return self._last, self._is_backward
