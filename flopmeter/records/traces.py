"""The record of a program: its ops in order, the storages they touched, and what its streams waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flopmeter.records.compiled import Compilation
from flopmeter.records.costs import Switches
from flopmeter.records.ops import Op

StorageRole = Literal["parameters", "gradients", "optimizer state"]
BEFORE = -1  # the birth of a storage that existed before the trace
DEFAULT_STREAM = 0


@dataclass(slots=True)
class Storage:
    """A block of memory of the program. `born` is the index of the op that made it, or BEFORE; it was freed before op
    `died`. A storage that no op made, such as that of torch.tensor([1, 2]), counts as made by the next op."""

    nbytes: int  # when it was first seen
    device: str
    born: int
    died: int | None = None  # None: alive when the context ended
    role: StorageRole | None = None  # if a module or an optimizer holds it


class Resize(NamedTuple):
    """The op of that index resized a storage."""

    op: int
    storage: int
    nbytes: int


class Sync(NamedTuple):
    """Before the op of index `op` the stream recorded an event, or began to wait for an event or for a collective.

    `subject` is the number of the event, or the index of the collective's op.
    """

    op: int
    stream: int
    action: Literal["record", "wait for event", "wait for op"]
    subject: int


@dataclass(slots=True)
class StreamUse:
    """Which streams the ops of a trace ran on, and what the streams waited for. Ops are given by index."""

    streams: dict[int, int] = field(default_factory=dict)  # op -> stream, if it is not the default one
    syncs: list[Sync] = field(default_factory=list)  # in the order in which they happened
    batches: dict[int, int] = field(default_factory=dict)  # op -> so many messages from there on run as one kernel


class Accumulation(NamedTuple):
    """The op of that index made, or added to, the gradient of a leaf of the autograd graph."""

    op: int
    leaf: int  # its storage


class TemplateRun(NamedTuple):
    """The ops from `start` to before `stop` are what torch runs eagerly for a kernel that it only has compiled:
    torch.compile would launch `op` in their place."""

    start: int
    stop: int
    op: Op


@dataclass(slots=True, repr=False)
class Trace:
    """What ran, in order. `module_calls[i]` is the number of module calls made before op i."""

    ops: list[Op] = field(default_factory=list)
    module_calls: list[int] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)
    accumulations: list[Accumulation] = field(default_factory=list)
    switches: Switches = field(default=Switches(False, True, False))
    stream_use: StreamUse = field(default_factory=StreamUse)
    templates: list[TemplateRun] = field(default_factory=list)
    compilation: Compilation = field(default_factory=Compilation)

    forward_ends: list[int] = field(default_factory=list)  # how many ops had run when an outermost module's call ended
    devices: dict[str, None] = field(default_factory=dict)  # that ops touched, in order of appearance

    def __repr__(self) -> str:
        return f"<Trace: {len(self.ops)} ops on {self.device}>"

    @property
    def device(self) -> str:
        """The device of the program: 'meta' if any op runs there, else the first device that is not the CPU. Ops that
        touch nothing on it are the host's own work (Adam's step counters are on the CPU)."""
        return "meta" if "meta" in self.devices else next((kind for kind in self.devices if kind != "cpu"), "cpu")
