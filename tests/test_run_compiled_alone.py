"""torch.compile under the device named cuda, in a process of its own: Dynamo keeps what other tests compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_compiled_functions_under_the_device_named_cuda():
    file = Path(__file__).with_name("test_run_compiled.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
