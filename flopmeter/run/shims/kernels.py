"""kernels (github.com/huggingface/kernels), which loads compiled kernels from the hub: those of FlashAttention.

What it loads is told by the name of the repository, whoever published it.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from flopmeter.run.shims import flash_attn_4, flash_attn_interface
from flopmeter.run.shims.flash_attn import attention
from flopmeter.run.shims.kernel import named

_FUNCTIONS = {
    r"flash-?att(n|ention)-?4": flash_attn_4.FUNCTIONS,
    r"flash-?att(n|ention)-?3": flash_attn_interface.FUNCTIONS,
    r"flash-?att(n|ention)-?2?$": attention.FUNCTIONS,
}
"""By a pattern of the repository's name."""


def get_kernel(repo_id: str, *args: Any, **options: Any) -> ModuleType:
    """A module as of the package, which has a module `flash_attn_interface`. Raises NotImplementedError for others."""
    functions = _functions(repo_id)
    if functions is None:
        raise NotImplementedError(f"flopmeter's shim of kernels has flash-attn2, -3 and -4, and no {repo_id}")
    package, interface = ModuleType(repo_id), ModuleType(f"{repo_id}.flash_attn_interface")
    for module in (package, interface):
        vars(module).update(functions)
    vars(package)["flash_attn_interface"] = interface
    return package


def has_kernel(repo_id: str, *args: Any, **options: Any) -> bool:
    return _functions(repo_id) is not None


def _functions(repo_id: str) -> dict[str, Any] | None:
    name = repo_id.rpartition("/")[2].replace("_", "-").lower()
    return next((found for pattern, found in _FUNCTIONS.items() if re.search(pattern, name)), None)


MODULES = {"kernels": named(get_kernel, has_kernel)}
