"""TorchScript made from a model on the device named cuda: traced, scripted, saved and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flopmeter

A100 = "a100-sxm4-80gb"
MACS = 8 * 32 * 32 * 4 * (3 * 3 * 3) + 8 * 4 * 10  # of the convolution and the head below, for 8 images


class Net(nn.Module):
    """It asks for sizes, and with `offset` makes a tensor, on the device that its trace remembers."""

    def __init__(self, offset: bool = True) -> None:
        super().__init__()
        self.offset = offset
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.features(images)
        pooled = maps.view(maps.shape[0], maps.shape[1], -1).mean(-1)
        scores = self.head(pooled)
        return scores + torch.arange(10, device=images.device) if self.offset else scores


def traced(file, model):
    return torch.jit.trace(model, torch.zeros(1, 3, 32, 32, device="cuda"))


def frozen(file, model):
    return torch.jit.optimize_for_inference(torch.jit.freeze(traced(file, model)))


def saved_and_loaded(file, model):
    torch.jit.save(traced(file, model), file)
    return torch.jit.load(file, map_location="cuda")


def from_the_cpu(file, model):
    torch.jit.trace(Net(offset=False).eval(), torch.zeros(1, 3, 32, 32)).save(file)
    return torch.jit.load(file).cuda()


def onto_cuda(file, model):
    torch.jit.trace(Net(offset=False).eval(), torch.zeros(1, 3, 32, 32)).save(file)
    return torch.jit.load(file, map_location=torch.device("cuda:0"))


@pytest.mark.parametrize("make", [traced, frozen, saved_and_loaded, from_the_cpu, onto_cuda])
def test_a_traced_model_runs_the_products_of_the_model(make, tmp_path):
    with flopmeter.cuda(A100, steps=3) as device, torch.no_grad():
        script = make(str(tmp_path / "model.pt"), Net().eval().to(device))
        for _ in range(40):
            out = script(torch.zeros(8, 3, 32, 32, device=device))
            assert out.is_cuda
            assert out.shape == (8, 10)
    report = device.report()
    assert report.step.macs == MACS
    assert "the last of 40" in report.headline  # the trace itself is no call
    assert ("not folded" in str(report.step.notes)) == (make is frozen)


def test_a_traced_model_trains():
    with flopmeter.cuda(A100, steps=3) as device:
        model = traced("", Net().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(8, 3, 32, 32, device=device)).sum().backward()
            optimizer.step()
    convolution = 8 * 32 * 32 * 4 * (3 * 3 * 3)
    assert device.report().step.macs == 2 * convolution + 3 * 8 * 4 * 10  # images have no gradient


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_scripted_recurrent_layer_moves_with_all_of_its_weights(kind):
    """On a GPU `.cuda()` changes what is inside of its parameters, which its list of weights holds too."""
    with flopmeter.cuda(A100, steps=1) as device:
        model = torch.jit.script(Recurrent(kind)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(4, 10, 8, device=device)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    forward = 4 * 10 * gates * 16 * (8 + 16)
    assert device.report().step.macs == 3 * forward  # cuDNN computes the gradient of x in any case


def test_a_model_on_the_cpu_is_traced_as_without_a_run():
    with flopmeter.cuda(A100):
        torch.zeros(1, device="cuda")
        model = torch.jit.freeze(torch.jit.trace(Net().eval(), torch.zeros(1, 3, 32, 32)))
        assert model(torch.zeros(2, 3, 32, 32)).device.type == "cpu"


def test_a_device_of_torch_cuda_is_a_type():
    with flopmeter.cuda(A100):
        assert isinstance(torch.cuda.device(0), torch.cuda.device)
        assert not isinstance(0, torch.cuda.device)


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


def test_a_script_that_asks_for_torchscripts_older_executor_runs_the_ops_of_its_functions():
    """Its fuser refuses meta tensors. Score-Entropy-Discrete-Diffusion switches it on so."""
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        torch._C._jit_set_profiling_mode(False)
        torch._C._jit_set_profiling_executor(False)
        torch._C._jit_override_can_fuse_on_cpu(True)
        torch._C._jit_override_can_fuse_on_gpu(True)
        scripted = torch.jit.script(modulated)
        x, shift, scale = (torch.ones(4, rows, 8, device="cuda", requires_grad=True) for rows in (16, 1, 1))
        for _ in range(3):
            scripted(x, shift, scale).sum().backward()
    torch._C._jit_override_can_fuse_on_cpu(False)
    torch._C._jit_override_can_fuse_on_gpu(False)
    report = device.report().step
    flops = {row.name: row.flops for row in report.rows("phase")}
    assert flops["forward"] == 4 * 8 + 3 * 4 * 16 * 8  # 1 + scale, a product, a sum and the sum of all
    assert any("TorchScript's older executor is left out" in note for note in report.notes)


class Held:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def place(self) -> torch.device:
        return self.x.device


def unwrapped(held: Held) -> torch.Tensor:
    return held.x


def test_a_scripted_class_tells_types_of_torch_by_which_it_was_annotated_in_the_run(monkeypatch):
    """What is imported in a run, as torchrec's classes are, is annotated with their stand-ins."""
    with flopmeter.cuda(A100):
        monkeypatch.setattr(Held.place, "__annotations__", {"return": torch.device})
        assert str(torch.jit.script(unwrapped).schema.returns[0].type) == "Tensor"


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0])


def shifted(x: torch.Tensor) -> torch.Tensor:
    return shift(x) @ x


def test_a_scripted_function_calls_others_that_make_tensors():
    with flopmeter.cuda(A100):
        assert torch.equal(torch.jit.script(shifted)(torch.eye(2)), torch.eye(2) + 1)
