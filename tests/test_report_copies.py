"""A report is a value: it can be copied, kept in a file, sent to another process, and looked at in a shell."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter


def step():
    """Returns the meter of a training step with attention, a generator and in-place ops among its arguments."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="meta")
    optimizer = torch.optim.AdamW(layer.parameters())
    with FlopMeter("a100-sxm4-80gb") as meter:
        layer(torch.randn(2, 8, 32, device="meta", generator=torch.Generator("cpu"))).sum().backward()
        optimizer.step()
    return meter


COPIES = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_a_report_tells_the_same_in_every_mode_and_format(copied):
    report = step().report()
    again = copied(report)
    for format in ("text", "json", "csv", "html"):
        assert again.render(format) == report.render(format)
    assert str(again.compiled) == str(report.compiled)
    assert str(again.speed_up()) == str(report.speed_up())
    assert again.rows("kernel") == report.rows("kernel")
    assert again.memory.timeline == report.memory.timeline


def test_a_report_can_be_read_in_another_process(tmp_path):
    report = step().report()
    path = tmp_path / "report.pickle"
    path.write_bytes(pickle.dumps(report))
    program = f"import pickle, pathlib; print(pickle.loads(pathlib.Path({str(path)!r}).read_bytes()).compiled)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown == f"{report.compiled}\n"


def test_a_shell_shows_a_report_and_what_it_is_made_of_in_one_line():
    meter = step()
    report = meter.report()
    assert repr(report).startswith("<Report: TransformerEncoderLayer, forward + backward + optimizer · NVIDIA A100")
    for shown in (repr(report), repr(meter.trace), repr(report.memory)):
        assert "\n" not in shown
        assert len(shown) < 200


def test_a_record_of_memory_is_one_short_line_in_a_shell():
    memory = step().report().memory
    assert repr(memory) == f"Memory(steps={memory.steps})"
