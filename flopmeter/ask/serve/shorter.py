"""Models with fewer layers, from whose steps the step of a deep model is extrapolated: metering takes less time so.

Most layers of a deep model repeat: each of them, or a turn of several kinds, such as windowed and full attention. Every
further turn makes a step longer by the same time, so that two short models give the step of the deep one:

    step of n + k turns = step of n + k (step of n + 1 - step of n)

How many layers make a turn is read from the kernels, since a compiler may treat equal layers unequally: inductor
writes the residual sum to memory after two layers, or after three where each adds more to it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import nn

from flopmeter.ask.alike import likenesses, list_of_layers
from flopmeter.ask.serve.cache import CacheKind, ServingError, empty_cache
from flopmeter.ask.serve.published import Quantised, quantised
from flopmeter.report.report import Report

SAME = 1e-9  # of the time of a kernel: by as much it may differ from turn to turn, by rounding


LEAST_LAYERS = 2  # of a short model: the first one and the last one


class Depths(NamedTuple):
    """How many layers two short models have, and how many more turns the deep one has than the first."""

    fewer: int
    more: int
    turns: int

    @property
    def layers(self) -> int:
        return self.fewer + self.more


class Layered(Protocol):
    """A decoder, as far as its layers go."""

    @property
    def model(self) -> Any: ...
    @property
    def config(self) -> Any: ...
    @property
    def cache(self) -> CacheKind: ...
    @property
    def parameter_bytes(self) -> int: ...


_Own = TypeVar("_Own", bound=Layered)


@dataclass(frozen=True, eq=False)
class Shorter(Generic[_Own]):
    """The short models of a deep one, `own`, that `build` makes of its config."""

    own: _Own
    config: Any
    build: Callable[[Any], _Own]

    def pairs(self) -> Iterator[tuple[_Own, _Own, int]]:
        """Two of them, and how many turns the deep one has more than the first; those with the fewest layers first.
        Which of them tell a step, its kernels show: `is_one_turn_more`."""
        kinds = _kinds(self.own)
        cut = functools.cache(lambda layers: self._cut(layers, kinds))
        for depths in depths_of(kinds):
            fewer, more = map(cut, depths[:2])
            if fewer is not None and more is not None:
                added = depths.turns * (more.parameter_bytes - fewer.parameter_bytes)
                if fewer.parameter_bytes + added == self.own.parameter_bytes:
                    yield fewer, more, depths.turns

    def _cut(self, layers: int, kinds: list[Any]) -> _Own | None:
        """The model with so many layers; None where they are not the first ones of the deep one."""
        try:
            cut = self.build(_cut_config(self.config, layers))
        except ServingError:
            return None
        return cut if _kinds(cut) == kinds[:layers] else None


def depths_of(kinds: Sequence[Any]) -> list[Depths]:
    """The depths at which short models have the first of these layers and lack turns of the last ones, by rising number
    of layers, which is below that of these."""
    layers, found = len(kinds), []
    for turn in range(1, layers // 2):
        start = next((place + 1 for place in reversed(range(layers - turn)) if kinds[place] != kinds[place + turn]), 0)
        for kept in (1, 2, 3):
            turns = (layers - start) // turn - kept
            fewer = layers - turns * turn
            found.append(Depths(fewer, fewer + turn, turns))
    told = (each for each in found if each.turns > 1 and each.fewer >= LEAST_LAYERS and each.layers < layers)
    return sorted(told, key=lambda each: (each.layers, each))


def is_one_turn_more(fewer: Report, more: Report) -> bool:
    """Whether the kernels of the second step are those of the first with a turn more, which repeats the one before."""
    few, many = (_prices(report) for report in (fewer, more))
    turn = len(many) - len(few)
    until = _alike(few, many)
    repeats = 0 < turn <= until and _alike(many[until - turn : until], many[until : until + turn]) == turn
    return repeats and _alike(few[until:], many[until + turn :]) == len(few) - until


def _prices(report: Report) -> list[tuple[float, float, float]]:
    return [(each.work_seconds, each.floor_seconds, each.joules) for each in report.timings]


def _alike(one: Sequence[tuple[float, ...]], other: Sequence[tuple[float, ...]]) -> int:
    """How many kernels at the start of both are the same."""

    def is_same(pair: tuple[tuple[float, ...], tuple[float, ...]]) -> bool:
        return all(math.isclose(a, b, rel_tol=SAME) for a, b in zip(*pair, strict=True))

    return sum(1 for _ in takewhile(is_same, zip(one, other, strict=False)))


def _kinds(own: Layered) -> list[tuple[Any, ...]]:
    """Of each layer all that decides what it costs a server: its modules, its cache, and which of its weights stay as
    they are. Nothing where the model does not show its layers."""
    name = list_of_layers(own.model)
    layers = [] if name is None else list(own.model.get_submodule(name).children())
    caches = empty_cache(own.config, own.cache).layers
    if not len(layers) == len(caches) == own.config.num_hidden_layers:
        return []
    published = quantised(own.config)
    alike = likenesses(layers, own.config)
    return [
        (alike[place], type(cache).__name__, getattr(cache, "kept", None), _kept(published, f".{name}.{place}", layer))
        for place, (layer, cache) in enumerate(zip(layers, caches, strict=True))
    ]


def _kept(published: Quantised, path: str, layer: nn.Module) -> tuple[str, ...]:
    """The modules of a layer whose weights stay as they are."""
    return tuple(name for name, _ in layer.named_modules() if published.is_kept(f"{path}.{name}"))


def _cut_config(config: Any, layers: int) -> Any:
    """The config with the first layers alone."""
    cut, every = copy.deepcopy(config), config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == every:
            vars(cut)[name] = value[:layers]
    cut.num_hidden_layers = layers
    return cut
