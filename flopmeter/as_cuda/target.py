"""The facts of a device that decide which ops PyTorch dispatches on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flopmeter.as_cuda.attention_rules import rules_for
from flopmeter.device.hardware import Hardware
from flopmeter.torch_names.dispatcher import running_version

STAND_IN_CAPABILITY = (8, 0)
"""The compute capability that stands for devices of other vendors: the oldest one with every fused attention kernel of
PyTorch's default order, and without the cuDNN attention that newer NVIDIA devices prefer."""


@dataclass(frozen=True)
class CudaTarget:
    """A device as PyTorch's dispatch sees it.

    `compute_capability` is (major, minor); `cudnn_version` as torch.backends.cudnn.version() returns it, by default
    the one that the CUDA wheels of the running torch bring; `notes` are the assumptions behind the two, for the report.
    """

    compute_capability: tuple[int, int]
    cudnn_version: int = field(default_factory=lambda: rules_for(running_version()).cudnn_version)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        major, minor = self.compute_capability
        if not (5 <= major <= 12 and 0 <= minor <= 9):
            raise ValueError(
                f"compute capability {major}.{minor} is none that PyTorch runs on (5.0 to 12.1): "
                "give (major, minor), such as (9, 0) for an H100"
            )

    @classmethod
    def of(cls, hardware: Hardware) -> CudaTarget:
        capability = hardware.compute_capability
        return cls.stand_in(hardware.title) if capability is None else cls(capability)

    @classmethod
    def stand_in(cls, device: str) -> CudaTarget:
        """The target for a `device` that is not from NVIDIA: ops are dispatched as on CUDA with capability 8.0."""
        major, minor = STAND_IN_CAPABILITY
        rule = f"ops are those that CUDA dispatches on compute capability {major}.{minor}"
        return cls(STAND_IN_CAPABILITY, notes=(f"{device} is not an NVIDIA device: {rule}",))

    @property
    def sm(self) -> int:
        """The capability as one number: 90 for 9.0, 121 for 12.1."""
        major, minor = self.compute_capability
        return 10 * major + minor
