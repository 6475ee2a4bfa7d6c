"""What lies on the device beside a step, and is no data: averages of weights, weights kept for later, momentum."""

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware

H100 = load_hardware("h100-sxm5-80gb")
WEIGHTS_BYTES = 4 * (256 * 512 + 512 * 128)


def lerp(mean, weight):
    mean.lerp_(weight, 0.1)


def mul_and_add(mean, weight):
    mean.mul_(0.9).add_(weight, alpha=0.1)


def by_difference(mean, weight):
    mean.sub_(0.1 * (mean - weight))


def copied(mean, weight):
    mean.copy_(0.9 * mean + 0.1 * weight.float())


def for_each(means, weights):
    torch._foreach_mul_(means, 0.9)
    torch._foreach_add_(means, weights, alpha=0.1)


def one_by_one(update):
    def all_of_them(means, weights):
        for mean, weight in zip(means, weights, strict=True):
            update(mean, weight)

    return all_of_them


def model_and_data():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 128, bias=False))
        return model, torch.empty(512, 256)


@pytest.mark.parametrize("update", [*map(one_by_one, (lerp, mul_and_add, by_difference, copied)), for_each])
def test_an_average_of_weights_in_a_list_is_a_copy_of_weights_and_no_input(update):
    model, x = model_and_data()
    average = [torch.empty_like(weight, requires_grad=False) for weight in model.parameters()]
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
        with torch.no_grad():
            update(average, list(model.parameters()))
    report = meter.report()
    assert report.memory.at_peak["copies of weights"] == WEIGHTS_BYTES
    assert report.memory.at_peak["inputs"] == 4 * 512 * 256
    assert report.ran.inputs == ("float32 [512, 256]",)


def test_weights_that_were_kept_before_a_step_are_copies_of_weights_in_it_although_nothing_touches_them():
    """As the best weights so far, or an average that only every tenth step updates."""
    model, x = model_and_data()
    with FlopMeter(H100) as meter:
        kept = [weight.detach().clone() for weight in model.parameters()]
        before = len(meter.trace.ops)
        model(x).sum().backward()
        report = meter.report(ops=range(before, len(meter.trace.ops)))
    del kept
    assert report.memory.at_peak["copies of weights"] == WEIGHTS_BYTES
    assert report.memory.at_peak["inputs"] == 4 * 512 * 256


def test_what_a_layer_computed_from_its_weights_once_and_keeps_is_a_copy_of_weights():
    """As a table of codes whose entries are sums over counts: no later step reads the sums."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.sums, self.counts, self.kept = nn.Parameter(torch.empty(256, 64)), nn.Parameter(torch.empty(256)), None

        def forward(self, ids):
            if self.kept is None:
                self.kept = self.sums / self.counts.clamp(min=1)[:, None]
            return nn.functional.embedding(ids, self.kept)

    with torch.device("meta"):
        codes, ids = Codes(), torch.empty(8, dtype=torch.long)
    with FlopMeter(H100) as meter, torch.no_grad():
        codes(ids)
        before = len(meter.trace.ops)
        codes(ids)
        report = meter.report(ops=range(before, len(meter.trace.ops)))
    assert report.memory.at_peak["copies of weights"] == 4 * 256 * 64
    assert report.ran.inputs == ("int64 [8]",)


def test_weights_of_a_layer_that_came_to_the_device_and_never_runs_are_parameters():
    """As the head of a model of which a program calls the body alone."""
    body, head = nn.Linear(64, 64, bias=False), nn.Linear(64, 500, bias=False)
    with FlopMeter(H100) as meter, torch.no_grad():
        body.to("meta"), head.to("meta")
        before = len(meter.trace.ops)
        body(torch.empty(8, 64, device="meta"))
        report = meter.report(ops=range(before, len(meter.trace.ops)))
    assert report.memory.at_peak["parameters"] == 4 * (64 * 64 + 64 * 500)
    assert report.memory.at_peak["copies of weights"] == 0


def test_weights_that_are_cast_anew_in_each_step_are_no_copies_that_lie_beside_it():
    model, x = model_and_data()
    with FlopMeter(H100) as meter, torch.autocast("cuda", torch.bfloat16):
        model(x).sum().backward()
    assert meter.report().memory.at_peak["copies of weights"] == 0


def test_momentum_of_a_handwritten_optimizer_is_optimizer_state():
    model, x = model_and_data()
    momentum = [torch.empty_like(weight, requires_grad=False) for weight in model.parameters()]
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
        with torch.no_grad():
            for weight, kept in zip(model.parameters(), momentum, strict=True):
                kept.mul_(0.9).add_(weight.grad)
                weight.sub_(kept, alpha=0.1)
    at_peak = meter.report().memory.at_peak
    assert (at_peak["optimizer state"], at_peak["copies of weights"]) == (WEIGHTS_BYTES, 0)


def test_an_average_that_is_updated_apart_from_the_step_is_a_copy_of_weights():
    """What no other op reads is known by the weights alone, each of another shape."""
    model, _ = model_and_data()
    average = [torch.empty_like(weight, requires_grad=False) for weight in model.parameters()]
    with FlopMeter(H100) as meter, torch.no_grad():
        one_by_one(lerp)(average, list(model.parameters()))
    at_peak = meter.report().memory.at_peak
    assert (at_peak["copies of weights"], at_peak["parameters"]) == (WEIGHTS_BYTES, WEIGHTS_BYTES)


@pytest.mark.parametrize("source", ["the host", "another buffer", "what a layer computed"])
def test_a_buffer_of_data_that_has_the_shape_of_a_weight_stays_an_input(source):
    """As that of a program which captured a CUDA graph, and copies each batch into it."""
    with torch.device("meta"):
        layer, buffer, other = nn.Linear(256, 256, bias=False), torch.empty(256, 256), torch.empty(256, 256)
    with FlopMeter(H100) as meter, torch.no_grad():
        made = layer(buffer)
        sources = {"the host": torch.empty(256, 256), "another buffer": other, "what a layer computed": made}
        buffer.copy_(sources[source])
    at_peak = meter.report().memory.at_peak
    assert at_peak["copies of weights"] == 0
    assert at_peak["inputs"] >= 4 * 256 * 256


def test_a_mask_of_the_weights_is_no_copy_of_them():
    """Pruning reads it, and writes the weights."""
    with torch.device("meta"):
        layer, mask, x = nn.Linear(256, 256, bias=False), torch.empty(256, 256), torch.empty(8, 256)
    with FlopMeter(H100) as meter, torch.no_grad():
        layer.weight.mul_(mask)
        layer(x)
    assert meter.report().memory.at_peak["inputs"] == 4 * (256 * 256 + 8 * 256)


def test_a_buffer_to_which_gradients_are_copied_holds_gradients():
    """As a bucket of DDP's, from which one message sends them."""
    model, x = model_and_data()
    bucket = torch.empty(WEIGHTS_BYTES // 4, device="meta")
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
        start = 0
        for weight in model.parameters():
            torch.mul(weight.grad, 0.25, out=bucket[start : start + weight.numel()].view_as(weight))
            start += weight.numel()
    timeline = meter.report().memory.timeline
    assert (timeline["gradients"][-1], timeline["optimizer state"][-1]) == (2 * WEIGHTS_BYTES, 0)
