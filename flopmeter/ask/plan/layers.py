"""What one layer of each kind costs a rank, and what is outside of the layers, metered once for each shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from flopmeter.ask.plan.blocks import Blocks, blocks_of
from flopmeter.ask.plan.experts import experts_of, with_routing
from flopmeter.ask.plan.fp8 import fp8_numel
from flopmeter.ask.plan.optimizer_costs import OptimizerCost, OptimizerCosts
from flopmeter.ask.plan.overlap import hidden_seconds
from flopmeter.ask.plan.program import (
    PARAMETERS,
    Where,
    backward,
    split_layers,
    without_gradients,
)
from flopmeter.ask.plan.schedules import PassKind
from flopmeter.ask.plan.splits import PlanError, Shape
from flopmeter.ask.plan.subject import Subject, in_words, tokens_of
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
    def model_flops(self) -> int:
        return self.forward.model_flops + self.backward.model_flops

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
    optimizer: OptimizerCost
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    after_alone: PartCost | None = None  # `after` on another stage than `before`, with the parameters that both have

    @property
    def in_stages(self) -> LayerCosts:
        """The same for a pipeline, whose last stage has a copy of an embedding that is tied to its head."""
        return self if self.after_alone is None else self._replace(after=self.after_alone)

    def is_outside(self, part: PartCost) -> bool:
        """Whether it is what a model has outside of its layers."""
        return part is self.before or part is self.after


def try_layers(
    subject: Subject, optimizer_costs: OptimizerCosts, shape: Shape, *, async_tp: bool = False
) -> LayerCosts | str:
    """The same as `meter_layers`, or in words why the model does not run in this shape: plans for tensor parallelism
    that transformers never tried end in all kinds of errors."""
    try:
        return meter_layers(subject, optimizer_costs, shape, async_tp=async_tp)
    except (PlanError, *_TELLING):
        raise
    except _ERRORS_OF_MODELS as error:
        if shape.runs_as_written:
            how = _CASTS_PARAMETERS if _runs_in_fp32(subject, optimizer_costs.where) else ""
            raise PlanError(f"{subject.name} does not run{how}: {in_words(error)}") from error
        return in_words(error)


# What says to the user what to do; and what a model that does not run may end with.
_TELLING = (TargetError, HardwareError, DataDependentError, UncountedError)
_ERRORS_OF_MODELS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_CASTS_PARAMETERS = " with parameters in bf16 and the rest in fp32, as mixed precision of torch's FSDP2 runs it"


def _runs_in_fp32(subject: Subject, where: Where) -> bool:
    """Whether the model runs as it is, on one GPU."""
    model = subject.model()
    with world(1, {"rest": 1, "cp": 1, "tp": 1}) as mesh, suppress(Exception):
        with FlopMeter(where.hardware, **where.meter_options):
            backward(subject, model, mesh, tokens_of(model, 1, where.length))
        return True
    return False


def meter_layers(
    subject: Subject, optimizer_costs: OptimizerCosts, shape: Shape, *, async_tp: bool = False
) -> LayerCosts:
    """A model with few layers runs forward and backward; or, where it does not run without the others, as where layers
    are numbered or read what an earlier one has made, the whole one. On the device on which the optimizer steps."""
    few, every = few_layers(subject.kinds), list(range(len(subject.kinds)))
    if few == every:
        return _costs_of(subject, optimizer_costs, shape, every, async_tp)
    try:
        return _costs_of(subject, optimizer_costs, shape, few, async_tp)
    except _TELLING:
        raise
    except _ERRORS_OF_MODELS:
        return _costs_of(subject, optimizer_costs, shape, every, async_tp)


def few_layers(kinds: Sequence[int]) -> list[int]:
    """One layer of each kind, in the order of the model, and a second one of the most frequent kind; all layers where
    there are no more."""
    first_ones = sorted(set(kinds))
    few = sorted([*first_ones, max(first_ones, key=kinds.count)])
    return few if len(few) <= len(kinds) else list(range(len(kinds)))


def _costs_of(
    subject: Subject, optimizer_costs: OptimizerCosts, shape: Shape, layers: list[int], async_tp: bool
) -> LayerCosts:
    """Of each kind the first layer is taken, or the second one where the first is the first of all to run."""
    model, report, watched = _metered(subject, optimizer_costs.where, shape, layers)
    blocks = subject.layers_of(model)
    steps = host_steps(report.launches, report.hardware, report.hardware.host)
    report = improved(report, "overhead", AT_ONCE)
    hidden = hidden_seconds(report, shape.tp) if async_tp and shape.tp > 1 else None
    parts = _PartsOfReport(report, steps, f"{type(model).__name__}.{subject.layers}.", hidden)
    kinds = [subject.kinds[layer] for layer in layers]
    places = {kind: _place_of(kind, kinds) for kind in kinds}
    costs = {kind: _cost_of_layer(parts, place, blocks[place]) for kind, place in places.items()}
    idle = [layers[place] for kind, place in places.items() if not costs[kind].forward.seconds]
    _check_all_ran(subject, idle, some_did=bool(watched.boundary_bytes) and len(idle) < len(costs))
    most = max(places, key=subject.kinds.count)
    others = watched.others(model, blocks)
    return LayerCosts(
        layers=costs,
        before=_cost_outside(parts, BEFORE, watched.before),
        after=_cost_outside(parts, AFTER, others),
        after_alone=_cost_outside(parts, AFTER, [*others, *watched.tied]),
        boundary_bytes=watched.boundary_bytes[0],
        optimizer=optimizer_costs.cost(_shapes_of(blocks[places[most]])),
        notes=(*_notes_of_any_run(report), *(without_gradients(model) if shape.runs_as_written else ())),
        assumptions=report.assumptions,
    )


def _shapes_of(block: nn.Module) -> list[torch.Size]:
    """Of a layer's trained tensors on this rank, or of all where it trains none."""
    return [_local(each).shape for each in _trained(block.parameters()) or block.parameters()]


def _place_of(kind: int, kinds: Sequence[int]) -> int:
    first, *others = (place for place, other in enumerate(kinds) if other == kind)
    return others[0] if others and first == 0 else first


def _check_all_ran(subject: Subject, idle: Sequence[int], some_did: bool) -> None:
    """`idle`: layers that did not run. Raises PlanError where there are some."""
    if not some_did:
        raise PlanError(
            f"nothing ran in {subject.layers} of {subject.name}: plan needs a model that calls them as "
            "modules, block(x), not in a function that torch.compile compiles (mode='compiled' compiles layers)"
        )
    if idle:
        raise PlanError(
            f"{subject.layers}.{idle[0]} of {subject.name} does not run on token ids alone, as layers that read images"
            " do not: plan takes models of which all layers do"
        )


def _cost_of_layer(parts: _PartsOfReport, place: int, block: nn.Module) -> PartCost:
    experts = experts_of(block)
    return parts.cost(
        place, _numel_of(block.parameters()), sum(_numel_of(each.parameters()) for each in experts)
    )._replace(
        fp8_parameters=fp8_numel(block),
        frozen_parameters=_numel_of(_frozen(block.parameters())),
        trained_tensors=len(_trained(block.parameters())),
        expert_tensors=sum(len(_trained(module.parameters())) for module in experts),
    )


def _cost_outside(parts: _PartsOfReport, part: int, parameters: Sequence[nn.Parameter]) -> PartCost:
    return parts.cost(part, _numel_of(parameters))._replace(
        frozen_parameters=_numel_of(_frozen(parameters)), trained_tensors=len(_trained(parameters))
    )


def _metered(subject: Subject, where: Where, shape: Shape, layers: list[int]) -> tuple[nn.Module, Report, _Watched]:
    """One rank's part of a model with these layers, the report of a microbatch, and what was seen while it ran."""
    ranks = max(shape.cp, shape.ep) * shape.tp  # of cp and ep one divides the other
    sizes = {"rest": ranks // (shape.cp * shape.tp), "cp": shape.cp, "tp": shape.tp}
    with world(ranks, sizes, gpus_per_node=where.cluster.gpus_per_node) as mesh:
        model = subject.model(None if layers == list(range(len(subject.kinds))) else layers)
        _cast(model)
        split_layers(subject, model, mesh, shape.recompute, range(0, shape.ep * shape.tp, shape.tp))
        watched = _Watched(model, subject.layers_of(model))
        tokens = tokens_of(model, shape.microbatch, where.length)
        with FlopMeter(where.hardware, cluster=where.cluster, **with_routing(shape.ep, where.meter_options)) as meter:
            backward(subject, model, mesh, tokens)
        return model, meter.report(mode=where.mode), watched


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


def _numel_of(parameters: Iterable[nn.Parameter]) -> int:
    """Their number on this rank."""
    return sum(_local(each).numel() for each in parameters)


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [each for each in parameters if each.requires_grad]


def _frozen(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [each for each in parameters if not each.requires_grad]


class _Watched:
    """What is seen of a model while it runs: the bytes that a layer hands to the next one, at each call, and which
    parameters outside of the layers belong to modules that run before the first of them."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.boundary_bytes: list[int] = []
        self._before: dict[int, nn.Parameter] = {}
        self._tied: dict[int, nn.Parameter] = {}  # of these, those of another module that runs later
        self._has_begun = False
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._hand_on)
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in model.modules():
            if id(module) not in inside:
                module.register_forward_pre_hook(self._enter)

    @property
    def before(self) -> list[nn.Parameter]:
        return [*self._before.values()]

    @property
    def tied(self) -> list[nn.Parameter]:
        return [*self._tied.values()]

    def others(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
        """The other parameters outside of the layers."""
        known = {id(each) for block in blocks for each in block.parameters()} | self._before.keys()
        return [each for each in model.parameters() if id(each) not in known]

    def _begin(self, *_: Any) -> None:
        self._has_begun = True

    def _enter(self, module: nn.Module, _: Any) -> None:
        for each in module.parameters(recurse=False):
            if not self._has_begun:
                self._before[id(each)] = each
            elif id(each) in self._before:
                self._tied[id(each)] = each

    def _hand_on(self, _: nn.Module, __: Any, output: Any) -> None:
        self.boundary_bytes.append(_local(output[0] if isinstance(output, tuple | list) else output).nbytes)


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
