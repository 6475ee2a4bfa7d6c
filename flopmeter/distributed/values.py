"""Values of small tensors, where torch.distributed needs them and no meter is open that knows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flopmeter.known_values import KnownValues
from flopmeter.known_values.entry_points import open_ones
from flopmeter.torch_names.around import around


@around
def with_values(run: Any, *args: Any) -> Any:
    """The function, which knows values also without a meter."""
    if open_ones():  # a meter knows values itself
        return run(*args)
    with KnownValues() as known, _Knowing(known):
        return run(*args)


class _Knowing(TorchDispatchMode):
    """Keeps values and records nothing."""

    def __init__(self, known: KnownValues):
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return self._known.run(func, args, kwargs, tensors)
