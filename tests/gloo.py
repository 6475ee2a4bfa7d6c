"""Real processes over gloo, for tests to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by_ranks(script: Path, size: int, folder: Path, *arguments: str) -> list[Any]:
    """What each process of `SCRIPT RANK SIZE STORE ARGUMENTS...` prints last, as JSON. `folder` takes their store."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(folder / "store"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]
