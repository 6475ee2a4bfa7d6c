"""A case of the suite: the inputs that make it again anywhere, and the tensors that it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flopmeter.records import Clocks
from flopmeter.records.dtypes import DTYPES

Size = int | float | str | bool
CaseRun = Callable[[], object]


class UnknownCaseError(ValueError):
    """A case that this version of flopmeter cannot make."""


class Case(NamedTuple):
    """A kernel or a program, by its kind and the inputs that make it again, here or where it is predicted."""

    kind: str
    inputs: Mapping[str, Size]
    clocks: Clocks = "burst"  # those that it is measured at

    @property
    def name(self) -> str:
        """Such as `matmul m=512 n=4096 k=4096 bf16`; equal names are equal cases."""
        dtype = str(self.inputs.get("dtype", ""))
        sizes = [f"{name}={value}" for name, value in self.inputs.items() if name != "dtype"]
        clocks = ["sustained"] if self.clocks == "sustained" else []
        return " ".join([self.kind, *sizes, *filter(None, [dtype]), *clocks])


class Maker:
    """Makes the tensors of a case: normal random numbers on a real device, on meta shapes alone.

    A case is made several times, so that its calls in turn do not find their weights in the cache. What `weight` gives
    (weights, keys and values of earlier tokens) is another tensor each time; what `activation` gives is the same, as a
    program's last op has just written it.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self.device, self.dtype = device, torch_dtype(dtype)
        self.weight_bytes = 0  # of all that was made
        self._activations: list[Tensor] = []
        self._made = 0  # activations, since the last copy began

    def next_copy(self) -> None:
        self._made = 0

    def weight(self, *shape: int) -> Tensor:
        tensor = self._filled(shape, self.dtype)
        self.weight_bytes += tensor.nbytes
        return tensor

    def activation(self, *shape: int, order: torch.memory_format = torch.contiguous_format) -> Tensor:
        return self._shared(lambda: self._filled(shape, self.dtype).to(memory_format=order))

    def ids(self, *shape: int, below: int) -> Tensor:
        return self._shared(lambda: self._filled(shape, torch.int64, below))

    def _shared(self, make: Callable[[], Tensor]) -> Tensor:
        if self._made == len(self._activations):
            self._activations.append(make())
        self._made += 1
        return self._activations[self._made - 1]

    def _filled(self, shape: Sequence[int], dtype: torch.dtype, below: int = 10) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        if not dtype.is_floating_point:
            return torch.randint(0, below, shape, dtype=dtype, device=self.device)
        return torch.randn(shape, device=self.device).to(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Raises UnknownCaseError for a type that torch does not have."""
    if name not in DTYPES or not DTYPES[name].in_torch:
        raise UnknownCaseError(f"no type of torch's is named {name!r}")
    return next(iter(DTYPES[name].in_torch))


@contextlib.contextmanager
def switches_of(case: Case) -> Iterator[None]:
    """The switches of a case: matmuls of fp32 tensors use TF32 in the cases of that type, and in no others."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, matmul.allow_tf32 = matmul.allow_tf32, case.inputs.get("dtype") == "tf32"
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")}
    try:
        with cudnn.flags(**kept, allow_tf32=matmul.allow_tf32):
            yield
    finally:
        matmul.allow_tf32 = before
