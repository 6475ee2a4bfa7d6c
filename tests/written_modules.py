"""Modules that a test writes, since Triton reads the source of its kernels from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def imported(folder: Path, name: str, text: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
