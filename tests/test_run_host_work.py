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
        r"the program itself computes for some ([\d.]+) ms .* most of it at (play\.py:\d+), in play:",
        ran(tmp_path, playing=STEP_SECONDS, loading=0),
    )
    assert float(told[0]) / 1e3 == pytest.approx(STEP_SECONDS, rel=0.4)
    assert told[1] in ("play.py:8", "play.py:9")


def test_what_a_data_loader_computes_is_not_the_programs_own_work(tmp_path):
    said = ran(tmp_path, playing=0, loading=STEP_SECONDS)
    assert "the program itself computes" not in said
    assert "loading a batch takes" in said


SMALL_OPS = """
import torch

field = torch.randn(512, 512, device="cuda")
last = torch.nn.Linear(512, 512).cuda()
with torch.no_grad():
    for _ in range(20):
        for _ in range(100):
            near = field.roll(1, 0) + field.roll(-1, 0) + field.roll(1, 1) + field.roll(-1, 1)
            field = field + 0.1 * (near - 4 * field)
            field[0] = field[-1] = 0
        last(field)
"""
IN_TORCH = """
import time
import torch

def play(seconds):
    start = time.thread_time()
    while time.thread_time() < start + seconds:
        pass

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        play(0.02)  # as a matcher of boxes
        return self.layer(x)

@torch.no_grad()
def roll_out():
    play(0.02)

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())

def loss():
    play(0.01)
    optimizer.zero_grad()
    y = net(torch.zeros(8, 64).cuda()).sum()
    y.backward()
    return y

for _ in range(8):
    roll_out()
    optimizer.step(loss)
"""
WAITING = """
import queue, threading, time
import torch

def play(seconds):
    start = time.thread_time()
    while time.thread_time() < start + seconds:
        pass

made = queue.Queue(1)

def make():
    while True:
        play(0.02)
        made.put(torch.zeros(64))

threading.Thread(target=make, daemon=True).start()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(12):
    model(made.get().cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_PYTHONS_OWN = """
import collections.abc, itertools
import torch

Place = collections.namedtuple("Place", "x y")

def play():
    collections.deque({calls}, 0)

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
while True:
    play()
    model(torch.zeros(8, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def said_of(folder, program, *options):
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "flopmeter", "run", "--hardware", "h100-sxm5-80gb", *options, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("program", [SMALL_OPS, WAITING])
def test_neither_the_launches_of_ops_nor_waiting_is_the_programs_own_work(tmp_path, program):
    assert "the program itself computes" not in said_of(tmp_path, program, "--steps", "10")


@needs_clocks
@pytest.mark.parametrize("options", [(), ("--gpus", "2")])
def test_what_the_program_computes_in_modules_closures_and_decorated_functions_counts(tmp_path, options):
    said = said_of(tmp_path, IN_TORCH, "--steps", "6", *options)
    (told,) = re.findall(r"the program itself computes for some ([\d.]+) ms", said)
    assert float(told) == pytest.approx(20 + 20 + 10, rel=0.3)


@needs_clocks
@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ("map(Place, range(200_000), range(200_000))", "play"),
        ("map(isinstance, range(200_000), itertools.repeat(collections.abc.Sequence))", "abc"),
    ],
)
def test_what_python_computes_for_a_named_tuple_or_an_abstract_class_is_the_work_of_who_calls_it(tmp_path, calls, what):
    said = said_of(tmp_path, IN_PYTHONS_OWN.format(calls=calls), "--steps", "6")
    assert f"most of it at program.py:8, in {what}:" in said
