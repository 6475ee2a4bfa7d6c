"""Clusters: how GPUs are linked within a node and between nodes, and how long a collective takes on those links.

A cluster is a YAML file, like a device; `hardware/clusters/` has the ones that ship. Rates are those of one GPU in one
direction; `achieved` is the measured share of the rate that large collectives reach. Prices are those of a collective
alone; the timeline shares ports among several (timing/contention.py). Approximations: ranks are numbered node by node;
the slowest link of a ring or tree sets its speed, since NCCL pipelines; NCCL's choices and latencies stand for those of
every vendor's library.
"""

from __future__ import annotations

import difflib
import functools
import os
import reprlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from flopmeter.device.files import names_in, read_record, resolve
from flopmeter.device.hardware import PROFILES, Hardware, available_hardware, load_hardware
from flopmeter.device.nccl import (
    ESTIMATED_LL_SHARE,
    Fabric,
    GroupShape,
    Protocol,
    Transport,
    Way,
    filling_bytes,
    filling_seconds,
    preferred,
    ways,
)
from flopmeter.device.profile_parts import count
from flopmeter.device.schema import (
    HardwareError,
    SchemaRecord,
    by,
    number,
    one_of,
    record,
    text,
    tuple_of,
)
from flopmeter.records import Collective
from flopmeter.records.collectives import Algorithm

CLUSTERS = PROFILES / "clusters"

# Share of the rate of one direction that large collectives are assumed to reach without a measurement. It is 0.70 for
# A100, 0.755 for H100, 0.80 for B200; 0.38 for a box of RTX PRO 6000 (the sources stand in the clusters' files).
ASSUMED_SHARE: dict[Transport, float] = {"nvlink": 0.75, "pcie": 0.38}
# Start of a collective on a machine that nobody measured: NCCL's own constant, the base of a ring with LL (tuning.cc).
# Measured machines have 4.8 µs (H100, H200, L40S) and 9 µs (A100, B200).
ASSUMED_START_US = 6.6
ASSUMED_GPUS_PER_NODE = 8

_rate = number("a number over 0 and at most 1e5", above=0, most=1e5)
_share = number("a number over 0 and at most 1", above=0, most=1)
_microseconds = number("a number of microseconds from 0 to 1e6", least=0, most=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(SchemaRecord):
    """Neighbours within a node, which are closer to each other than to the rest: on one PCIe switch, or on one socket.
    The fields are the YAML keys.

    gpus: how many; ranks 0 to gpus - 1 are the first block, and so on.
    achieved: the share of the link's rate that a group within one block reaches.
    """

    gpus: int = field(metadata=by(count))
    achieved: float = field(metadata=by(_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(SchemaRecord):
    """The link of one GPU to others. The fields are the YAML keys.

    transport: 'nvlink', 'pcie' or 'network'; it decides which of NCCL's latencies hold.
    bandwidth_gb_per_s: of one GPU, one direction, by the datasheet (1e9 bytes/s).
    achieved: the share of it that the ring of a large collective reaches.
    blocks: groups of neighbours that reach more, smallest first.
    ll_share: NCCL's cap of its LL protocol, of the rate; with it NCCL chooses protocols.
    in_switch: the share that an all-reduce in the switch (NVLS) reaches; none if the switch cannot do that.
    peers: how many others a GPU has a link of its own to, where no switch joins them: a group uses those within it.
    added_latency_us: of each step, in addition to NCCL's constants, which are those of InfiniBand in one building.
    """

    name: str = field(metadata=by(text))
    transport: Transport = field(metadata=by(one_of("nvlink", "pcie", "network")))
    bandwidth_gb_per_s: float = field(metadata=by(_rate))
    achieved: float = field(metadata=by(_share))
    blocks: tuple[Block, ...] = field(default=(), metadata=by(tuple_of(record(Block))))
    ll_share: float = field(default=ESTIMATED_LL_SHARE, metadata=by(_share))
    in_switch: float | None = field(default=None, metadata=by(_share))
    peers: int | None = field(default=None, metadata=by(count))
    added_latency_us: float = field(default=0.0, metadata=by(_microseconds))
    source: str = field(metadata=by(text))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """By the datasheet, one direction."""
        return self.bandwidth_gb_per_s * 1e9

    @property
    def sustained_bytes_per_s(self) -> float:
        """What a large collective reaches."""
        return self.bandwidth_bytes_per_s * self.achieved

    def block_of(self, places: set[int]) -> Block | None:
        """The smallest block that holds a group of ranks with these numbers in their node."""
        return next((block for block in self.blocks if len({place // block.gpus for place in places}) == 1), None)

    def sustained_among(self, places: set[int]) -> float:
        """What a large collective of ranks with these numbers in their node reaches, in bytes/s."""
        block = self.block_of(places)
        return self.used_among(places) * (self.achieved if block is None else block.achieved)

    def used_among(self, places: set[int]) -> float:
        """By the datasheet, one direction, of the links that such a group can use, in bytes/s."""
        if self.peers is None:
            return self.bandwidth_bytes_per_s
        return self.bandwidth_bytes_per_s * min(1.0, max(1, len(places) - 1) / self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(SchemaRecord):
    """Equal nodes of equal GPUs. The fields are the YAML keys.

    nodes: how many there are; None: as many as needed.
    devices: names of the hardware profiles that come in such nodes; it is their default cluster.
    start_us: what a collective takes before its first byte moves, the kernel's launch included: the smallest message
        of nccl-tests, less its steps.
    inter: the link between nodes; None if there is none.
    """

    name: str = field(metadata=by(text))
    title: str = field(metadata=by(text))
    devices: tuple[str, ...] = field(default=(), metadata=by(tuple_of(text)))
    nodes: int | None = field(default=None, metadata=by(count))
    gpus_per_node: int = field(metadata=by(count))
    start_us: float = field(default=ASSUMED_START_US, metadata=by(_microseconds))
    intra: Link = field(metadata=by(record(Link)))
    inter: Link | None = field(default=None, metadata=by(record(Link)))

    def __post_init__(self) -> None:
        SchemaRecord.__post_init__(self)
        if self.intra.transport == "network":
            raise HardwareError("expected nvlink or pcie", field="intra.transport")
        if self.inter is not None and self.inter.transport != "network":
            raise HardwareError("expected network", field="inter.transport")
        if self.inter is None and self.nodes is not None and self.nodes > 1:
            raise HardwareError(f"this field is missing: {self.nodes} nodes need a link between them", field="inter")

    @property
    def gpus(self) -> int | None:
        """How many there are; None: as many as needed."""
        nodes = 1 if self.inter is None else self.nodes
        return None if nodes is None else nodes * self.gpus_per_node

    def title_around(self, hardware: Hardware) -> str:
        """Its title, which says so if its nodes come with other GPUs than this one."""
        own = not self.devices or _listed_name(hardware) in self.devices
        return self.title if own else f"{self.title}, whose own GPU is {' or '.join(self.devices)}"

    def shape(self, ranks: tuple[int, ...], gpus_per_node: int | None = None) -> GroupShape:
        """How a group of global ranks is distributed over nodes: rank r is on node r // gpus_per_node.

        `gpus_per_node`: how many GPUs of a node are used; None: all.
        Raises HardwareError if the cluster, or a node of it, is too small for one of the ranks.
        """
        if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
            raise HardwareError(f"a group needs ranks from 0 on, each once, not {reprlib.repr(ranks)}")
        self.check_size(max(ranks) + 1, gpus_per_node)
        used = gpus_per_node or self.gpus_per_node
        per_node = Counter(rank // used for rank in ranks)
        return GroupShape(len(ranks), len(per_node), min(per_node.values()))

    def check_size(self, world_size: int, gpus_per_node: int | None = None) -> None:
        """Raises HardwareError if the cluster has too few GPUs, or too few on a node."""
        used = gpus_per_node or self.gpus_per_node
        if used > self.gpus_per_node:
            raise HardwareError(
                f"the world has {used} GPUs on a node, cluster {self.name} has {self.gpus_per_node}: name a cluster of "
                "such nodes, or give the world another gpus_per_node"
            )
        if not self._holds(world_size, used):
            on_each = "" if used == self.gpus_per_node else f" with {used} on a node"
            larger = [name for name in available_clusters() if load_cluster(name)._holds(world_size, used)]
            nodes = self.nodes if self.inter else 1
            raise HardwareError(
                f"cluster {self.name} has {self.gpus} GPUs ({nodes} x {self.gpus_per_node}), too few for a world of "
                f"{world_size}{on_each}; name a larger cluster: {', '.join(larger)}, or a YAML file"
            )

    def _holds(self, world_size: int, used: int) -> bool:
        """Whether it has that many GPUs if that many of each node are used."""
        nodes = 1 if self.inter is None else self.nodes
        return used <= self.gpus_per_node and (nodes is None or world_size <= nodes * used)


AnyCluster = str | os.PathLike[str] | Cluster  # what load_cluster takes


class CollectivePrice(NamedTuple):
    """How long one collective takes, and why."""

    algorithm: Algorithm
    protocol: Protocol
    wire_bytes: int  # sent by the busiest rank over the slowest link
    link: str  # the name of that link; '' for a group of one, which sends nothing
    latency_seconds: float
    bandwidth_seconds: float
    between_nodes: bool = False  # some of it goes over network ports

    @property
    def seconds(self) -> float:
        return self.latency_seconds + self.bandwidth_seconds


def price_collective(collective: Collective, cluster: Cluster) -> CollectivePrice:
    """What the collective takes in the way that NCCL chooses. Raises HardwareError where the cluster is too small.

    Between nodes that is taken to be the quickest way, since no measurement says otherwise. Within a node NCCL's
    choice is not monotonic: a larger message may take less time. Here more bytes never take less: such a message takes
    what the largest message before the switch of protocols takes.
    """
    shape = cluster.shape(collective.ranks, collective.gpus_per_node)
    links = _links_of(collective, cluster)
    if shape.nodes > 1:
        found = (_price(way, collective.nbytes, shape, links) for way in ways(collective, shape, links.fabric))
        return min(found, key=lambda price: price.seconds)
    prices = [_price(way, nbytes, shape, links) for way, nbytes in preferred(collective, shape, links.fabric)]
    price, slowest = prices[-1], max(prices, key=lambda price: price.seconds)
    if slowest.seconds == price.seconds:
        return price
    return price._replace(latency_seconds=slowest.seconds - price.bandwidth_seconds)


class _Links(NamedTuple):
    """The links of one group: as NCCL sees them, and what they sustain."""

    fabric: Fabric
    names: tuple[str, str]  # within and between nodes
    intra: float
    inter: float
    in_switch: float


def _links_of(collective: Collective, cluster: Cluster) -> _Links:
    intra, inter = cluster.intra, cluster.inter
    used = collective.gpus_per_node or cluster.gpus_per_node
    places = {rank % used for rank in collective.ranks}
    block = intra.block_of(places)
    fabric = Fabric(
        transport=intra.transport,
        bytes_per_s=intra.used_among(places),
        ll_share=intra.ll_share,
        through_cpu=intra.transport == "pcie" and (not intra.blocks or block is not intra.blocks[0]),
        network_bytes_per_s=0.0 if inter is None else inter.bandwidth_bytes_per_s,
        start_seconds=cluster.start_us * 1e-6,
        added_seconds=0.0 if inter is None else inter.added_latency_us * 1e-6,
        in_switch=intra.in_switch is not None,
    )
    return _Links(
        fabric=fabric,
        names=(intra.name, "" if inter is None else inter.name),
        intra=intra.sustained_among(places),
        inter=0.0 if inter is None else inter.sustained_bytes_per_s,
        in_switch=intra.bandwidth_bytes_per_s * (intra.in_switch or 0.0),
    )


def _price(way: Way, nbytes: int, shape: GroupShape, links: _Links) -> CollectivePrice:
    """Links within and between nodes work at the same time: the slower one sets the time."""
    link, wire_bytes = links.names[0], way.sent * nbytes
    rate = links.in_switch if way.algorithm == "in-switch" else links.intra
    seconds = (wire_bytes + way.copied * nbytes) / rate
    if shape.nodes > 1 and links.inter:
        between = way.sent_between * nbytes / links.inter
        if between >= seconds:
            link, wire_bytes, seconds = links.names[1], way.sent_between * nbytes, between
    filling = filling_seconds(way, nbytes, shape, links.fabric) + way.sent * filling_bytes(way, nbytes, shape) / rate
    return CollectivePrice(
        algorithm=way.algorithm,
        protocol=way.protocol,
        wire_bytes=round(wire_bytes),
        link=link if shape.ranks > 1 else "",
        latency_seconds=way.latency_seconds + filling,
        bandwidth_seconds=seconds / way.share,
        between_nodes=shape.nodes > 1,
    )


# --- finding clusters --------------------------------------------------------------------------------------------


def available_clusters() -> list[str]:
    """The names of the clusters that flopmeter knows, sorted."""
    return names_in(CLUSTERS)


def load_cluster(name: AnyCluster) -> Cluster:
    """The cluster of that name, or of the YAML file at that path.

    Raises HardwareError for an unknown name and for a file that is not valid (file, field, what was expected).
    """
    return resolve(name, Cluster, "cluster", _by_name, functools.partial(read_record, kind=Cluster))


def _by_name(name: str) -> Cluster:
    known = available_clusters()
    if name in known:
        return _packaged(name)
    near = difflib.get_close_matches(name, known, n=3) or known
    raise HardwareError(
        f"no cluster is named {reprlib.repr(name)}; known: {', '.join(near)} (or give the path of a YAML file)"
    )


def cluster_of(hardware: Hardware, asked: AnyCluster | None = None) -> Cluster:
    """The cluster that was asked for, as `load_cluster` takes it; None is the default one of the device: that which
    lists the device, or the profile that it extends if both have the same interconnect; else one node of 8 with the
    links of its profile, which the title says.

    Raises HardwareError if the profile has no link to other devices.
    """
    if asked is not None:
        return load_cluster(asked)
    listed = _defaults().get(_listed_name(hardware))
    if listed is not None:
        return _packaged(listed)
    link = _link_of(hardware)
    return Cluster(
        name=f"{ASSUMED_GPUS_PER_NODE}x {hardware.name}",
        title=f"assumed: one node of {ASSUMED_GPUS_PER_NODE} x {hardware.title} over {link.name}",
        gpus_per_node=ASSUMED_GPUS_PER_NODE,
        intra=link,
    )


def device_in(cluster: AnyCluster | None, otherwise: str) -> str:
    """The first device that comes in the cluster; `otherwise` if there is no cluster, or none that names a device."""
    devices = () if cluster is None else load_cluster(cluster).devices
    return devices[0] if devices else otherwise


def _listed_name(hardware: Hardware) -> str:
    """The name under which clusters list the device: its own, or that of the shipped profile whose links it has."""
    if hardware.base is None or hardware.name in available_hardware():
        return hardware.name
    base = load_hardware(hardware.base)
    return base.name if base.interconnect == hardware.interconnect else hardware.name


def _link_of(hardware: Hardware) -> Link:
    """The direct link if it joins all devices, else PCIe: a bridge joins only two, and a ring of 8 has to leave it."""
    transport: Transport = "pcie"
    peers = None
    name, both_ways = "PCIe", None if hardware.pcie is None else hardware.pcie.bidirectional_gb_per_s
    own = hardware.interconnect
    if own is not None and own.bidirectional_gb_per_s is not None and "pairs" not in own.name:
        name, both_ways, peers = own.name, own.bidirectional_gb_per_s, own.peers
        transport = "pcie" if own.name.startswith("PCIe") else "nvlink"
    if both_ways is None:
        raise HardwareError(f"{hardware.name} has no link to other devices in its profile: name a cluster")
    return Link(
        name=name,
        transport=transport,
        bandwidth_gb_per_s=both_ways / 2,
        achieved=ASSUMED_SHARE[transport],
        peers=peers,
        source=f"the rate is that of the hardware profile {hardware.name}; the share is assumed",
    )


@functools.cache
def _defaults() -> dict[str, str]:
    """The default cluster of each device: the cluster that lists it."""
    return {device: name for name in available_clusters() for device in _packaged(name).devices}


@functools.cache
def _packaged(name: str) -> Cluster:
    return read_record(CLUSTERS / f"{name}.yaml", Cluster)
