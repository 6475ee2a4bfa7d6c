"""All-reduces of small messages by one kernel that reads the memory of peers, as serving engines run them in a node.

The kernels are vLLM's (csrc/custom_all_reduce.cuh), which SGLang took over; those of TensorRT-LLM have the same two
ways. In one stage a rank tells each other one that its numbers are there, reads those of all others, adds them up, and
tells that it is done. In two stages it does so for its own part, and then reads the sums of the others' parts. Nothing
of it was measured here: the time is counted in trips over the link, each as long as NCCL's smallest message takes from
rank to rank (a store that a peer waits for), after the start of a kernel. Ranks are taken to come at the same time.
"""

from __future__ import annotations

from flopmeter.device.cluster import Cluster, price_collective
from flopmeter.device.hardware import Hardware
from flopmeter.device.nccl import HOP_SECONDS, LL_HOP_FACTOR
from flopmeter.records import Collective

MOST_BYTES = 8 * 1024 * 1024  # of a message: vLLM's and SGLang's buffers (max_size in custom_all_reduce.py)
GROUPS = (2, 4, 6, 8)  # ranks that these kernels are written for
BYTES_IN_FLIGHT = 36 * 512 * 16  # from each other rank: blocks, their threads, bytes that a thread loads at a time


def all_reduce_seconds(nbytes: int, ranks: int, hardware: Hardware, cluster: Cluster) -> float:
    """Seconds of an all-reduce of `nbytes` on the first ranks: by the quickest of both ways and NCCL's.

    Engines choose between them by sizes that were tuned to that. Raises HardwareError where the cluster has too few
    GPUs.
    """
    group, others = tuple(range(ranks)), ranks - 1
    by_nccl = price_collective(Collective("all_reduce", nbytes, group), cluster).seconds
    if not reads_peers(nbytes, ranks, cluster):
        return by_nccl
    trip = LL_HOP_FACTOR * HOP_SECONDS[cluster.intra.transport]["ring"].LL
    rate = cluster.intra.sustained_among(set(group))

    def read(part: float) -> float:
        """Seconds to read that many bytes from each other rank: the first arrive after a request and its answer."""
        return 2 * trip + max(others * part / rate, 2 * trip * (part / BYTES_IN_FLIGHT - 1))

    one_stage = trip + read(nbytes) + trip
    two_stages = 2 * (trip + read(nbytes / ranks))  # nobody waits at the end: the next kernel waits at its start
    return min(by_nccl, hardware.kernel_floor_seconds + min(one_stage, two_stages))


def reads_peers(nbytes: int, ranks: int, cluster: Cluster) -> bool:
    """Whether engines have a kernel for it: in a node, and where each GPU has a link to each other one, or for two."""
    is_near = ranks <= cluster.gpus_per_node and (cluster.intra.transport == "nvlink" or ranks == 2)
    return nbytes <= MOST_BYTES and ranks in GROUPS and is_near
