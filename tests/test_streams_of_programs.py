"""Whole small programs on the device named cuda: the ops of torch on the CPU, in their order, shapes and types.

What such programs do between Python, torch.func, optimizers and autograd is the same on both devices. Where CUDA runs
ops of its own (fused attention, cuDNN) is no part of these programs; test_as_cuda.py has recordings of those.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import flopmeter

Described = tuple[str, tuple[Any, ...], tuple[Any, ...]]
LEFT_OUT = {"lift_fresh", "detach", "to", "_to_copy"}  # ops that launch nothing, and copies from and to the host


def gan(device: str) -> None:
    """With a penalty on the critic's gradient, which is differentiated again."""
    made = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 4)).to(device)
    critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.Adam(critic.parameters(), foreach=False)
    real, fake = torch.randn(6, 4, device=device), made(torch.randn(6, 8, device=device))
    between = torch.lerp(real, fake.detach(), torch.rand(6, 1, device=device)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    (critic(fake).mean() - critic(real).mean() + (gradient.norm(2, 1) - 1).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def policy(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), foreach=False)
    states, gained = torch.randn(10, 4, device=device), torch.randn(10, device=device)
    with torch.no_grad():
        before = torch.distributions.Categorical(logits=model(states))
        actions = before.sample()
    gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    now = torch.distributions.Categorical(logits=model(states))
    ratio = (now.log_prob(actions) - before.log_prob(actions)).exp()
    (-torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean() - 0.01 * now.entropy().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()


def graph(device: str) -> None:
    layer, nodes = nn.Linear(8, 8).to(device), torch.randn(6, 8, device=device)
    start, end = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]], device=device)
    sent = layer(nodes)[start]
    degree = torch.bincount(end, minlength=6).clamp(min=1)[:, None]
    mean = torch.zeros_like(nodes).index_add_(0, end, sent) / degree
    largest = torch.zeros_like(nodes).scatter_reduce(0, end[:, None].expand(-1, 8), sent, "amax")
    (mean.relu() + largest).sum().backward()


def variational(device: str) -> None:
    encoder, decoder = nn.Linear(8, 8).to(device), nn.Linear(4, 8).to(device)
    inputs = torch.rand(5, 8, device=device)
    mean, logvar = encoder(inputs).chunk(2, 1)
    code = mean + torch.randn_like(mean) * (logvar / 2).exp()
    error = F.binary_cross_entropy_with_logits(decoder(code), inputs, reduction="sum")
    (error - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()).backward()


def each_sample(device: str) -> None:
    model, inputs = nn.Linear(8, 4).to(device), torch.randn(5, 8, device=device)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (inputs,)).square().sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, inputs)
    torch.func.hessian(lambda inputs: loss(weights, inputs))(inputs[0])


def classifier(device: str) -> None:
    model = nn.Linear(8, 3).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), foreach=False)
    for inputs, labels in DataLoader(TensorDataset(torch.randn(12, 8), torch.arange(12) % 3), 4):
        outputs, truth = model(inputs.to(device)), labels.to(device)
        F.cross_entropy(outputs, truth, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        (outputs.argmax(1) == truth).float().mean().item()


def averaged(device: str) -> None:
    model = nn.Linear(8, 4).to(device)
    mean = deepcopy(model)
    nn.utils.parametrizations.weight_norm(mean)
    with torch.autocast(device, torch.bfloat16):
        outputs = mean(torch.randn(5, 8, device=device)).float()
    outputs.sum().backward()
    with torch.no_grad():
        for kept, weight in zip(mean.parameters(), model.parameters(), strict=False):
            kept.mul_(0.9).add_(weight.norm(), alpha=0.1)


class Stream(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Described] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        learns_shapes = any(each.is_meta for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if name not in LEFT_OUT and not learns_shapes:  # forward-mode gradients of the host ask meta tensors
            self.ops.append((name, _described((args, kwargs)), _described(results)))
        return results


def _described(tree: Any) -> tuple[Any, ...]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return tuple((tuple(each.shape), each.stride(), each.dtype) for each in tensors)


@pytest.mark.parametrize("program", [gan, policy, graph, variational, each_sample, classifier, averaged])
def test_a_program_on_the_device_named_cuda_runs_the_ops_of_the_host(program: Callable[[str], None]) -> None:
    with Stream() as host:
        program("cpu")
    with flopmeter.cuda("h100-sxm5-80gb"), Stream() as named_cuda:
        program("cuda")
    assert named_cuda.ops == host.ops
    assert len(host.ops) > 10
