"""How NCCL runs a collective: which algorithm and protocol it chooses, the bytes on the wire, and the latency.

NCCL does not take the fastest way, but the one that its own estimate calls the fastest (nccl/src/graph/tuning.cc): a
latency, and bytes over a rate, from the constants of NCCL 2.30. `preferred` reproduces this choice. The time that it
really takes is modelled apart, from measurements: NCCL's own are 2 to 4 times too small for LL128 and Simple, so that a
message just past a switch takes twice the time of one just before. Between nodes nothing was measured: the cheapest way
is taken whatever NCCL's estimate, with NCCL's constants for what the network adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal, NamedTuple

from flopmeter.records import Collective
from flopmeter.records.collectives import COLLECTIVES, Algorithm, CollectiveSpec

Transport = Literal["nvlink", "pcie", "network"]
Protocol = Literal["LL", "LL128", "Simple"]


class ByProtocol(NamedTuple):
    """One figure for each of NCCL's protocols. LL sends a flag with every word: no fences. Simple copies large chunks,
    with a fence and a flag for each; LL128 stands between, and needs NVLink or a network."""

    LL: float
    LL128: float
    Simple: float

    def of(self, protocol: Protocol) -> float:
        return float(getattr(self, protocol))


# --- NCCL's own estimate, by which it chooses (tuning.cc, topo.h, search.cc of NCCL 2.30) -----------------------------

# Share of a link's datasheet rate that NCCL counts on: 20 of 25 GB/s of an NVLink 3, 12 of 16 of PCIe 3.
ESTIMATED_SHARE: dict[Transport, float] = {"nvlink": 0.8, "pcie": 0.75}
# Between PCIe devices that do not share a switch it counts on the CPU's links, of 16 GB/s (AMD), and so on 15, the next
# of its ring speeds.
ESTIMATED_CPU_BYTES_PER_S = 15e9
ESTIMATED_PROTOCOL_SHARE = ByProtocol(0.5, 0.92, 1.0)
# NCCL's cap of LL: 141 of 450 GB/s on Hopper, 282 of 900 on Blackwell. (87.7 of 300 on Ampere: a field of the link.)
ESTIMATED_LL_SHARE = 0.313
# The same between nodes, for all ports of a node together, in bytes/s: over two nodes, and over more.
ESTIMATED_LL_NETWORK = (39.0e9, 20.4e9)
TREE_SHARE = ByProtocol(0.92 / 3.8, 0.92 * 7 / 9, 0.92)
PAT_SHARE = 0.75

# Seconds before the first byte moves.
BASE_SECONDS: dict[Algorithm, ByProtocol] = {
    "ring": ByProtocol(6.6e-6, 14.0e-6, 8.4e-6),
    "tree": ByProtocol(6.8e-6, 14.0e-6, 8.4e-6),
}
# Seconds of one step from rank to rank.
HOP_SECONDS: dict[Transport, dict[Algorithm, ByProtocol]] = {
    "nvlink": {"ring": ByProtocol(0.6e-6, 1.9e-6, 3.4e-6), "tree": ByProtocol(0.6e-6, 1.25e-6, 4.0e-6)},
    "pcie": {"ring": ByProtocol(1.0e-6, 2.5e-6, 5.7e-6), "tree": ByProtocol(1.0e-6, 1.9e-6, 4.0e-6)},
    "network": {"ring": ByProtocol(2.7e-6, 4.0e-6, 14.0e-6), "tree": ByProtocol(5.0e-6, 8.5e-6, 14.0e-6)},
}
# PAT (arXiv 2506.20252; since NCCL 2.23, one rank per node): log2(n) transfers, each the network's hop over 3.5, and a
# part in the number of ranks for handling their pieces.
PAT_HOP_SHARE, PAT_RANK_SECONDS = 1 / 3.5, 2.8e-6
IN_SWITCH_SECONDS = 25e-6
# An all-reduce in the switch (NVLS): each rank is the head of one part, for which NCCL counts on an eighth of the
# link's rate, and on .85 of that (Hopper; .74 on Blackwell).
IN_SWITCH_SHARE, IN_SWITCH_HEADS = 0.85, 8

# --- what the ways take: measured ------------------------------------------------------------------------------------
# Fitted to one half of the messages of nccl-tests on 2, 4 and 8 GPUs of A100, H100, H200 (SXM) and L40S: 256 B to
# 512 MB, all-gather, reduce-scatter, all-reduce and all-to-all, out of place (the NCCL database of
# ai-dynamo/aiconfigurator). STARTS are multiples of the machine's start: the kernel's launch, what it reads before the
# first byte, barriers of its threads. Fences and flags of the other protocols scale with it from machine to machine.

# Data in what is sent: LL 8 of 16 bytes (and a little quicker than Simple, since it has no fences), LL128 120 of 128.
PROTOCOL_SHARE = ByProtocol(0.56, 120 / 128, 1.0)
RING_STARTS = ByProtocol(1.0, 3.2, 3.2)  # before the first byte
PAIRWISE_STARTS = ByProtocol(1.0, 2.15, 2.15)
SIMPLE_HOP_STARTS = 0.54  # of a step with Simple within a node
LL_HOP_FACTOR = 4 / 3  # a step with LL or LL128 within a node, over NCCL's constant for LL
PEER_SECONDS = 0.65e-6  # pairwise: of each other rank that a rank exchanges with
FULL_BLOCK_STARTS = 0.21  # in addition, once every thread of a block has a word to send: with LL, from 16 kB a rank on
FULL_BLOCK_BYTES = 16 * 1024
# A rank copies the part that it keeps, with the threads that send the others: the copy takes this share of the time
# that a part takes on the link.
OWN_PART_SHARE = 1 / 3
IN_SWITCH_STARTS = 4.0
# The switch's pipeline is full after two rounds of 16 channels, each a chunk for every rank. Chunks shrink so that a
# message has rounds enough (enqueue.cc): bytes of a message per channel and rank, and the chunk from there on.
IN_SWITCH_ROUNDS, IN_SWITCH_CHANNELS = 2, 16
IN_SWITCH_CHUNKS = ((8 * 65536, 65536), (2 * 32768, 32768), (0, 16384))
PAIRWISE_LL_BYTES = 16 * 1024  # a message to a peer of at most this goes by LL, within a node


class GroupShape(NamedTuple):
    """How the ranks of a group are spread over the nodes of the cluster."""

    ranks: int
    nodes: int
    per_node: int  # ranks on the node with the fewest, which is also the number of network ports that the group uses


class Fabric(NamedTuple):
    """What a group's ranks are linked by; rates of one GPU and one direction, by the datasheet."""

    transport: Transport
    bytes_per_s: float
    ll_share: float  # NCCL's cap of LL, of that rate
    through_cpu: bool  # PCIe devices that do not share a switch
    network_bytes_per_s: float  # 0: there is none
    start_seconds: float
    added_seconds: float  # of each step between nodes, in addition to NCCL's constant
    in_switch: bool


class Way(NamedTuple):
    """One way to run a collective on a group: an algorithm with a protocol."""

    algorithm: Algorithm
    protocol: Protocol
    latency_seconds: float  # measured, of the smallest message
    sent: float = 0.0  # bytes that the busiest rank sends over the links within its node, for each byte of the size
    sent_between: float = 0.0  # over its own network port
    copied: float = 0.0  # on the GPU, by the threads that send
    share: float = 1.0  # of the link's sustained rate that the protocol reaches
    estimated_seconds: float = 0.0  # where NCCL has a choice within a node: its own latency,
    estimated_bytes_per_s: float = inf  # and its rate, in bytes of the collective's size


NO_WAY = Way("none", "Simple", 0.0)  # of a group of one, which sends nothing


def preferred(collective: Collective, shape: GroupShape, fabric: Fabric) -> list[tuple[Way, int]]:
    """The ways that NCCL takes as the message grows to this size, each with the largest message that it takes so. The
    last one is that of the message itself."""
    if shape.ranks == 1:
        return [(NO_WAY, collective.nbytes)]
    if "pairwise" in COLLECTIVES[collective.kind].wire:
        return _pairwise(COLLECTIVES[collective.kind], collective.nbytes, shape, fabric)
    return _lower_envelope(list(ways(collective, shape, fabric)), collective.nbytes)


def filling_bytes(way: Way, nbytes: int, shape: GroupShape) -> float:
    """Bytes that have passed the switch when its pipeline is full."""
    if way.algorithm != "in-switch":
        return 0.0
    lanes = IN_SWITCH_CHANNELS * shape.ranks
    chunk = next(chunk for least, chunk in IN_SWITCH_CHUNKS if nbytes >= least * lanes)
    return float(min(IN_SWITCH_ROUNDS * lanes * chunk, nbytes))


def filling_seconds(way: Way, nbytes: int, shape: GroupShape, fabric: Fabric) -> float:
    """Seconds until every thread of a block has a word to send. (For Simple they are part of the start.)"""
    if way.protocol != "LL":
        return 0.0
    part = nbytes if way.algorithm == "tree" else nbytes / shape.ranks
    return FULL_BLOCK_STARTS * fabric.start_seconds * min(1.0, part / FULL_BLOCK_BYTES)


def _lower_envelope(ways: Sequence[Way], nbytes: int) -> list[tuple[Way, int]]:
    """The way of the least estimate for each size up to nbytes: estimates are straight lines."""
    way = min(ways, key=lambda way: (way.estimated_seconds, -way.estimated_bytes_per_s))
    found: list[tuple[Way, int]] = []
    while True:
        ends = [
            (round((other.estimated_seconds - way.estimated_seconds) / gain), -other.estimated_bytes_per_s, index)
            for index, other in enumerate(ways)
            if (gain := 1 / way.estimated_bytes_per_s - 1 / other.estimated_bytes_per_s) > 0
        ]
        end, _, index = min(ends, default=(nbytes, 0.0, 0))
        if end >= nbytes:
            return [*found, (way, nbytes)]
        found.append((way, end))
        way = ways[index]


def ways(collective: Collective, shape: GroupShape, fabric: Fabric) -> Iterator[Way]:
    """All ways that NCCL can choose from, for a group of several ranks."""
    spec = COLLECTIVES[collective.kind]
    if "pairwise" in spec.wire:
        yield from (way for way, _ in _pairwise(spec, collective.nbytes, shape, fabric))
        return
    for algorithm, share_of in spec.wire.items():
        sent = share_of(shape.ranks)
        copied = OWN_PART_SHARE / shape.ranks if spec.keeps_part and algorithm == "ring" else 0.0
        if algorithm == "in-switch":
            if fabric.in_switch and shape.nodes == 1 and collective.adds_in_switch:
                yield _in_switch(sent, shape, fabric)
        elif algorithm == "pat":
            if shape.per_node == 1:  # as NCCL has it: one rank on each node
                yield _pat(sent, shape, fabric)
        else:
            for protocol in _protocols(shape, fabric):
                yield _ring_or_tree(algorithm, protocol, spec.rounds, sent, copied, shape, fabric)


def _protocols(shape: GroupShape, fabric: Fabric) -> tuple[Protocol, ...]:
    """The protocols that the link allows: PCIe may split the 128-byte stores of LL128, so it has no LL128."""
    return ("LL", "Simple") if fabric.transport == "pcie" and shape.per_node > 1 else ("LL", "LL128", "Simple")


def _ring_or_tree(
    algorithm: Algorithm, protocol: Protocol, rounds: int, sent: float, copied: float, shape: GroupShape, fabric: Fabric
) -> Way:
    steps, steps_between = _steps(algorithm, rounds, shape)
    hop = HOP_SECONDS[fabric.transport][algorithm].of(protocol)
    # One rank on each node: nothing hides the network's latency, which then is that of trees.
    between = HOP_SECONDS["network"]["tree" if shape.per_node == 1 else algorithm].of(protocol) + fabric.added_seconds
    if protocol == "Simple":
        measured_hop = SIMPLE_HOP_STARTS * fabric.start_seconds
    else:
        measured_hop = LL_HOP_FACTOR * HOP_SECONDS[fabric.transport][algorithm].LL
    return Way(
        algorithm=algorithm,
        protocol=protocol,
        latency_seconds=RING_STARTS.of(protocol) * fabric.start_seconds
        + steps * measured_hop
        + steps_between * between,
        sent=sent if shape.per_node > 1 else 0.0,
        # NCCL makes as many rings (or trees) as the group has network ports on a node; each has its share.
        sent_between=sent / shape.per_node if shape.nodes > 1 else 0.0,
        copied=copied,
        share=_share(algorithm, protocol, shape, fabric),
        estimated_seconds=BASE_SECONDS[algorithm].of(protocol) + steps * hop,
        estimated_bytes_per_s=_estimated_rate(algorithm, protocol, fabric) / sent if sent else inf,
    )


def _share(algorithm: Algorithm, protocol: Protocol, shape: GroupShape, fabric: Fabric) -> float:
    """The share of the sustained rate that a protocol reaches. Between nodes LL reaches no more than NCCL counts on,
    since it goes through the host."""
    share = PROTOCOL_SHARE.of(protocol) * (TREE_SHARE.Simple if algorithm == "tree" else 1.0)
    if shape.nodes == 1 or protocol != "LL":
        return share
    return min(share, ESTIMATED_LL_NETWORK[shape.nodes > 2] / (fabric.network_bytes_per_s * shape.per_node))


def _steps(algorithm: Algorithm, rounds: int, shape: GroupShape) -> tuple[int, int]:
    """How many steps follow one another, within nodes and between nodes."""
    ranks, nodes, per_node = shape
    if algorithm == "tree":  # a chain within the node, a binary tree between nodes
        return rounds * (per_node - 1), rounds * (nodes - 1).bit_length()
    return rounds * (ranks - nodes), rounds * (nodes - 1)


def _estimated_rate(algorithm: Algorithm, protocol: Protocol, fabric: Fabric) -> float:
    """What NCCL counts on for all rings of a node together."""
    rate = ESTIMATED_SHARE[fabric.transport] * fabric.bytes_per_s
    if fabric.through_cpu:
        rate = min(rate, ESTIMATED_CPU_BYTES_PER_S)
    share = TREE_SHARE if algorithm == "tree" else ESTIMATED_PROTOCOL_SHARE
    is_capped = protocol == "LL" and fabric.transport == "nvlink"
    return min(share.of(protocol) * rate, fabric.ll_share * fabric.bytes_per_s if is_capped else inf)


def _in_switch(sent: float, shape: GroupShape, fabric: Fabric) -> Way:
    heads = IN_SWITCH_SHARE * min(shape.ranks / IN_SWITCH_HEADS, 1.0)
    return Way(
        algorithm="in-switch",
        protocol="Simple",
        latency_seconds=IN_SWITCH_STARTS * fabric.start_seconds,
        sent=sent,
        estimated_seconds=IN_SWITCH_SECONDS,
        estimated_bytes_per_s=heads * _estimated_rate("ring", "Simple", fabric),
    )


def _pat(sent: float, shape: GroupShape, fabric: Fabric) -> Way:
    hop = HOP_SECONDS["network"]["tree"].Simple * PAT_HOP_SHARE + fabric.added_seconds
    latency = (shape.nodes - 1).bit_length() * hop + shape.ranks * PAT_RANK_SECONDS
    return Way(
        algorithm="pat",
        protocol="Simple",
        latency_seconds=RING_STARTS.Simple * fabric.start_seconds + latency,
        sent_between=sent,
        share=PAT_SHARE,
    )


def _pairwise(spec: CollectiveSpec, nbytes: int, shape: GroupShape, fabric: Fabric) -> list[tuple[Way, int]]:
    """Each rank sends to each other at once: small messages by LL, others by Simple. There is no estimate, since NCCL
    has one algorithm."""
    ranks, nodes, per_node = shape
    sent = spec.wire["pairwise"](ranks)
    peers = ranks - 1
    between = 0.0 if nodes == 1 else HOP_SECONDS["network"]["ring"].Simple + fabric.added_seconds
    hop = LL_HOP_FACTOR * HOP_SECONDS[fabric.transport]["ring"].LL

    def way(protocol: Protocol) -> Way:
        starts = PAIRWISE_STARTS.of(protocol) * fabric.start_seconds
        near = hop if protocol == "LL" else 0.0
        return Way(
            algorithm="pairwise",
            protocol=protocol,
            latency_seconds=starts + near + between + peers * PEER_SECONDS,
            sent=sent * (per_node - 1) / peers,  # the same to each other rank
            sent_between=sent * (ranks - per_node) / peers,
            copied=OWN_PART_SHARE / ranks if spec.keeps_part else 0.0,
            share=PROTOCOL_SHARE.of(protocol),
        )

    if nodes > 1:
        return [(way("Simple"), nbytes)]
    largest = int(PAIRWISE_LL_BYTES / sent * peers)
    if nbytes <= largest:
        return [(way("LL"), nbytes)]
    return [(way("LL"), largest), (way("Simple"), nbytes)]
