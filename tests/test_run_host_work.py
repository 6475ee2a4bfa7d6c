"""What a program computes itself between its ops is measured here, since no prediction has it."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

STEP_SECONDS = 0.05
PROGRAM = """
import time
import torch
from torch.utils.data import DataLoader

def play(seconds):
    start = time.thread_time()
    while time.thread_time() < start + seconds:
        pass  # plays

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        play({loading})
        return torch.zeros(64)

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for batch in DataLoader(Data(), batch_size=1):
    play({playing})
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
needs_clocks = pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of another thread")


def ran(folder, **seconds):
    (folder / "play.py").write_text(PROGRAM.format(**seconds))
    command = [sys.executable, "-m", "flopmeter", "run", "--steps", "6", "--hardware", "h100-sxm5-80gb", "play.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


@needs_clocks
def test_the_first_lines_tell_what_the_program_computes_itself_and_where(tmp_path):
    (told,) = re.findall(
        r"the program itself computes for some ([\d.]+) ms .* at (play\.py:\d+)",
        ran(tmp_path, playing=STEP_SECONDS, loading=0),
    )
    assert float(told[0]) / 1e3 == pytest.approx(STEP_SECONDS, rel=0.4)
    assert told[1] in ("play.py:8", "play.py:9")


def test_what_a_data_loader_computes_is_not_the_programs_own_work(tmp_path):
    said = ran(tmp_path, playing=0, loading=STEP_SECONDS)
    assert "the program itself computes" not in said
    assert "loading a batch takes" in said
