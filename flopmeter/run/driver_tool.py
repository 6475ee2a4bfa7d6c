"""Commands of NVIDIA's that scripts start to learn what they run on: nvidia-smi, and nvcc for CUDA's version.

Works around: a machine without NVIDIA's driver and CUDA's toolkit, which bring the commands.
Until: never; a machine without a GPU has neither.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopmeter.run.world import environment

_SMI = """\
#!/bin/sh
case "$*" in
*--query*) echo "nvidia-smi: no GPU runs, so flopmeter answers no query" >&2; exit 6;;
esac
for gpu in {gpus}; do echo "GPU $gpu: {name} (flopmeter predicts it; no GPU runs)"; done
"""  # 6 is nvidia-smi's own code for a query that found nothing (its manual, "RETURN VALUE")

_NVCC = """\
#!/bin/sh
case "$*" in
-V|--version) echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {cuda}, V{cuda}.0 (flopmeter; nothing is compiled)";;
*) echo "nvcc: flopmeter compiles nothing for CUDA" >&2; exit 1;;
esac
"""  # the last line but its brackets as nvcc prints it: programs look for the word behind "release"


@contextmanager
def on_path(name: str, count: int) -> Iterator[None]:
    """In this context the command nvidia-smi names the GPUs of the run, and no GPU of this machine."""
    text = _SMI.format(name=name.replace('"', ""), gpus=" ".join(map(str, range(count))))
    with _command("nvidia-smi", text) as folder:
        with environment({"PATH": os.pathsep.join((str(folder), os.environ.get("PATH", os.defpath)))}):
            yield


@contextmanager
def cuda_home(cuda: str) -> Iterator[Path]:
    """A folder like that of CUDA's toolkit, whose compiler tells its version and compiles nothing."""
    with _command("bin/nvcc", _NVCC.format(cuda=cuda)) as folder:
        yield folder


@contextmanager
def _command(name: str, text: str) -> Iterator[Path]:
    """A folder with this command in it."""
    with tempfile.TemporaryDirectory(prefix="flopmeter-") as folder:
        command = Path(folder, name)
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
        yield Path(folder)
