"""What a program's data loaders take of the host is measured here, since no prediction has it."""

from __future__ import annotations

import gc
import multiprocessing
import random
import re
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import flopmeter
from flopmeter.run import loading

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
        for _ in range(1000):
            burn(SAMPLE_SECONDS)
            yield torch.zeros(64)


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


def told_of(step):
    return " ".join(text for text in (step.caution, *step.notes) if "loading" in text)


def test_of_data_that_went_with_the_program_nothing_is_said():
    dataset = Burning()
    device = trained(DataLoader(dataset, batch_size=BATCH))
    dataset.seen = None  # as a file that is closed
    assert not told_of(device.report().step)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_on(workers):
    step = trained(DataLoader(Stream(), batch_size=BATCH, num_workers=workers)).report().step
    assert seconds_in(step.caution) == pytest.approx(BATCH * SAMPLE_SECONDS, rel=0.2)


class Opening(Burning):
    """Opens its file when it is asked for the first sample."""

    file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = burn(10 * BATCH * SAMPLE_SECONDS) or "open"
        return super().__getitem__(index)


def test_what_a_worker_does_once_is_no_part_of_a_batch():
    step = trained(DataLoader(Opening(), batch_size=BATCH, num_workers=1)).report().step
    assert seconds_in(step.caution) == pytest.approx(BATCH * SAMPLE_SECONDS, rel=0.2)


def test_data_that_would_wait_for_ever_do_not_hold_up_the_report(monkeypatch):
    monkeypatch.setattr(loading, "PATIENCE_S", 0.5)
    dataset = Burning()
    device = trained(DataLoader(dataset, batch_size=BATCH))
    dataset.seen = SimpleNamespace(append=lambda index: threading.Event().wait())  # as a queue that nothing fills
    start = time.monotonic()
    assert not told_of(device.report().step)
    assert time.monotonic() - start < 10


def test_workers_of_a_loader_end_with_it():
    dataset = Burning()
    with flopmeter.cuda("h100-sxm5-80gb"):
        for _ in range(2):
            next(iter(DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)))
            gc.collect()
            assert not multiprocessing.active_children()


def test_measuring_goes_on_where_the_programs_sampler_is():
    begun = []

    class Once(Sampler):
        def __iter__(self):
            begun.append(self)
            return iter(range(1000))

    device = trained(DataLoader(Burning(), batch_size=BATCH, sampler=Once()))
    assert told_of(device.report().step)
    assert len(begun) == 1


def rollouts(on_the_device):
    """Each step has a data set of its own, which is gone with it; three loaders read it."""
    with flopmeter.cuda("h100-sxm5-80gb", steps=4) as device:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            data = torch.randn(2 * BATCH, 64, device="cuda" if on_the_device else "cpu")
            for _ in range(3):
                for batch in DataLoader(data, batch_size=BATCH, collate_fn=slowly):
                    model(batch.cuda()).sum().backward()
            optimizer.step()
    return device.report().step


def slowly(samples):
    burn(BATCH * SAMPLE_SECONDS)
    return torch.stack(samples)


def test_loaders_of_one_data_set_are_told_as_one():
    caution = rollouts(on_the_device=False).caution
    assert caution.count("loading 6 batches takes") == 1
    assert seconds_in(caution) == pytest.approx(6 * BATCH * SAMPLE_SECONDS, rel=0.2)


def test_data_on_the_device_are_not_loaded_nor_kept():
    step = rollouts(on_the_device=True)
    assert not told_of(step)
    assert "leaves" not in step.caution


def test_several_data_sets_of_a_step_are_told_by_their_names():
    class Other(Burning):
        pass

    def both():
        loaders = (DataLoader(data, batch_size=BATCH) for data in (Burning(), Other()))
        yield from (one + other for one, other in zip(*loaders, strict=True))

    caution = trained(both()).report().step.caution
    assert "loading a batch of Burning takes" in caution
    assert "loading a batch of Other takes" in caution


class Viewing(Burning):
    """All that it does are views, for which the prediction has several times what they take."""

    def __getitem__(self, index):
        x = torch.zeros(64)
        for _ in range(200):
            x = x.detach()
        return x


def test_what_the_prediction_has_of_a_batch_is_not_told_as_left_out():
    step = trained(DataLoader(Viewing(), batch_size=BATCH)).report().step
    assert step.host_seconds > 200 * BATCH * 3.2e-6  # docs/host.md: what an op that launches nothing costs
    assert not told_of(step)
