"""The collectives: one entry for each kind says all that a stage has to know of it.

`costs` reads how large a collective is and what memory it touches, `device` what it puts on the wire, `known_values`
what a rank knows afterwards. To add a collective is to add an entry, or an op to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
]  # fmt: skip
Algorithm = Literal["ring", "tree", "pat", "in-switch", "pairwise", "none"]
# What a rank holds afterwards. known_values/collectives.py has a function for each.
Law = Literal[
    "reduced", "reduced at the root", "gathered", "reduce-scattered", "exchanged", "broadcast", "scattered", "unknown"
]  # fmt: skip

# The argument that is the group, by namespace of the op.
GROUP_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {"c10d": "process_group", "_c10d_functional": "group_name", "_dtensor": "group_name"}
)

FUNCTIONAL = "_c10d_functional"  # collectives that return their result, as DTensor uses them

# Ops that make a stream wait for a collective, and return what it returned.
WAIT_OPS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")

# Ops of symmetric memory that are recorded as what their kernels for meta run: collectives and products.
MADE_OF_COLLECTIVES = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")

# Types that NVSwitch adds (ncclNvlsSupported in nccl/src/include/device.h); not int8 and fp8.
IN_SWITCH_TYPES = ("fp16", "bf16", "fp32", "fp64", "int32", "int64")


class CollectiveOp(NamedTuple):
    """One of torch's ops. `sent` and `received` name arguments; the same one for both: the op works in place."""

    name: str  # with its namespace
    sent: str | None  # what this rank gives; None: nothing
    received: str | None  # what this rank gets; None: the op's result
    has_law: bool = True  # False: the law of its kind does not hold, so that what is received is not known
    peer: str | None = None  # the other rank, by its index in the group
    ways: str | None = None  # the argument that says of each tensor whether it is sent ('isend') or received ('irecv')

    @property
    def group(self) -> str:
        """The argument that is the group."""
        return GROUP_ARGUMENTS[self.name.partition("::")[0]]


class CollectiveSpec(NamedTuple):
    """One kind of collective."""

    size: Callable[[int, int, int], int]
    """The collective's size, from the bytes that this rank sends and receives, and the number of ranks. It is that of
    the whole tensor: after a gather, before a reduce-scatter or a scatter, as in nccl-tests."""
    wire: Mapping[Algorithm, Callable[[int], float]]
    """For each algorithm that NCCL has for it: from the number of ranks, the share of the size that the busiest rank
    sends (nccl-tests, doc/PERFORMANCE.md)."""
    law: Law | None  # None: no rank knows more afterwards
    ops: tuple[CollectiveOp, ...]
    rounds: int = 1  # how often the data pass around the ring, or through the tree
    keeps_part: bool = False  # each rank copies its own part, which crosses no link

    @property
    def reduces(self) -> bool:
        """Whether what arrives is added up."""
        return self.law in ("reduced", "reduced at the root", "reduce-scattered")


def _sent(sent: int, received: int, ranks: int) -> int:
    return sent


def _received(sent: int, received: int, ranks: int) -> int:
    return received


def _parts_of_others(ranks: int) -> float:
    """All parts but one: that of this rank, or the one that it keeps."""
    return (ranks - 1) / ranks


def _whole(ranks: int) -> float:
    return 1.0


COLLECTIVES: Mapping[CollectiveKind, CollectiveSpec] = MappingProxyType(
    {
        "all_reduce": CollectiveSpec(
            size=_sent,
            wire={
                "ring": lambda ranks: 2 * (ranks - 1) / ranks,  # a reduce-scatter, then an all-gather
                "tree": lambda _: 2.0,  # up and down
                # The switch reads each rank's bytes once, and each rank sends its part of the sum to all through it.
                "in-switch": lambda ranks: (ranks + 1) / ranks,
            },
            rounds=2,
            keeps_part=True,
            law="reduced",
            ops=(
                CollectiveOp("c10d::allreduce_", "tensors", "tensors"),
                CollectiveOp("c10d::allreduce_coalesced_", "tensors", "tensors"),
                CollectiveOp("_c10d_functional::all_reduce", "input", None),
                CollectiveOp("_c10d_functional::all_reduce_", "input", "input"),
                CollectiveOp("_c10d_functional::all_reduce_coalesced", "inputs", None),
                CollectiveOp("_c10d_functional::all_reduce_coalesced_", "inputs", "inputs"),
            ),
        ),
        "all_gather": CollectiveSpec(
            size=_received,
            wire={"ring": _parts_of_others, "pat": _parts_of_others},
            keeps_part=True,
            law="gathered",
            ops=(
                CollectiveOp("c10d::allgather_", "input_tensors", "output_tensors"),
                CollectiveOp("c10d::_allgather_base_", "input_tensor", "output_tensor"),
                CollectiveOp("c10d::allgather_coalesced_", "input_list", "output_lists"),
                CollectiveOp("c10d::allgather_into_tensor_coalesced_", "inputs", "outputs"),
                CollectiveOp("_c10d_functional::all_gather_into_tensor", "input", None),
                CollectiveOp("_c10d_functional::all_gather_into_tensor_out", "input", "out"),
                CollectiveOp("_c10d_functional::all_gather_into_tensor_coalesced", "inputs", None),
            ),
        ),
        "reduce_scatter": CollectiveSpec(
            size=_sent,
            wire={"ring": _parts_of_others, "pat": _parts_of_others},
            keeps_part=True,
            law="reduce-scattered",
            ops=(
                CollectiveOp("c10d::reduce_scatter_", "input_tensors", "output_tensors"),
                CollectiveOp("c10d::_reduce_scatter_base_", "input_tensor", "output_tensor"),
                CollectiveOp("c10d::reduce_scatter_tensor_coalesced_", "inputs", "outputs"),
                CollectiveOp("_c10d_functional::reduce_scatter_tensor", "input", None),
                CollectiveOp("_c10d_functional::reduce_scatter_tensor_out", "input", "out"),
                CollectiveOp("_c10d_functional::reduce_scatter_tensor_coalesced", "inputs", None),
            ),
        ),
        "all_to_all": CollectiveSpec(
            size=lambda sent, received, _: max(sent, received),  # a port sends and receives at once
            wire={"pairwise": _parts_of_others},
            keeps_part=True,
            law="exchanged",
            ops=(
                CollectiveOp("c10d::alltoall_", "input_tensors", "output_tensors"),
                CollectiveOp("c10d::alltoall_base_", "input", "output"),
                CollectiveOp("_c10d_functional::all_to_all_single", "input", None),
                CollectiveOp("_dtensor::shard_dim_alltoall", "input", None, has_law=False),  # along any dimension
            ),
        ),
        "broadcast": CollectiveSpec(
            size=_sent,
            wire={"ring": _whole},
            law="broadcast",
            ops=(
                CollectiveOp("c10d::broadcast_", "tensors", "tensors"),
                CollectiveOp("_c10d_functional::broadcast", "input", None),
                CollectiveOp("_c10d_functional::broadcast_", "input", "input"),
            ),
        ),
        "reduce": CollectiveSpec(
            size=_sent,
            wire={"ring": _whole},
            law="reduced at the root",
            ops=(CollectiveOp("c10d::reduce_", "tensors", "tensors"),),
        ),
        "gather": CollectiveSpec(
            size=lambda sent, received, ranks: max(received, ranks * sent),  # the root's: others receive nothing
            wire={"pairwise": _parts_of_others},
            keeps_part=True,
            law="gathered",
            ops=(
                CollectiveOp("c10d::gather_", "input_tensors", "output_tensors"),
                CollectiveOp("c10d::gather_into_tensor_", "input_tensor", "output_tensor", has_law=False),
            ),
        ),
        "scatter": CollectiveSpec(
            size=lambda sent, received, ranks: max(sent, ranks * received),  # the root's: others send nothing
            wire={"pairwise": _parts_of_others},
            keeps_part=True,
            law="scattered",
            ops=(CollectiveOp("c10d::scatter_", "input_tensors", "output_tensors"),),
        ),
        "send": CollectiveSpec(
            size=_sent,
            wire={"pairwise": _whole},
            law=None,
            ops=(
                CollectiveOp("c10d::send", "tensors", None, peer="dst"),
                CollectiveOp("_c10d_functional::isend", "tensor", None, peer="dst"),
            ),
        ),
        "recv": CollectiveSpec(
            size=_received,
            wire={"pairwise": _whole},
            law="unknown",
            ops=(
                CollectiveOp("c10d::recv_", None, "tensors", peer="src"),
                CollectiveOp("c10d::recv_any_source_", None, "tensors"),
                CollectiveOp("_c10d_functional::irecv", None, "tensor", peer="src"),
                CollectiveOp("_c10d_functional::batch_p2p_ops", "tensors", "tensors", peer="peer_list", ways="op_list"),
            ),
        ),
        "barrier": CollectiveSpec(
            size=lambda *_: 0,
            wire={"ring": lambda _: 0.0, "tree": lambda _: 0.0},
            rounds=2,
            law=None,
            ops=(CollectiveOp("c10d::barrier", None, None), CollectiveOp("c10d::monitored_barrier_", None, None)),
        ),
    }
)


class KnownOp(NamedTuple):
    """An op of the table, with the entry that it belongs to."""

    kind: CollectiveKind
    spec: CollectiveSpec
    op: CollectiveOp


# The op of that name.
COLLECTIVE_OPS: Mapping[str, KnownOp] = MappingProxyType(
    {op.name: KnownOp(kind, spec, op) for kind, spec in COLLECTIVES.items() for op in spec.ops}
)
