"""What kernels and transfers take from each other while they run at the same time.

Nothing here is fitted. A kernel keeps the SMs that its thread blocks find free: those of a kernel that began earlier
are all placed before. So two kernels that fill the device run one after the other, and two of few blocks side by side,
as long as memory has the bandwidth for both. (For streams of one priority, from experiments: Amert et al., 'GPU
Scheduling on the NVIDIA TX2', RTSS 2017.)

Transfers that use one port the same way share its bandwidth equally. A transfer takes an SM for each of NCCL's
channels, which slows kernels that are bound by arithmetic. It also takes bandwidth of the device's own memory, which
slows both once they need more than there is. Echo (arXiv 2412.12487) also slows kernels that compute beside
collectives, by a predictor trained on profiles; here the slowdown follows from counts. Measured on A100, H100, MI210
and MI250, computing beside collectives takes 18.9 % longer on average and 40 % at most (arXiv 2507.03114).

Approximations: SMs are shared smoothly, though a kernel whose blocks just fill the device needs a second wave; a
kernel keeps as many SMs at its end as on average; two kernels never share an SM; caches and the power that both draw
are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flopmeter.device.cluster import CollectivePrice
from flopmeter.records import Collective
from flopmeter.records.collectives import COLLECTIVES

# Channels of NCCL, each a block that fills an SM. In a node over NVLink: ncclAllGather has 24 blocks on H100 (NVIDIA
# developer forum, topic 337991); all-reduces in the switch need 16 (NVIDIA/nccl issue 1041). Between nodes 16 (trees
# of 2 x 8 H100, NVIDIA/nccl-tests issue 319). Over PCIe 2 (NVIDIA/nccl-tests issue 228). A message to one peer: 16 over
# NVLink (NVIDIA/nccl issue 892), 2 between nodes (NVIDIA/nccl issue 1189).
CHANNELS_NVLINK, CHANNELS_IN_SWITCH, CHANNELS_NETWORK, CHANNELS_PCIE = 24, 16, 16, 2
MESSAGE_CHANNELS_NVLINK, MESSAGE_CHANNELS_NETWORK = 16, 2
# Bytes of a rank's own memory for each byte that it sends: one is read, and one that arrives is written. A reduction
# also reads what it adds to. (NCCL's primitives: src/device/prims_simple.h.)
MEMORY_BYTES_PER_BYTE, MEMORY_BYTES_PER_SUM = 2, 3
MOST_SMS = 0.9  # the most that all transfers take together
# The share of the SMs that draws all of the memory's bandwidth, at 64 bytes a cycle each (NVIDIA's white papers of A100
# and H100: the L2 cache's reads): .20 on an A100 80 GB, .23 on an H100, .04 on an L4.
SMS_FOR_MEMORY = 0.25
LEAST_SMS = 0.01  # the share that a kernel waits for: about one SM

Port = tuple[str, str]  # which link of the rank, and which way: 'out' or 'in'


class Transfer(NamedTuple):
    """What a collective or a message asks for while it runs."""

    latency_seconds: float  # before its bytes move
    ports: tuple[Port, ...]  # the ports that it uses
    sms: float  # share of the device's SMs
    memory: float  # share of the memory's bandwidth while its bytes move


class Demand(NamedTuple):
    """What a kernel that computes asks for: seconds of arithmetic and of memory traffic, were each alone, and SMs."""

    compute_seconds: float
    memory_seconds: float
    sms: float = 1.0  # share of the device's SMs that its blocks keep; 0: a copy over the link, by its own engine

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def memory(self) -> float:
        """The share of the memory's bandwidth that it uses; hardly any of it over the link."""
        return self.memory_seconds / self.seconds if self.seconds and self.sms else 0.0

    def rate(self, granted: float, crowded: float) -> float:
        """How fast it runs on this share of the SMs, where all ask for `crowded` times the memory's bandwidth; as a
        share of its speed alone."""
        if not self.seconds or not self.sms:
            return 1.0
        arithmetic = self.compute_seconds * (self.sms / granted)
        drawing = min(self.sms, SMS_FOR_MEMORY * self.memory) / granted
        return self.seconds / max(arithmetic, self.memory_seconds * max(1.0, crowded, drawing))


def transfer_of(
    collective: Collective, price: CollectivePrice, transport: str, sm_count: int, memory_bytes_per_s: float
) -> Transfer:
    """`transport` is that of the links within a node, `memory_bytes_per_s` what streams reach."""
    is_message = collective.kind in ("send", "recv")
    ways = {"send": ("out",), "recv": ("in",)}.get(collective.kind, ("out", "in"))
    touches = MEMORY_BYTES_PER_BYTE
    if is_message:
        touches = 1
    elif COLLECTIVES[collective.kind].reduces:
        touches = MEMORY_BYTES_PER_SUM
    moved = touches * price.wire_bytes / price.bandwidth_seconds if price.bandwidth_seconds else 0.0
    return Transfer(
        latency_seconds=price.latency_seconds,
        ports=tuple((price.link, way) for way in ways) if price.link else (),
        sms=_channels(price, transport, is_message) / sm_count if price.link else 0.0,
        memory=moved / memory_bytes_per_s,
    )


def _channels(price: CollectivePrice, transport: str, is_message: bool) -> int:
    if price.between_nodes:
        return MESSAGE_CHANNELS_NETWORK if is_message else CHANNELS_NETWORK
    if transport != "nvlink":
        return CHANNELS_PCIE
    if price.algorithm == "in-switch":
        return CHANNELS_IN_SWITCH
    return MESSAGE_CHANNELS_NVLINK if is_message else CHANNELS_NVLINK


def finds_place(kernels: Iterable[Demand]) -> bool:
    """Whether these kernels, which run, leave SMs to another one."""
    return 1.0 - sum(kernel.sms for kernel in kernels) > LEAST_SMS


def granted_sms(kernels: Iterable[Demand], transfers: Iterable[Transfer]) -> list[float]:
    """The share of the SMs that each kernel keeps beside these transfers: those that began first before the others,
    and all in proportion where transfers take some away."""
    left, found = 1.0, []
    for kernel in kernels:
        found.append(min(kernel.sms, left))
        left -= found[-1]
    free = 1.0 - min(MOST_SMS, sum(transfer.sms for transfer in transfers))
    shrunk = min(1.0, free / (1.0 - left)) if left < 1.0 else 1.0
    return [share * shrunk for share in found]


def transfer_rate(sharing: int, crowded: float) -> float:
    """How fast a transfer's bytes move, as a share of their speed alone, if this many transfers share its port and all
    that runs asks for `crowded` times the memory's bandwidth."""
    return 1 / (sharing * max(1.0, crowded))
