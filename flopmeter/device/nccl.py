"""How NCCL moves a collective: its algorithms, the bytes that each puts on the wire, and the latency of each step.

Wire bytes follow from the algorithm alone (nccl-tests, doc/PERFORMANCE.md): a ring all-reduce of S bytes over n ranks
sends 2(n-1)/n S from every rank. The latencies are those by which NCCL itself chooses an algorithm
(nccl/src/graph/tuning.cc, ncclTunerConstantsDefaults; also in torch/_inductor/comm_analysis.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from flopmeter.records import CollectiveKind
from flopmeter.records.collectives import COLLECTIVES, Algorithm

Transport = Literal["nvlink", "pcie", "network"]
Protocol = Literal["LL", "LL128", "Simple"]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")

# Seconds before the first byte moves, by algorithm and protocol.
BASE_SECONDS: dict[Algorithm, tuple[float, float, float]] = {
    "ring": (6.6e-6, 14.0e-6, 8.4e-6),
    "tree": (6.8e-6, 14.0e-6, 8.4e-6),
}

# Seconds of one step from rank to rank, by transport, algorithm and protocol.
HOP_SECONDS: dict[Transport, dict[Algorithm, tuple[float, float, float]]] = {
    "nvlink": {"ring": (0.6e-6, 1.9e-6, 3.4e-6), "tree": (0.6e-6, 1.25e-6, 4.0e-6)},
    "pcie": {"ring": (1.0e-6, 2.5e-6, 5.7e-6), "tree": (1.0e-6, 1.9e-6, 4.0e-6)},
    "network": {"ring": (2.7e-6, 4.0e-6, 14.0e-6), "tree": (5.0e-6, 8.5e-6, 14.0e-6)},
}

# Share of the Simple protocol's bandwidth. LL sends a flag with every word, and NCCL caps it: llMaxBws over its NVLink
# bandwidths is .33 for Volta, .37 for Ampere, .38 for Hopper, .39 for Blackwell. LL128 carries 120 of 128 bytes, a
# tree 7/9 of them within a node; LL in a tree gets 1/3.8, Simple 0.92.
PROTOCOL_SHARE: dict[Algorithm, tuple[float, float, float]] = {
    "ring": (0.37, 120 / 128, 1.0),
    "tree": (1 / 3.8, 7 / 9, 0.92),
}

# Seconds of an all-reduce that NVSwitch does (NVLS), whatever its size; it has the Simple protocol only.
IN_SWITCH_SECONDS = 25e-6


class GroupShape(NamedTuple):
    """How the ranks of a group are distributed over the nodes of the cluster."""

    ranks: int
    nodes: int
    per_node: int  # ranks on the node with the fewest, which is also the number of network ports that the group uses


class Schedule(NamedTuple):
    """One way to run a collective: the bytes that the busiest rank sends, and the latency of all steps."""

    algorithm: Algorithm
    protocol: Protocol
    intra_bytes: float  # over the links within its node
    inter_bytes: float  # over its own network port
    latency_seconds: float
    share: float  # of the link's sustained bandwidth that the protocol reaches


def schedules(
    kind: CollectiveKind, nbytes: int, shape: GroupShape, transport: Transport, *, added_seconds: float, in_switch: bool
) -> Iterator[Schedule]:
    """The ways that NCCL can choose from. `added_seconds`: of each step between nodes, in addition to NCCL's
    constant."""
    if shape.ranks == 1:
        yield Schedule("none", "Simple", 0.0, 0.0, 0.0, 1.0)
        return
    spec = COLLECTIVES[kind]
    for algorithm, sends in spec.wire.items():
        if algorithm == "in-switch":
            if in_switch and shape.nodes == 1:
                yield Schedule(algorithm, "Simple", nbytes * sends(shape.ranks), 0.0, IN_SWITCH_SECONDS, 1.0)
            continue
        intra_bytes, inter_bytes = _by_link(algorithm, nbytes * sends(shape.ranks), shape)
        intra_steps, inter_steps = _steps(algorithm, spec.rounds, shape)
        family: Algorithm = "ring" if algorithm == "pairwise" else algorithm
        for index, protocol in enumerate(PROTOCOLS):
            latency = BASE_SECONDS[family][index] + intra_steps * HOP_SECONDS[transport][family][index]
            latency += inter_steps * (HOP_SECONDS["network"][family][index] + added_seconds)
            yield Schedule(algorithm, protocol, intra_bytes, inter_bytes, latency, PROTOCOL_SHARE[family][index])


def _by_link(algorithm: Algorithm, nbytes: float, shape: GroupShape) -> tuple[float, float]:
    """The bytes that the busiest rank sends within its node, and those that it sends over its network port.

    Between nodes NCCL makes as many rings (or trees) as the group has network ports on a node; each has its share.
    """
    ranks, nodes, per_node = shape
    if algorithm == "pairwise":  # rank to rank at once: the same to each other rank
        return nbytes * (per_node - 1) / (ranks - 1), nbytes * (ranks - per_node) / (ranks - 1)
    return (nbytes if per_node > 1 else 0.0), (nbytes / per_node if nodes > 1 else 0.0)


def _steps(algorithm: Algorithm, rounds: int, shape: GroupShape) -> tuple[int, int]:
    """How many steps follow one another, within nodes and between nodes."""
    ranks, nodes, per_node = shape
    if algorithm == "pairwise":
        return (1, 0) if nodes == 1 else (0, 1)
    if algorithm == "tree":  # a chain within the node, a binary tree between nodes
        return rounds * (per_node - 1), rounds * (nodes - 1).bit_length()
    return rounds * (ranks - nodes), rounds * (nodes - 1)
