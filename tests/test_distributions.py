"""Samples of torch.distributions, which reinforcement learning and variational models draw on the device."""

import pytest
import torch
from torch import distributions as d

from flopmeter import FlopMeter

MADE = {
    "Beta": lambda one: d.Beta(one, one),
    "Dirichlet": lambda one: d.Dirichlet(one),
    "Gamma": lambda one: d.Gamma(one, one),
    "Binomial": lambda one: d.Binomial(10 * one, probs=one / 2),
    "Normal": lambda one: d.Normal(one, one),
    "Categorical": lambda one: d.Categorical(logits=one),
}


@pytest.mark.parametrize("name", MADE)
def test_samples_have_the_shape_and_the_gradients_that_they_have_on_the_cpu(name):
    def sample(one):
        made = MADE[name](one)
        return (made.rsample if made.has_rsample else made.sample)((7,))

    with FlopMeter("h100-sxm5-80gb", checks="hold"):
        one = torch.ones(3, device="meta", requires_grad=True)
        got = sample(one)
        if got.requires_grad:
            got.sum().backward()
    expected = sample(torch.ones(3, requires_grad=True))
    assert (got.shape, got.dtype, got.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    assert (one.grad is not None) == got.requires_grad
