"""Run by test_torch_versions.py, in a process of its own: flopmeter on a torch that lacks operators.

An operator is hidden from who looks it up in a file of flopmeter: torch's own Python code, which of a torch without it
would not name it either, runs as ever.
"""

import importlib
import pkgutil
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

PACKAGE = Path(str(find_spec("flopmeter").origin)).parent
SUBSETS = 12
OFFERED = {"aten._fused_adamw_", "aten._fused_adamw_.default"}  # by the report's advice, to the program below

named: dict[str, set[str]] = {}  # operator or overload -> the parts of flopmeter that looked it up
imported: list[Any] = []  # torch holds on to what they have registered
hidden: frozenset[str] = frozenset()


def watch(owners: type, look_up: str) -> None:
    """Note what flopmeter looks up, and let it not find what is hidden."""
    original = getattr(owners, look_up)

    def watched(owner: Any, attribute: str) -> Any:
        found = original(owner, attribute)
        file = Path(sys._getframe(1).f_code.co_filename)
        if isinstance(found, (OpOverload, OpOverloadPacket)) and file.is_relative_to(PACKAGE):
            part = "as_cuda" if file.name == "dispatcher.py" else file.relative_to(PACKAGE).parts[0]
            named.setdefault(str(found), set()).add(part)  # (the emulation looks its operators up there)
            if str(found) in hidden:
                raise AttributeError(f"hidden: {found}")
        return found

    setattr(owners, look_up, watched)


def import_afresh() -> Any:
    """flopmeter with every part of it, on the torch of the moment."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flopmeter"]:
        imported.append(sys.modules.pop(name))
    package = importlib.import_module("flopmeter")
    for module in pkgutil.walk_packages(package.__path__, "flopmeter."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return package


def step(flopmeter: Any) -> Any:
    """A metered training step."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        ids = torch.zeros(4, 32, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        with torch.autocast("cuda", torch.bfloat16):
            x = model(ids).unflatten(-1, (4, 16)).transpose(1, 2)
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        (x * (torch.arange(16) > 3).to("meta")).sum().backward()
        optimizer.step()
    return meter


def undated(report: Any) -> str:
    """Its text without the minute in which it was made."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", str(report))


def main() -> None:
    global hidden
    for owners in (_OpNamespace, OpOverloadPacket):
        watch(owners, "__getattribute__")
        watch(owners, "__getattr__")
    meter = step(import_afresh())
    whole = undated(meter.report())
    ran = {name for op in meter.trace.ops for name in (str(op.call.func), str(op.call.func.overloadpacket))}
    tables = [name for name, parts in named.items() if name not in ran | OFFERED and "as_cuda" not in parts]
    assert len(named) > 500, len(named)

    hidden = frozenset(tables)
    assert undated(step(import_afresh()).report()) == whole, "what the program does not run is missed"
    for seed in range(SUBSETS):
        hidden = frozenset(random.Random(seed).sample(sorted(named), len(named) // 2))
        try:
            text = str(step(import_afresh()).report())
        except Exception as error:
            raise AssertionError(f"a metered step fails, seed {seed}") from error
        assert "predicted" in text, text
    print(f"{len(named)} operators hidden")


if __name__ == "__main__":  # pytest imports it to look for examples
    main()
