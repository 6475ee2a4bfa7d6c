"""Layers that are alike, as `plan` and `serve` see them."""

import pytest
import torch
from torch import nn

from flopmeter.ask.alike import likenesses, list_of_layers
from flopmeter.ask.plan.subject import subject_of


class Layer(nn.Module):
    def __init__(self, place, width=8, window=None, rate=0.0):
        super().__init__()
        self.place, self.window, self.rate = place, window, rate
        self.product = nn.Linear(8, width, bias=False)

    def forward(self, x):
        return x + self.product(x)[..., :8]


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(layers)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_differ_in_an_attribute_are_of_two_kinds_for_plan():
    """Every second one has a window. Their parameters are the same, which is all that plan looked at before."""
    subject = subject_of(lambda: Model([Layer(place, window=(None, 4)[place % 2]) for place in range(6)]))
    assert subject.kinds == (0, 1, 0, 1, 0, 1)


def test_neither_their_numbers_nor_rates_make_layers_differ():
    alike = likenesses([Layer(place, rate=place / 10) for place in range(4)])
    assert len(set(alike)) == 1


@pytest.mark.parametrize("of_each", [(False, True), ("full", "window"), (8, 4), (None, 4), (True, False, True)])
def test_a_switch_a_name_and_a_size_make_layers_differ(of_each):
    """The first two are also False, which is 0 to Python, and True, which is 1: they are no numbers of layers."""
    alike = likenesses([Layer(place, window=each) for place, each in enumerate(of_each)])
    assert [alike.index(each) for each in alike] == [of_each.index(each) for each in of_each]


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_layers", "n_layers", "n_layer"])
def test_a_layer_is_like_that_of_a_deeper_model_which_tells_its_depth(name):
    shallow, deep = Layer(0), Layer(0)
    setattr(shallow, name, 4)
    setattr(deep, name, 8)
    assert likenesses([shallow]) == likenesses([deep])


def test_widths_and_frozen_parameters_make_layers_differ():
    layers = [Layer(0), Layer(1, width=16), Layer(2), Layer(3)]
    layers[3].requires_grad_(False)
    alike = likenesses(layers)
    assert alike[0] == alike[2]
    assert len(set(alike)) == 3


def test_the_layers_are_the_list_with_the_most_parameters():
    model = Model([Layer(place) for place in range(3)])
    model.few = nn.ModuleList([nn.Linear(2, 2)])
    assert list_of_layers(model) == "layers"
    assert list_of_layers(torch.nn.Linear(2, 2)) is None
