"""What a program's data loaders take of the host is measured here, since no prediction has it."""

from __future__ import annotations

import random
import re
import time

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flopmeter

SAMPLE_SECONDS, BATCH = 0.01, 4


def burn(seconds):
    """Computes on one core for so long."""
    start = time.thread_time()
    while time.thread_time() < start + seconds:
        pass


class Burning(Dataset):
    """`seen`: the samples that were asked for."""

    def __init__(self):
        self.seen = []

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.seen.append(index)
        random.random(), numpy.random.rand()
        burn(SAMPLE_SECONDS)
        return torch.zeros(64)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(64) for _ in range(100))


def trained(loader, batches_a_step=1, layers=1):
    with flopmeter.cuda("h100-sxm5-80gb", steps=3) as device:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for number, batch in enumerate(loader, 1):
            model(batch.cuda()).sum().backward()
            if number % batches_a_step == 0:
                optimizer.step()
                optimizer.zero_grad()
    return device


def seconds_in(text):
    amount, unit = re.search(r"takes ([\d.]+) (s|ms|µs) of one core of this machine", text).groups()
    return float(amount) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.parametrize(("workers", "batches"), [(0, 1), (0, 2), (2, 1)])
def test_the_first_lines_tell_how_long_a_loader_holds_up_the_device(workers, batches):
    loader = DataLoader(Burning(), batch_size=BATCH, num_workers=workers)
    step = trained(loader, batches).report().step
    assert seconds_in(step.caution) == pytest.approx(batches * BATCH * SAMPLE_SECONDS, rel=0.2)
    assert f"num_workers={workers}" in step.caution
    cores = int(re.search(r"([\d,]+) such cores would keep up", step.caution)[1].replace(",", ""))
    assert cores == pytest.approx(seconds_in(step.caution) / step.seconds, rel=0.01)
    assert step.caution in str(step).splitlines()[:6]


def test_a_loader_that_workers_hide_is_a_note():
    loader = DataLoader(TensorDataset(torch.zeros(1000, 64)), batch_size=BATCH, collate_fn=lambda rows: rows[0][0])
    step = trained(loader, layers=100).report().step
    assert not step.caution
    (note,) = (note for note in step.notes if note.startswith("loading a batch"))
    assert "hidden by num_workers=1" in note
    assert seconds_in(note) < step.seconds


def test_the_batch_that_is_measured_is_one_that_the_program_has_not_had():
    dataset = Burning()
    device = trained(DataLoader(dataset, batch_size=BATCH))
    had = set(dataset.seen)
    device.report()
    device.report()  # which measures no second time
    assert dataset.seen[len(had) :] == [max(had) + place for place in range(1, BATCH + 1)]


def test_measuring_leaves_random_numbers_as_they_were():
    device = trained(DataLoader(Burning(), batch_size=BATCH, shuffle=True))
    state, of_torch, of_numpy = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    assert "loading" in device.report().step.caution
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert all(numpy.array_equal(now, before) for now, before in zip(numpy.random.get_state(), of_numpy, strict=True))


def test_of_a_stream_and_of_data_that_went_with_the_program_nothing_is_said():
    dataset = Burning()
    device = trained(DataLoader(dataset, batch_size=BATCH))
    dataset.seen = None  # as a file that is closed
    for step in (device.report().step, trained(DataLoader(Stream(), batch_size=BATCH)).report().step):
        assert "loading" not in step.caution + " ".join(step.notes)
