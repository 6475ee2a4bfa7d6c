"""nvidia-smi, which scripts start to print what GPU they run on.

Works around: a machine without NVIDIA's driver, which brings the command.
Until: never; a machine without a GPU has no driver.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopmeter.run.world import environment

_SCRIPT = """\
#!/bin/sh
case "$*" in
*--query*) echo "nvidia-smi: no GPU runs, so flopmeter answers no query" >&2; exit 6;;
esac
for gpu in {gpus}; do echo "GPU $gpu: {name} (flopmeter predicts it; no GPU runs)"; done
"""  # 6 is nvidia-smi's own code for a query that found nothing (its manual, "RETURN VALUE")


@contextmanager
def on_path(name: str, count: int) -> Iterator[None]:
    """In this context the command nvidia-smi names the GPUs of the run, and no GPU of this machine."""
    with tempfile.TemporaryDirectory(prefix="flopmeter-") as folder:
        command = Path(folder, "nvidia-smi")
        command.write_text(_SCRIPT.format(name=name.replace('"', ""), gpus=" ".join(map(str, range(count)))))
        command.chmod(0o755)
        with environment({"PATH": os.pathsep.join((folder, os.environ.get("PATH", os.defpath)))}):
            yield
