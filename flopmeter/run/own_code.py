"""The program's own code, as far as it is loaded: whether it has words of training."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_TRAINS = re.compile(r"\.(backward|fit|train)\(")  # a pass of its own, or a trainer's; `.train()` also of a module


class OwnCode:
    """Of the program that starts now: its main file, and the modules that it imports from beside it. Packages that are
    installed are not its own: nearly all of them can train."""

    def __init__(self) -> None:
        self._before = set(sys.modules)

    def may_train(self) -> bool:
        return any(_TRAINS.search(file.read_text(errors="replace")) for file in self._files())

    def _files(self) -> Iterator[Path]:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            is_own = name == "__main__" or (name not in self._before and not _is_installed(name, file))
            if is_own and file.endswith(".py") and Path(file).is_file():
                yield Path(file)


def _is_installed(module: str, file: str) -> bool:
    is_ours = module.partition(".")[0] == "flopmeter"
    return is_ours or file.startswith(_STANDARD_LIBRARY) or not _PACKAGES.isdisjoint(Path(file).parts)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGES = {"site-packages", "dist-packages"}  # folders that pip and Debian install into
