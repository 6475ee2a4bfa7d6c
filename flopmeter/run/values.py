"""Numbers that the program reads although they are unknown: stand-ins, and the decisions that depend on them.

Works around: `.item()` of a tensor without data, which a training script calls to log its loss.
Until: never; a meter cannot know a loss.

`known_values/stand_ins.py` says which number stands in. Here it gets a type of its own, so that a comparison with it
is noticed: control flow that hangs on such a number is listed in the report. One that decides whether the program
raises an error is taken to raise none.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import yaml.representer
from torch import Tensor
from torch.optim import LBFGS

from flopmeter.known_values.assumptions import caller
from flopmeter.known_values.branches import answer_without_error
from flopmeter.known_values.entry_points import open_ones
from flopmeter.known_values.stand_ins import answer_of_stand_in
from flopmeter.run.device import NamedCuda
from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around


class StandInFloat(float):
    """A float that stands in for an unknown one; results computed from it are stand-ins too."""

    on_decision: ClassVar[Callable[[str], None]] = staticmethod(lambda where: None)

    __hash__ = float.__hash__

    def __copy__(self) -> StandInFloat:
        return self

    def __deepcopy__(self, memo: object) -> StandInFloat:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type[float], tuple[float]]:
        """In a file it is a plain number: `torch.load` and `torch.package` know no class of flopmeter's."""
        return float, (float(self),)


# PyYAML asks for the exact type.
for _representer in (yaml.representer.SafeRepresenter, yaml.representer.Representer):
    _representer.add_representer(StandInFloat, yaml.representer.SafeRepresenter.represent_float)


def _computing(name: str) -> Any:
    compute = getattr(float, name)

    @functools.wraps(compute)
    def computing(self: float, *others: Any) -> Any:
        result = compute(self, *others)
        return StandInFloat(result) if type(result) is float else result

    return computing


def _deciding(name: str) -> Any:
    decide = getattr(float, name)
    compare: Any = getattr(operator, name, bool)

    @functools.wraps(decide)
    def deciding(self: float, *others: Any) -> Any:
        StandInFloat.on_decision(caller())
        answer = answer_without_error(sys._getframe(1))
        if answer is not None:
            return answer
        is_of_number = isinstance(others[0] if others else None, (int, float)) and type(others[0]) is not StandInFloat
        return answer_of_stand_in(compare, float(self), others[0]) if is_of_number else decide(self, *others)

    return deciding


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "neg", "pos", "abs", "round",
):  # fmt: skip
    setattr(StandInFloat, f"__{_name}__", _computing(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(StandInFloat, f"__{_name}__", _deciding(f"__{_name}__"))


_TOLERANCES = ("tolerance_grad", "tolerance_change")  # of LBFGS: it stops below them


def patches(named: NamedCuda, on_decision: Callable[[str], None], note: Callable[[str], None]) -> Iterator[Patch]:
    """`on_decision` is called with the line that decides."""
    yield Patch(
        StandInFloat, "on_decision", staticmethod(on_decision), "control flow that depends on a stand-in is listed"
    )
    yield Patch(Tensor, "item", _item(Tensor.item), "gives a stand-in a type of its own")
    yield Patch(Tensor, "numpy", _numpy(named, Tensor.numpy), "refuses as on a GPU")
    yield Patch(LBFGS, "step", _to_its_last_turn(note, LBFGS.step), "a loss that stands still seems to have converged")


@around
def _to_its_last_turn(
    note: Callable[[str], None], step: Callable[..., Any], optimizer: LBFGS, closure: Callable[[], Any]
) -> Any:
    (group,) = optimizer.param_groups
    own = {name: group[name] for name in _TOLERANCES}
    note(f"LBFGS is taken not to converge before its last turn (max_iter={group['max_iter']})")
    group.update(dict.fromkeys(own, -1.0))
    try:
        return step(optimizer, closure)
    finally:
        group.update(own)


@around
def _item(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    known = open_ones()[-1] if open_ones() and tensor.is_meta else None
    is_unknown = known is not None and tensor.is_floating_point() and not known.values.knows(tensor)
    value = original(tensor)
    return StandInFloat(value) if is_unknown and isinstance(value, float) else value


@around
def _numpy(named: NamedCuda, original: Callable[..., Any], tensor: Tensor, *, force: bool = False) -> Any:
    if not named.holds(tensor):
        return original(tensor, force=force)
    if force:
        return original(tensor.detach().cpu())
    raise TypeError(
        f"can't convert {named.name} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
        "memory first."
    )
