"""Splits: the ways in which the ranks of a world can share a training step, and which of them make sense."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Literal, NamedTuple, get_args

from flopmeter.ask.checks import check_mapping, is_whole

Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["none", "1f1b", "interleaved", "zero-bubble"]
GatherTime = Literal["microbatch", "step"]
MOST_MICROBATCH = 8  # sequences that a rank works on at a time
LEAST_LENGTH = 2048  # tokens of a sequence that a rank of context parallelism keeps
MOST_CHUNKS = 8  # stages of a rank in an interleaved schedule


class PlanError(ValueError):
    """Raised where nothing can be planned; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split a step. The mesh is [pp, dp, fsdp, cp, tp], so that tensor parallel ranks are neighbours;
    parameters are sharded over fsdp x cp ranks, as in torchtitan, and whole copies of them are kept by dp x pp x tp.
    Experts are first split over ep of the fsdp x cp ranks, which are neighbours, and then sharded over the rest."""

    dp: int  # replicas, whose gradients are summed up (DDP, or the outer dimension of HSDP)
    fsdp: int
    tp: int
    cp: int
    pp: int
    ep: int
    microbatch: int  # sequences
    recompute: Recompute
    schedule: ScheduleName
    chunks: int = 1  # stages of each rank of the pipeline
    gather: GatherTime = "microbatch"  # FSDP gathers parameters and scatters gradients for each, or once and keeps them

    @property
    def mesh(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in MESH}

    @property
    def shards(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.fsdp * self.cp

    @property
    def replicas(self) -> int:
        """How many groups of ranks work on sequences of their own."""
        return self.dp * self.fsdp

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def defers_weights(self) -> bool:
        """Whether gradients of weights are made in passes of their own."""
        return self.schedule == "zero-bubble"

    @property
    def shape(self) -> Shape:
        """The part of a split that decides the shapes of a layer's tensors."""
        return Shape(self.tp, self.cp, self.ep, self.microbatch, self.recompute)

    @property
    def name(self) -> str:
        """The dimensions of more than one rank: 'fsdp 128 x tp 8, ep 4'."""
        mesh = " x ".join(f"{name} {ranks}" for name, ranks in self.mesh.items() if ranks > 1) or "one GPU"
        return mesh + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """Rank 0 and the ranks with those experts that rank 0 lacks."""
        return self.group("fsdp", "cp")[: self.ep]

    @property
    def expert_shards(self) -> tuple[int, ...]:
        """The ranks that the experts of rank 0 are sharded over."""
        return self.group("fsdp", "cp")[:: self.ep]

    def group(self, *names: str) -> tuple[int, ...]:
        """The ranks of these neighbouring dimensions of the mesh, rank 0 among them."""
        inner, size = 1, 1
        for name in reversed(MESH):
            if name in names:
                size *= getattr(self, name)
            elif size == 1:
                inner *= getattr(self, name)
        return tuple(range(0, inner * size, inner))


MESH = ("pp", "dp", "fsdp", "cp", "tp")  # from the outermost


class Shape(NamedTuple):
    """Splits of one shape run the same kernels in each layer."""

    tp: int
    cp: int
    ep: int
    microbatch: int
    recompute: Recompute

    @property
    def runs_as_written(self) -> bool:
        """Whether layers run as on one GPU, each once."""
        return self._replace(microbatch=1) == (1, 1, 1, 1, "none")

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name in ("tp", "cp", "ep") if (size := getattr(self, name)) > 1)
        again = "" if self.recompute == "none" else f"{self.recompute} recomputation"
        return " with ".join(filter(None, (sizes, again))) or "one GPU"


class Bounds(NamedTuple):
    """What limits the splits."""

    world: int
    batch: int  # sequences of a step, of all ranks
    length: int  # tokens of a sequence
    layers: int
    heads: int | None  # of keys and values, which tensor parallelism divides; None: the model has no plan for it
    gpus_per_node: int
    experts: int | None  # of each layer; None: the model has none that can be split
    can_defer: bool  # gradients of weights can have passes of their own

    @property
    def work(self) -> str:
        return f"{self.batch:,} {'sequence' if self.batch == 1 else 'sequences'} of {self.length:,} tokens"


WITHOUT_NUMPY = "torch's context parallelism needs NumPy, which is not installed: pip install numpy"


def has_context_parallelism() -> bool:
    """torch does not depend on NumPy, which torch.distributed.tensor.experimental imports."""
    return find_spec("numpy") is not None


WISHES = (*MESH, "ep", "microbatch", "recompute", "schedule", "chunks", "gather")
_CHOICES = {"recompute": get_args(Recompute), "schedule": get_args(ScheduleName), "gather": get_args(GatherTime)}


def checked_wishes(only: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
    """The values that each name may have. Raises PlanError for an unknown name or value."""
    check_mapping("{'tp': [4, 8]}", only=only)
    wishes = {}
    for name, wanted in only.items():
        if name not in WISHES:
            raise PlanError(f"only[{name!r}]: known are {', '.join(WISHES)}")
        values = (wanted,) if isinstance(wanted, str) or not isinstance(wanted, Iterable) else tuple(wanted)
        if not values:
            raise PlanError(f"only[{name!r}] is empty, so no split is allowed: name a value, or leave it out")
        known = _CHOICES.get(name)
        for value in values:
            if known and value not in known:
                raise PlanError(f"only[{name!r}]: {value!r} is none of {', '.join(known)}")
            if not known and not is_whole(value):
                raise PlanError(f"only[{name!r}]: {value!r} is no whole number from 1 on")
        wishes[name] = values
    return wishes


def splits(bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> Iterator[Split]:
    """All splits that `wishes` allows, that divide the work evenly, and that are known to make sense."""
    for split in _all(bounds, wishes):
        if all(getattr(split, name) in values for name, values in wishes.items()):
            yield split


def _all(bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> Iterator[Split]:
    for tp, cp, pp in product(_tensor(bounds, wishes), _context(bounds, wishes), _stages(bounds)):
        data, rest = divmod(bounds.world, tp * cp * pp)
        if rest or bounds.batch % data or bounds.length % (tp * cp):  # sequence parallelism parts what cp leaves
            continue
        for fsdp, microbatch, recompute in product(divisors(data), divisors(bounds.batch // data), get_args(Recompute)):
            if microbatch > MOST_MICROBATCH and "microbatch" not in wishes:
                continue
            microbatches = bounds.batch // data // microbatch
            for (schedule, chunks), gather, ep in product(
                _schedules(bounds, pp, microbatches, recompute),
                _gathers(pp, fsdp * cp, microbatches),
                _experts(bounds, fsdp * cp, cp, tp, wishes),
            ):
                yield Split(data // fsdp, fsdp, tp, cp, pp, ep, microbatch, recompute, schedule, chunks, gather)


def _tensor(bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> list[int]:
    """Sizes of tensor parallelism: within a node, unless more is asked for."""
    if bounds.heads is None:
        return [1]
    most = bounds.world if "tp" in wishes else bounds.gpus_per_node
    return [tp for tp in divisors(bounds.heads) if tp <= most]


def _context(bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> list[int]:
    """Sizes of context parallelism. Each rank has two parts of the sequence, an early and a late one, so that a causal
    mask leaves all ranks the same work."""
    if not has_context_parallelism():
        if any(cp != 1 for cp in wishes.get("cp", ())):
            raise PlanError(f"only['cp']: {WITHOUT_NUMPY}")
        return [1]
    least = 2 if "cp" in wishes else LEAST_LENGTH
    return [cp for cp in divisors(bounds.length // 2) if cp == 1 or bounds.length // cp >= least]


def _stages(bounds: Bounds) -> list[int]:
    return [pp for pp in divisors(bounds.world) if pp <= bounds.layers]


def _experts(bounds: Bounds, shards: int, cp: int, tp: int, wishes: Mapping[str, tuple[object, ...]]) -> list[int]:
    """Sizes within a node, unless more is asked for. Tensor parallel ranks lie between those that share experts."""
    most = shards if "ep" in wishes else max(1, bounds.gpus_per_node // tp)
    found = divisors(bounds.experts or 1)
    return [ep for ep in found if shards % ep == 0 and ep <= most and (cp % ep == 0 or ep % cp == 0)]


def _schedules(bounds: Bounds, pp: int, microbatches: int, recompute: Recompute) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules of a pipeline. With fewer microbatches than stages most of it would be empty. Layers that are
    recomputed make the gradients of weights and inputs together."""
    if pp == 1:
        yield "none", 1
        return
    yield "1f1b", 1
    if microbatches % pp:
        return
    can_defer = bounds.can_defer and recompute == "none"
    if can_defer:
        yield "zero-bubble", 1
    for chunks in range(2, min(MOST_CHUNKS, bounds.layers // pp) + 1):
        if bounds.layers % (pp * chunks) == 0 or (bounds.layers + 2) % (pp * chunks) == 0:
            yield "interleaved", chunks
            if can_defer:
                yield "zero-bubble", chunks


def _gathers(pp: int, shards: int, microbatches: int) -> tuple[GatherTime, ...]:
    """When FSDP may gather. A pipeline gathers once a step, since it would have to wait for each gather."""
    if pp > 1 or shards == 1:
        return ("step",)
    return ("microbatch",) if microbatches == 1 else ("microbatch", "step")


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
