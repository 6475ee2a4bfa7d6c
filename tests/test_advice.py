"""Where to win: the first advice names a program's fault, and wins what the mended program does."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from faults import FAULTS, H100, HALF, Attention
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flopmeter
from flopmeter import FlopMeter, HardwareError, StreamError, available_hardware, on_meta
from flopmeter.distributed import world
from flopmeter.models import BUILTINS, training_step
from flopmeter.models.gpt2 import GPT2, GPT2Config
from flopmeter.report.quantities import duration
from flopmeter.report.wins import LEAST_GAIN


@pytest.fixture(scope="module", params=FAULTS, ids=str)
def fault(request):
    fault = FAULTS[request.param]
    return fault, fault.report(is_mended=False)


def test_the_first_advice_names_the_fault_and_wins_what_the_mended_program_does(fault):
    fault, report = fault
    first = report.advice[0]
    assert first.remedy.startswith(fault.remedy)
    assert first.is_fault
    mended = fault.report(is_mended=True).seconds / fault.times
    assert first.gain_seconds == pytest.approx(report.seconds - mended, rel=0.05)
    assert first.run_seconds_then == pytest.approx(report.seconds - first.gain_seconds)


def test_each_advice_is_above_its_floor_and_worth_its_trouble(fault):
    _, report = fault
    for each in report.advice:
        assert 0 <= each.floor_seconds <= each.seconds_then < each.seconds_now <= report.seconds * (1 + 1e-9)
        assert each.gain_seconds >= LEAST_GAIN * report.seconds
        assert each.what
        assert each.where
        assert each.why


def test_a_report_of_a_later_step_has_no_advice_on_what_only_the_first_one_did():
    """The first steps of an optimizer and schedule that are compiled copy numbers, which later ones do not."""
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]), torch.empty(32, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = torch.compile(lambda: (optimizer.step(), scheduler.step()))
    with FlopMeter(H100) as meter:
        for _ in range(4):
            first = len(meter.trace.ops)
            model(x).square().mean().backward()
            step()
            optimizer.zero_grad()
    advice = meter.report(ops=range(first, len(meter.trace.ops))).advice
    assert advice
    assert not any("clone" in each.remedy for each in advice)


@pytest.mark.parametrize("device", ["b200-sxm-180gb", "mi300x"])
@pytest.mark.parametrize("name", ["eager attention", "recompute without need", "fp32 by accident"])
def test_the_gain_is_that_of_the_mended_program_on_devices_that_outrun_the_host(name, device):
    """Views and module calls count there: the host is as slow as the device."""
    fault = FAULTS[name]._replace(hardware=device)
    before, mended = (fault.report(is_mended=is_mended) for is_mended in (False, True))
    assert before.advice[0].remedy.startswith(fault.remedy)
    assert before.advice[0].gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.03)


def test_a_graph_of_compiled_kernels_is_told_where_it_is_faster_than_one_of_eager_kernels():
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, device="meta", dtype=HALF)
    model = nn.TransformerEncoder(layer, 4)
    with FlopMeter(H100) as meter:
        model(torch.empty(32, 197, 384, device="meta", dtype=HALF)).sum().backward()
    seconds = {mode: meter.report(mode=mode).seconds for mode in ("compiled", "cudagraph", "eager-cudagraph")}
    assert seconds["cudagraph"] < 0.97 * min(seconds["compiled"], seconds["eager-cudagraph"])
    told = [each for each in meter.report().advice if "reduce-overhead" in each.remedy]
    assert [each.run_seconds_then for each in told] == [seconds["cudagraph"]]


@pytest.mark.parametrize("device", ["rtx-3090", "v100-sxm2-32gb"])
def test_channels_last_is_told_of_fp32_convolutions_where_they_run_in_tf32_on_matrix_units(device):
    def report(is_mended):
        model, (x,) = BUILTINS["resnet-50"](batch=64, dtype=torch.float32)
        if is_mended:
            model = model.to(memory_format=torch.channels_last)
        with FlopMeter(device) as meter, torch.no_grad():
            model.eval()(x.to(memory_format=torch.channels_last) if is_mended else x)
        return meter.report()

    before, mended = report(is_mended=False), report(is_mended=True)
    told = [each.gain_seconds for each in before.advice if "channels_last" in each.remedy]
    has_matrix_units_for_it = device == "rtx-3090"  # V100's are for fp16 alone
    assert len(told) == has_matrix_units_for_it
    assert told == pytest.approx([before.seconds - mended.seconds] * len(told), rel=0.05)


@pytest.mark.parametrize(("device", "is_told"), [("t4", False), ("h100-sxm5-80gb", True)])
def test_channels_last_is_priced_with_the_copies_of_instance_norms(device, is_told):
    """They take images in NCHW and hand them on so: a copy before each, and one in the convolution that follows."""

    def report(is_mended):
        with torch.device("meta"):
            first = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.InstanceNorm2d(64, affine=True), nn.ReLU()]
            last = [nn.Conv2d(64, 256, 3, bias=False), nn.Conv2d(256, 64, 3, bias=False), nn.ReLU()]
            model = nn.Sequential(*first, *last).to(HALF)
            x = torch.empty(64, 64, 128, 128, dtype=HALF)
        layout = torch.channels_last if is_mended else torch.contiguous_format
        model = model.to(memory_format=layout)
        with FlopMeter(device) as meter:
            model(x.to(memory_format=layout)).sum().backward()
        return meter.report()

    before, mended = report(is_mended=False), report(is_mended=True)
    told = [each.gain_seconds for each in before.advice if "channels_last" in each.remedy]
    assert (before.seconds - mended.seconds > 0.03 * before.seconds) == is_told
    assert told == pytest.approx([before.seconds - mended.seconds] * is_told, rel=0.05)


def test_channels_last_converts_gradients_of_single_channels_once_they_are_added_up():
    """A Dice loss takes each class on its own: its gradient is an NCHW image of zeros around that class, whichever way
    the scores lie. Eight of them are added as they are, and the softmax's gradient reads the sum."""

    def report(is_mended):
        layout = torch.channels_last if is_mended else torch.contiguous_format
        with torch.device("meta"):
            layers = [nn.Conv2d(64, 256, 3), nn.Conv2d(256, 64, 3), nn.Conv2d(64, 8, 1)]
            model = nn.Sequential(*layers).to(HALF).to(memory_format=layout)
            x = torch.empty(32, 64, 128, 128, dtype=HALF)
        with FlopMeter("h100-sxm5-80gb") as meter:
            shares = model(x.to(memory_format=layout)).softmax(1)
            torch.stack([shares[:, channel].square().sum() for channel in range(8)]).sum().backward()
        return meter.report()

    before, mended = report(is_mended=False), report(is_mended=True)
    (told,) = (each.gain_seconds for each in before.advice if "channels_last" in each.remedy)
    assert told == pytest.approx(before.seconds - mended.seconds, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_program_of_ranks_is_told_what_one_gpu_is(ranks):
    """DDP's reductions run on a stream of their own. With one rank they are nothing, and any advice may be given."""

    def report(is_mended):
        with world(ranks):
            with torch.device("meta"):
                model = DistributedDataParallel(
                    nn.Sequential(*(Attention(1024, 16, is_mended) for _ in range(2))).to(HALF)
                )
                x = torch.empty(8, 1024, 1024, dtype=HALF)
            model(x).sum().backward()  # the first step makes its buckets anew
            with FlopMeter(H100) as meter:
                model(x).sum().backward()
        return meter.report()

    before, mended = report(is_mended=False), report(is_mended=True)
    first = before.advice[0]
    assert first.remedy.startswith("F.scaled_dot_product_attention")
    assert first.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.03)
    (compiled,) = (each for each in before.advice if each.remedy == "torch.compile")
    assert compiled.gain_seconds == pytest.approx(before.seconds - before.in_mode("compiled").seconds)
    assert ("collectives stay where they are" in compiled.why) == (ranks > 1)


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_that_are_summed_for_each_of_several_batches_are_told_to_be_summed_once(as_view):
    """Four batches to a step of the optimizer. Kept in the buckets or beside them."""

    def report(is_mended):
        with world(8):
            with torch.device("meta"):
                layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).to(HALF)
                x = torch.empty(256, 4096, dtype=HALF)
            model = DistributedDataParallel(layers, gradient_as_bucket_view=as_view)
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

            def step():
                for batch in range(4):
                    with model.no_sync() if is_mended and batch < 3 else nullcontext():
                        model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(3):  # the first ones make its buckets anew
                step()
            with FlopMeter(H100) as meter:
                step()
        return meter.report()

    before, mended = report(is_mended=False), report(is_mended=True)
    first = before.advice[0]
    assert first.remedy.startswith("DistributedDataParallel's no_sync()")
    assert first.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.05)
    assert not any("no_sync" in each.remedy for each in mended.advice)


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "b200-sxm-180gb"])
@pytest.mark.parametrize("name", ["GPT2LMHead", "LlamaForCausal"])
def test_attention_of_transformers_wins_what_its_own_sdpa_does(name, device):
    """With dropout, masks that are made of places for each sequence, and grouped heads in fp32 softmaxes."""
    transformers = pytest.importorskip("transformers")

    def report(implementation):
        sizes = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 512, "num_hidden_layers": 2}
        config = getattr(transformers, name.removesuffix("LMHead").removesuffix("ForCausal") + "Config")(
            **sizes, attn_implementation=implementation, **({"num_key_value_heads": 2} if "Llama" in name else {})
        )
        with torch.device("meta"):
            model = getattr(transformers, f"{name}Model" if "GPT2" in name else f"{name}LM")(config).to(HALF)
            tokens = torch.empty(8, 1024, dtype=torch.long)
        with FlopMeter(device, checks="hold") as meter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        return meter.report()

    eager, fused = report("eager"), report("sdpa")
    (advice,) = (each for each in eager.advice if each.remedy.startswith("F.scaled_dot_product_attention"))
    assert advice.gain_seconds == pytest.approx(eager.seconds - fused.seconds, rel=0.05)


@pytest.mark.parametrize("device", [H100, "a100-sxm4-80gb"])
def test_a_softmax_that_is_written_out_is_found_in_attention(device):
    def softmax(scores):
        powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
        return powers / powers.sum(-1, keepdim=True)

    def report(attend):
        with torch.device("meta"):
            mix = nn.Linear(1024, 3072, dtype=HALF)
            x = torch.empty(8, 1024, 1024, dtype=HALF, requires_grad=True)
        with FlopMeter(device) as meter:
            q, k, v = (part.unflatten(-1, (16, 64)).transpose(1, 2) for part in mix(x).chunk(3, -1))
            attend(q, k, v).transpose(1, 2).reshape(x.shape).sum().backward()
        return meter.report()

    before = report(lambda q, k, v: softmax(q @ k.transpose(-2, -1) / 8) @ v)
    mended = report(nn.functional.scaled_dot_product_attention)
    first = before.advice[0]
    assert first.remedy.startswith("F.scaled_dot_product_attention")
    assert first.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.01)


def t5(transformers, implementation):
    """A trained bias by position, which the decoder adds a causal mask to; dropout; keys that a cache has copied."""
    config = transformers.T5Config(
        d_model=1024, d_ff=4096, num_layers=2, num_heads=16, vocab_size=512, decoder_start_token_id=0, pad_token_id=0,
        attn_implementation=implementation,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {}


def padded_bert(transformers, implementation):
    """A mask of padding for each sequence."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2, "vocab_size": 512}
    mask = torch.ones(8, 512, dtype=torch.long, device="cpu")
    mask[:, 400:] = 0
    config = transformers.BertConfig(**sizes, attn_implementation=implementation)
    return transformers.BertForMaskedLM(config), {"attention_mask": on_meta(mask)}


@pytest.mark.parametrize("build", [t5, padded_bert])
def test_what_is_added_to_scores_goes_to_the_kernel_that_takes_it(build):
    """T5's own mask for eager attention is as large as the scores, and told is the kernel that reads it; for SDPA it
    makes one that all sequences share, which wins a little more."""
    transformers = pytest.importorskip("transformers")

    def report(implementation):
        with torch.device("meta"):
            model, inputs = build(transformers, implementation)
            tokens = torch.empty(8, 512, dtype=torch.long)
        model.to(HALF)
        with FlopMeter("a100-sxm4-80gb", checks="hold") as meter:
            model(input_ids=tokens, labels=tokens, **inputs).loss.backward()
        return meter.report()

    eager, fused = report("eager"), report("sdpa")
    (advice,) = (each for each in eager.advice if each.remedy.startswith("F.scaled_dot_product_attention"))
    assert advice.gain_seconds == pytest.approx(eager.seconds - fused.seconds, rel=0.06)


def test_a_fused_optimizer_wins_in_the_first_step_what_it_wins_in_others():
    """The first step also makes the states, which a fused optimizer does too."""

    def gain(is_first):
        with FlopMeter(H100):
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to("meta")
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(1 if is_first else 2):
            with FlopMeter(H100) as meter:
                model(torch.empty(64, 512, device="meta")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        (fused,) = (each for each in meter.report().advice if "fused=True" in each.remedy)
        return fused.gain_seconds

    assert gain(is_first=True) == pytest.approx(gain(is_first=False), rel=0.1)


@pytest.mark.parametrize(("kind", "has_it"), [("Adam", True), ("Muon", False), ("NAdam", False), ("RMSprop", False)])
def test_fused_is_told_only_of_optimizers_that_have_it(kind, has_it):
    """RMSprop that centers keeps two states a weight, as Adam does; Muon one, as SGD with momentum."""
    options = {"centered": True} if kind == "RMSprop" else {}
    weights = [nn.Parameter(torch.empty(256, 256, device="meta")) for _ in range(16)]
    optimizer = getattr(torch.optim, kind)(weights, lr=1e-3, **options)
    for _ in range(2):
        with FlopMeter(H100) as meter:
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer.step()
    assert any("fused=True" in each.remedy for each in meter.report().advice) == has_it


def test_of_two_optimizers_the_one_that_has_fused_is_told_so():
    """One after the other, they are one stretch of ops."""
    weights = [nn.Parameter(torch.empty(256, 256, device="meta")) for _ in range(32)]
    muon, adam = torch.optim.Muon(weights[:1], lr=1e-3), torch.optim.Adam(weights[1:])
    reports = []
    for optimizers in ((muon, adam), (adam,)):
        for _ in range(2):
            with FlopMeter(H100) as meter:
                for weight in weights:
                    weight.grad = torch.empty_like(weight)
                for optimizer in optimizers:
                    optimizer.step()
        reports.append(meter.report())
    both, alone = ([each for each in report.advice if "fused=True" in each.remedy] for report in reports)
    assert both[0].gain_seconds == pytest.approx(alone[0].gain_seconds, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_a_first_step_says_what_a_later_one_takes(options):
    """The second step is metered as well: the optimizer's states are there then."""
    model, inputs = BUILTINS["bert-base"](batch=2, seq=128)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    reports = []
    for _ in range(2):
        with FlopMeter(H100) as meter:
            training_step(model, inputs, optimizer)
        reports.append(meter.report())
    first, second = reports
    assert first.later_step_seconds == pytest.approx(second.seconds, rel=0.01)
    assert (
        f"a first step, in which the optimizer makes its states; a later one takes {duration(second.seconds)}"
        in str(first)
    )
    assert "a first step" not in str(second)


def test_a_loop_over_heads_is_told_that_one_call_for_all_wins_more():
    with torch.device("meta"):
        q, k, v = (torch.empty(4, 512, 8, 64, dtype=HALF) for _ in range(3))

    def one_by_one():
        each = [F.softmax(q[:, :, h] @ k[:, :, h].mT, -1) @ v[:, :, h] for h in range(8)]
        return torch.cat(each, -1)

    def at_once():
        return F.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1) @ v.transpose(1, 2)

    for run, is_loop in ((one_by_one, True), (at_once, False)):
        with FlopMeter(H100) as meter:
            run()
        (advice,) = (each for each in meter.report().advice if "scaled_dot_product_attention" in each.remedy)
        assert ("heads run one by one" in advice.why) == is_loop


@pytest.mark.parametrize("device", ["l40s", "a100-sxm4-80gb"])
def test_fp64_is_told_first_and_wins_what_fp32_does(device):
    def report(dtype):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(dtype)
            x = torch.empty(4096, 1024, dtype=dtype)
        with FlopMeter(device) as meter:
            model(x).square().mean().backward()
        return meter.report()

    before, mended = report(torch.float64), report(torch.float32)
    first = before.advice[0]
    assert first.remedy.startswith("float32: model.to(torch.float32), and data made by NumPy too")
    assert first.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.01)


def test_sixteen_bits_are_told_also_where_they_win_bytes_alone():
    """A P100 has no matrix units."""
    reports = []
    for dtype in (torch.float32, torch.float16):
        model, inputs = BUILTINS["bert-base"](batch=8, dtype=dtype)
        with FlopMeter("p100-pcie-16gb") as meter, torch.no_grad():
            model(*inputs)
        reports.append(meter.report())
    before, mended = reports
    (advice,) = (each for each in before.advice if each.remedy.startswith("float16: model.to(torch.float16)"))
    assert advice.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.01)
    assert "matrix units" not in advice.why
    h100 = FAULTS["fp32 by accident"].report(is_mended=False).advice[0]
    assert "no matrix units for it" in h100.why


def test_the_mended_program_is_not_told_the_same_again(fault):
    fault, _ = fault
    assert not any(each.remedy.startswith(fault.remedy) for each in fault.report(is_mended=True).advice)


def test_the_hot_spots_share_the_wall_clock_among_them(fault):
    _, report = fault
    assert sum(spot.seconds_now for spot in report.hot_spots) == pytest.approx(report.seconds, rel=0.01)
    assert all(0 <= spot.floor_seconds <= spot.seconds_now for spot in report.hot_spots)


def test_text_page_and_json_show_the_same_advice_and_text_shows_it_within_its_first_ten_lines(fault):
    _, report = fault
    lines = report.render("text").splitlines()[:10]
    place = next(number for number, line in enumerate(lines) if line.startswith("where to win"))
    assert any(line.startswith("predicted ") for line in lines[:place])
    assert lines[place + 1].startswith(f"  1. {report.advice[0].remedy}: ")
    assert [each["remedy"] for each in json.loads(report.render("json"))["advice"]] == [
        each.remedy for each in report.advice
    ]
    assert "Where to win" in report.render("html")


def encoder_layer():
    return trained(*BUILTINS["encoder-layer"](batch=2, seq=128))


def language_model():
    with torch.device("meta"):
        model = GPT2(GPT2Config(layers=1, width=256, heads=4, vocabulary=50257)).to(HALF)
    return trained(model, (torch.empty(2, 128, dtype=torch.long, device="meta"),))


def images(dtype=HALF):
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3)).to(dtype)
        x = torch.empty(8, 3, 64, 64, dtype=dtype)
    return lambda: net(x).sum().backward()


def small_mlp():
    with torch.device("meta"):
        return trained(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), (torch.empty(256, 512),))


def recurrent():
    with torch.device("meta"):
        net, x = nn.LSTM(64, 128, 2), torch.empty(16, 4, 64)
    return lambda: net(x)


def attention_by_hand():
    with torch.device("meta"):
        model, x = Attention(256, 4, is_fused=False).to(HALF), torch.empty(2, 512, 256, dtype=HALF)
    return lambda: model(x).sum().backward()


def decoding():
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(HALF), torch.empty(1, 4096, dtype=HALF)
    return torch.no_grad()(lambda: model(x))


def checkpointed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(HALF)
        x = torch.empty(4096, 1024, dtype=HALF, requires_grad=True)
    return lambda: checkpoint(model, x, use_reentrant=False).sum().backward()


PROGRAMS = {
    "an encoder layer, training": encoder_layer,
    "a language model, training": language_model,
    "convolutions": images,
    "a small MLP in fp32, training": small_mlp,
    "a recurrent net": recurrent,
    "attention by hand": attention_by_hand,
    "decoding": decoding,
    "a checkpointed block": checkpointed,
    "one element-wise op": lambda: lambda: torch.ones(2**24, device="meta").sin(),
    "one product": lambda: lambda: torch.ones(4096, 4096, device="meta") @ torch.ones(4096, 4096, device="meta"),
}
FLOORS = (
    "near its floor, its FLOPs", "near its floor, its bytes", "near its floor, the launches",
    "near the floor of the kernels that there are, compute-bound",
    "near the floor of the kernels that there are, memory-bound",
)  # fmt: skip


def trained(model, inputs):
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: training_step(model, inputs, optimizer)


def reports_on(run, devices):
    """Of the devices that can run it; metered again where a device would run other ops."""
    meters = []
    for device in devices:
        with suppress(HardwareError):  # it lacks a type of the program
            yield report_on(run, device, meters)


def report_on(run, device, meters):
    for meter in meters:
        with suppress(StreamError):
            return meter.report(hardware=device)
    with FlopMeter(device) as meter:
        run()
    report = meter.report()
    meters.append(meter)
    return report


def check_advice(report):
    """Each advice wins what another pricing of the same change says; where there is none, nothing was left out that the
    report could be asked for, and the report names the floor."""
    for each in report.advice:
        assert each.gain_seconds >= LEAST_GAIN * report.seconds, each
        assert each.run_seconds_then == pytest.approx(report.seconds - each.gain_seconds), each
        if each.remedy == "torch.compile":
            assert each.run_seconds_then == report.compiled.seconds
    (heading,) = (line for line in str(report).splitlines() if line.startswith(("where to win", "near ")))
    if report.advice:
        assert heading.startswith("where to win")
    else:
        assert heading.startswith(FLOORS)
        assert "no change that flopmeter can price wins 3 %" in heading
        assert report.compiled.seconds > (1 - LEAST_GAIN) * report.seconds


@pytest.mark.parametrize("place", range(len(PROGRAMS)), ids=list(PROGRAMS))
def test_no_advice_loses_and_no_win_is_left_out(place):
    """Each program on a tenth of the devices, so that each device has its turn."""
    run = list(PROGRAMS.values())[place]()
    reports = list(reports_on(run, available_hardware()[place :: len(PROGRAMS)]))
    assert len(reports) > 3
    for report in reports:
        check_advice(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_advice_loses_on_any_device(name):
    reports = list(reports_on(PROGRAMS[name](), available_hardware()))
    assert len(reports) > 40
    for report in reports:
        check_advice(report)


def test_a_program_near_its_floor_is_told_so_with_the_floor():
    x = torch.empty(2**28, dtype=torch.bfloat16, device="meta")
    with FlopMeter(H100) as meter:
        x.sin_()
    report = meter.report()
    assert report.advice == ()
    heading = "near its floor, its bytes at the datasheet's bandwidth: no change that flopmeter can price wins 3 %"
    assert heading in str(report)
    floor = 2 * 2 * 2**28 / 3.35e12  # read and written once, at the datasheet's bandwidth
    assert report.hot_spots[0].floor_seconds == pytest.approx(floor)


def test_a_floor_that_the_kernels_are_far_from_is_not_said_to_be_near():
    """A sum over rows of three columns: its bytes at 2,039 GB/s are its floor by hand."""
    with FlopMeter("a100-sxm4-80gb") as meter:
        torch.empty(2**26, 3, dtype=torch.bfloat16, device="meta").sum(0)
    report = meter.report()
    is_said = any(line.startswith("near its floor, its bytes") for line in str(report).splitlines())
    floor = 2 * 3 * 2**26 / 2.039e12
    assert is_said == (floor >= 0.7 * report.seconds)


@pytest.mark.parametrize("name", ["NCHW under AMP", "fp32 by accident"])
def test_what_has_a_remedy_is_not_listed_as_without_one(name):
    """Convolutions on NCHW images beside the advice to turn them, products in fp32 beside TF32."""
    report = FAULTS[name].report(is_mended=False)
    remedied = {place for advice in report.advice for place in advice.places}
    rest = str(report).partition("with no remedy of its own:")[2].partition("-bound · of the wall-clock")[0]
    listed = [line.partition(",")[0] for line in rest.splitlines() if line.startswith("   - ")]
    assert any(place.startswith(("cudnn_convolution", "convolution", "addmm")) for place in remedied)
    assert not any("convolution" in line or "addmm" in line for line in listed)


def test_a_captured_program_is_told_what_compiling_wins():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4096), nn.GELU(), nn.SiLU()) for _ in range(8))).to(HALF)
        x = torch.empty(8192, 4096, dtype=HALF)
    with FlopMeter(H100) as meter, torch.no_grad():
        model(x)
    first = meter.report(mode="eager-cudagraph").advice[0]
    assert first.remedy == "torch.compile(mode='reduce-overhead')"
    assert first.why == "each op's result goes to memory and back"
    assert first.run_seconds_then == meter.report(mode="cudagraph").seconds


@pytest.mark.parametrize("switch", ["matmul", "cudnn"])
def test_the_switch_that_keeps_products_from_tf32_is_named(switch):
    precision = torch.get_float32_matmul_precision()
    with torch.device("meta"):
        layer = nn.Conv2d(256, 256, 3) if switch == "cudnn" else nn.Linear(4096, 4096)
        x = torch.empty(32, 256, 64, 64) if switch == "cudnn" else torch.empty(8192, 4096)
    try:
        torch.set_float32_matmul_precision("high" if switch == "cudnn" else "highest")
        flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=switch != "cudnn")
        with flags, FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad():
            layer(x)
    finally:
        torch.set_float32_matmul_precision(precision)
    remedies = [each.remedy for each in meter.report().advice]
    named = {
        "matmul": "TF32: torch.set_float32_matmul_precision('high')",
        "cudnn": "TF32: torch.backends.cudnn.allow_tf32 = True",
    }
    assert named[switch] in remedies


def test_products_that_run_in_tf32_are_not_among_those_that_could():
    """torch lets cuDNN round to TF32 and cuBLAS not, unless a program says otherwise."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(256, 256, 3), nn.Flatten(2), nn.Linear(3844, 3844))
        x = torch.empty(32, 256, 64, 64)
    with FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad():
        model(x)
    report = meter.report()
    (advice,) = (each for each in report.advice if each.remedy.startswith("TF32"))
    (product,) = (
        timing.seconds
        for kernel, timing in zip(report.kernels, report.timings, strict=True)
        if kernel.cost.macs and "conv" not in kernel.cost.name
    )
    assert advice.seconds_now == pytest.approx(product)


def test_weights_beside_a_fourier_transform_are_not_told_to_be_bf16():
    """cuFFT has no bf16: model.to(torch.bfloat16) would end in an error. What is told, the mended program does."""
    with torch.device("meta"):
        layer, x = nn.Linear(4096, 4096), torch.empty(8192, 4096)

    def run(is_mended):
        with FlopMeter(H100) as meter, torch.no_grad():
            with torch.autocast("cuda", HALF, enabled=is_mended):
                y = layer(x)
            torch.fft.fft(y.float())
        return meter.report()

    report = run(is_mended=False)
    told = [each for each in report.advice if "bfloat16" in each.remedy]
    (advice,) = told
    assert advice.remedy.startswith("torch.autocast in bfloat16 around the products (_fft_")
    assert advice.run_seconds_then == pytest.approx(run(is_mended=True).seconds, rel=0.15)


def test_a_larger_batch_comes_after_faults():
    """It makes a dense gradient cheaper for each sample, which is no reason to keep it."""
    remedies = [each.remedy for each in FAULTS["dense gradient of a table"].report(is_mended=False).advice]
    batch = next(place for place, remedy in enumerate(remedies) if "times the batch" in remedy)
    assert remedies[0].startswith("Embedding(sparse=True)")
    assert batch > 0


ALIKE = ("of each sequence", "one query", "a table that products read", "parts of a table that products read",
         "mixed norms", "written to", "reshaped", "one-hot labels", "a second derivative", "fed back")  # fmt: skip


@pytest.mark.parametrize("mask", ALIKE)
def test_what_only_looks_like_a_fault_is_left_alone(mask):
    """A mask of padding; the decoding of one token; an embedding that is shared with the head, as parts of it are with
    an adaptive softmax; norms in fp32. A copy
    that is then written to, or without which a view is none; one-hot rows that a loss reads too; a backward pass
    through a backward pass; cells whose input is what they said before."""
    with torch.device("meta"):
        q, k, v = (torch.empty(8, 16, 512, 64, dtype=HALF) for _ in "qkv")
        padding = torch.empty(8, 1, 512, 512, dtype=HALF)
        table = nn.Embedding(50304, 512, dtype=HALF)
        norm = nn.LayerNorm(512, dtype=torch.float32)
        ids = torch.empty(4, 128, dtype=torch.long)
        x = torch.empty(4096, 512, dtype=HALF, requires_grad=True)
        cell = nn.GRUCell(512, 512, dtype=HALF)

    def one_hot():
        rows = F.one_hot(ids, 50304).to(HALF)
        return (rows @ table.weight).sum() + rows.sum()

    def fed_back():
        state = word = x
        for _ in range(8):
            state = cell(word, state)
            word = state.tanh()

    def adaptive_head():
        wide = nn.Embedding(50304, 512, device="meta")
        with torch.autocast("cuda", HALF):
            words = wide(ids)
            scores = words @ torch.cat((wide.weight[:10_000], wide.weight.new_zeros(2, 512))).T
            loss = scores.sum() + sum((words @ part.T).sum() for part in wide.weight[10_000:].split(20_152))
        loss.backward()

    programs = {
        "parts of a table that products read": adaptive_head,
        "written to": lambda: x.clone().add_(1).sum().backward(),
        "reshaped": lambda: q.transpose(1, 2).contiguous().view(8, 512, 1024) @ x[:1024],
        "one-hot labels": one_hot,
        "a second derivative": lambda: (
            torch.autograd.grad(norm(x.float()).square().sum(), x, create_graph=True)[0].square().sum().backward()
        ),
        "fed back": fed_back,
        "of each sequence": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=padding),
        "one query": lambda: F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=padding[:1, :, :1]),
        "a table that products read": lambda: (table(ids) @ table.weight.T).sum().backward(),
        "mixed norms": lambda: norm((table(ids) @ table.weight.T[:, :512]).float()).to(HALF),
    }
    with FlopMeter(H100) as meter:
        programs[mask]()
    names = ("is_causal=True", "Embedding(sparse", "bfloat16 there too", "zero_grad", "torch._foreach_",
             "no .contiguous", "nn.Embedding", "one backward()", "nn.GRU")  # fmt: skip
    assert not [each.remedy for each in meter.report().advice if each.remedy.startswith(names)]


def test_gradients_that_zero_grad_fills_are_told_to_be_left_out_and_not_to_be_filled_at_once():
    """The loop over them is torch's own, which a program cannot change."""
    with flopmeter.cuda(H100) as device:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    remedies = [each.remedy for each in device.report().step.advice]
    assert "zero_grad(set_to_none=True)" in remedies
    assert not [remedy for remedy in remedies if remedy.startswith("torch._foreach_")]


@pytest.mark.parametrize("batches", ["new ones", "the same", "checkpointed", "under one autocast", "all forward first"])
def test_gradients_of_several_batches_are_no_graph_that_is_walked_twice(batches):
    """Each batch has a graph of its own, though they share weights, an image of these in bf16, and the same input."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(3)))
        x = torch.empty(4096, 1024)

    def loss():
        y = x if batches == "the same" else torch.randn_like(x)
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False) if batches == "checkpointed" else layer(y)
        return y.float().square().mean()

    def step():
        with torch.autocast("cuda", HALF, enabled="autocast" in batches):
            losses = [loss() for _ in range(3)] if "forward" in batches or "autocast" in batches else []
        for number in range(3):
            (losses[number] if losses else loss()).backward()

    with FlopMeter(H100) as meter:
        step()
    assert not [each.remedy for each in meter.report().advice if each.remedy.startswith("one backward()")]


@pytest.mark.parametrize("is_held", [True, False])
def test_rows_that_are_held_in_the_end_are_not_taken_for_rows_that_nobody_reads(is_held):
    with torch.device("meta"):
        head, x = nn.Linear(2048, 50304, bias=False, dtype=HALF), torch.empty(4, 1024, 2048, dtype=HALF)
    with FlopMeter(H100) as meter, torch.no_grad():
        scores = head(x)
        scores[:, -1].argmax(-1)
        if not is_held:
            del scores
    told = any(each.remedy.startswith("take the rows") for each in meter.report().advice)
    assert told is not is_held


def test_a_layer_that_reads_what_it_said_last_is_not_told_to_take_the_whole_sequence():
    with torch.device("meta"):
        layer, x = nn.LSTM(256, 256, batch_first=True), torch.empty(64, 1, 256)

    def talk():
        out, state = x, None
        for _ in range(16):
            out, state = layer(out, state)

    with FlopMeter(H100) as meter, torch.no_grad():
        talk()
    assert not any("over the whole sequence" in each.remedy for each in meter.report().advice)


def test_a_tensor_that_grows_and_is_flattened_has_to_be_in_one_piece():
    """Who reads a part of a static cache so copies it."""
    with torch.device("meta"):
        x = torch.empty(64, 1, 262144, dtype=HALF)

    def grow(is_read: bool) -> None:
        held = x
        for _ in range(12):
            held = torch.cat([held, x], 1)
            if is_read:
                held.view(-1).view(torch.int16).flip(0)

    def is_told(is_read: bool) -> bool:
        with FlopMeter(H100) as meter, torch.no_grad():
            grow(is_read)
        return any("static cache" in each.remedy for each in meter.report().advice)

    assert not is_told(True)
    assert is_told(False)


def test_a_minor_fault_stands_by_what_it_wins():
    """An optimizer op by op wins less than a twentieth here, and torch.compile more than that. (A fault that wins more
    stands first whatever else wins: NCHW under AMP, above.)"""
    with torch.device("meta"):
        layers = (each for _ in range(6) for each in (nn.Linear(4096, 4096), nn.GELU(), nn.LayerNorm(4096)))
        net, x = nn.Sequential(*layers).to(HALF), torch.empty(24576, 4096, dtype=HALF)
    with FlopMeter(H100) as meter:
        trained(net, (x,))()
    first, second = meter.report().advice
    assert (first.is_fault, second.is_fault) == (False, True)
    assert second.gain_seconds < first.gain_seconds


def test_a_source_line_is_told_where_the_trace_has_it():
    with FlopMeter(H100, source=True) as meter:
        FAULTS["eager attention"].program(False)()
    assert "faults.py:" in meter.report().advice[0].where


def test_bf16_where_only_fp16_has_matrix_units_is_told_to_take_fp16():
    """SDPA has no kernel for bf16 there either: what it does op by op is no fault of the program."""

    def run(dtype):
        q = torch.empty(1, 8, 1024, 64, dtype=dtype, device="meta")
        weight = torch.empty(4096, 4096, dtype=dtype, device="meta")
        with FlopMeter("t4") as meter:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
            weight @ weight
        return meter.report()

    report = run(torch.bfloat16)
    assert report.advice[0].remedy == "float16: model.to(torch.float16)"
    assert not any("scaled_dot_product" in each.remedy for each in report.advice)
    products = [sum(timing.work_seconds for kernel, timing in zip(each.kernels, each.timings, strict=True)
                    if kernel.cost.name == "mm") for each in (report, run(torch.float16))]  # fmt: skip
    assert products[0] > 8 * products[1]


@pytest.mark.parametrize(("device", "is_told"), [("meta", True), ("cpu", False)])
def test_only_reading_a_value_of_the_device_is_said_to_stop_the_host(device, is_told):
    with FlopMeter(H100) as meter:
        x = torch.empty(64, 64, device="meta")
        numbers = torch.arange(64, device=device)
        for number in range(64):
            x = x.exp()
            numbers[number].item()
    assert any("keep the values on the device" in each.remedy for each in meter.report().advice) == is_told


def test_what_takes_no_time_behind_the_host_has_no_floor_of_nothing():
    """An optimizer whose time is hidden once it is one kernel."""
    with flopmeter.cuda(H100) as device:
        model = torch.nn.Linear(64, 64).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            optimizer.step()
    step = device.report().step
    first = step.advice[0]._replace(floor_seconds=0.0)
    step.__dict__["advice"] = [first]
    (line,) = (line for line in str(step).splitlines() if line.startswith("     ") and first.what in line)
    assert "floor of" not in line
    assert line.endswith(first.why)


@pytest.mark.parametrize(
    ("hardware", "rows", "remedy"), [(H100, 131_072, "bfloat16, which needs no"), ("t4", 8192, "fused=True")]
)
def test_where_grad_scaler_stops_the_host_the_advice_is_a_type_or_an_optimizer_that_needs_none(hardware, rows, remedy):
    """It reads one value a step, in torch's own code: no program can keep that on the device."""
    with flopmeter.cuda(hardware) as device:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(40))).to(device)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)  # many kernels to launch after the host stopped
        scaler = torch.amp.GradScaler("cuda")
        x = torch.zeros(rows, 512, device=device)
        for _ in range(3):
            with torch.autocast("cuda", torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (advice,) = (each for each in device.report().step.advice if "GradScaler" in each.why)
    assert advice.remedy.startswith((remedy, "the optimizer's " + remedy))
    assert "the host stops 1 time until GradScaler knows whether" in advice.why
    assert not any("keep the values" in each.remedy for each in device.report().step.advice)


class WrittenOutNorm(nn.Module):
    """As language models write their RMSNorm: in fp32, whatever the type of the activations."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_norms_that_are_written_out_in_fp32_and_losses_under_autocast_are_no_stray_casts(under_autocast):
    dtype = torch.float32 if under_autocast else torch.bfloat16
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 2048), WrittenOutNorm(2048), nn.Linear(2048, 2048)).to(dtype)
        x, labels = torch.empty(16_384, 2048, dtype=dtype), torch.empty(16_384, dtype=torch.int64)
    for run in (model, torch.compile(model)):
        with FlopMeter(H100) as meter:
            with torch.autocast("cuda", torch.bfloat16, enabled=under_autocast):
                loss = torch.nn.functional.cross_entropy(run(x), labels)
            loss.backward()
        assert not any("there too" in advice.remedy for advice in meter.report().advice)


class NormInFp32(nn.LayerNorm):
    """As diffusion transformers write it."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class HeadInFp32(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight.float())


@pytest.mark.parametrize(
    ("widened", "words"),
    [
        ([HeadInFp32], "without .float(), or inside of torch.autocast"),
        ([NormInFp32], "without .float() or torch.autocast around it, whichever of them widens it"),
        ([NormInFp32, HeadInFp32], "without .float() (torch.autocast narrows the products alone)"),
    ],
)
def test_autocast_is_a_remedy_for_widened_products_and_none_for_norms_which_it_keeps_in_fp32(widened, words):
    def narrow(width):
        return nn.Linear(2048, width, dtype=torch.bfloat16)

    made = {
        NormInFp32: lambda: NormInFp32(2048, elementwise_affine=False),
        HeadInFp32: lambda: HeadInFp32(2048, 512, bias=False, dtype=torch.bfloat16),
    }
    with torch.device("meta"):
        parts = [made[kind]() for kind in widened]
        model = nn.Sequential(narrow(2048), narrow(2048), *parts, *([] if HeadInFp32 in widened else [narrow(512)]))
        x = torch.empty(16_384, 2048, dtype=torch.bfloat16)
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
    remedies = [each.remedy for each in meter.report().advice if "there too" in each.remedy]
    assert remedies == [f"bfloat16 there too: {words}"]


@pytest.mark.parametrize("under_autocast", [False, True])
def test_norms_with_narrow_weights_are_not_told_to_run_inside_of_autocast_which_has_them_in_fp32(under_autocast):
    """As FSDP's mixed precision and autocast together have them; a model in bf16 needs no autocast."""
    with torch.device("meta"):
        parts = (part for _ in range(4) for part in (nn.LayerNorm(2048), nn.Linear(2048, 2048)))
        model, x = nn.Sequential(*parts).bfloat16(), torch.empty(16_384, 2048, dtype=torch.bfloat16)
    with FlopMeter(H100) as meter:
        with torch.autocast("cuda", torch.bfloat16, enabled=under_autocast):
            out = model(x)
        out.sum().backward()
    remedies = [each.remedy for each in meter.report().advice if "there too" in each.remedy]
    assert remedies == under_autocast * [
        "bfloat16 there too: without .float() or torch.autocast around it, whichever of them widens it"
    ]


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [(65_536, 32, "its rows are short"), (512, 1_000_000, "too long"), (16, 4_000_000, "few rows: 16 for 108 SMs")],
)
def test_rows_are_said_to_be_short_few_or_too_long_for_the_cache_as_they_are(rows, columns, reason):
    norm = nn.LayerNorm(columns, device="meta")
    x = torch.empty(rows, columns, device="meta")
    with FlopMeter("a100-sxm4-80gb") as meter:
        for _ in range(20):
            norm(x)
    assert reason in meter.report().hot_spots[0].why


def test_the_best_of_one_long_row_takes_a_chain_of_kernels_and_is_not_said_to_be_few_rows():
    """torch spreads a row of 50,304 over several blocks, in 17 launches."""
    logits = torch.empty(1, 50_304, dtype=torch.bfloat16, device="meta")
    with FlopMeter(H100) as meter:
        logits.topk(50)
    assert "kernels one after another" in meter.report().hot_spots[0].why


def test_many_numbers_beside_a_few_large_tensors_are_said_to_be_too_small_and_not_bound_by_memory():
    """A number moves 8 bytes, at 0 % of the bandwidth."""
    number, tensor = torch.empty((), device="meta"), torch.empty(16_040, 1024, device="meta")
    with FlopMeter(H100) as meter:
        for rows in range(16_000, 16_040):
            tensor[:rows] * 2
        for _ in range(100):
            number * 2
    (why,) = (each.why for each in meter.report().hot_spots if each.what.startswith("mul"))
    assert why == "too small: launch and drain take longer than the work"


def test_long_products_with_a_small_result_are_said_to_have_few_tiles_and_not_to_be_bound_by_memory():
    """10 x 10 sums of 1,024 products, as Shampoo's of a narrow layer: one tile, for which 41 kB are read in 3 µs, .4 %
    of the bandwidth."""
    large, rows = torch.empty(16_384, 16_384, device="meta"), torch.empty(10, 1024, device="meta")
    with FlopMeter(H100) as meter:
        large.addmm(large, large)  # the host runs ahead
        for _ in range(64):
            rows @ rows.T
    (why,) = (each.why for each in meter.report().hot_spots if each.what == "mm ×64")
    assert why == "few tiles: 1 for 132 SMs"


def test_a_depthwise_convolution_is_said_to_have_a_filter_for_each_channel_and_no_rows():
    depthwise = nn.Conv1d(256, 256, 31, groups=256, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), FlopMeter("a100-sxm4-80gb") as meter:
        depthwise(torch.empty(16, 256, 400, dtype=torch.bfloat16, device="meta"))
    why = meter.report().hot_spots[0].why
    assert "one filter for each channel" in why
    assert "whole weight" not in why


def test_a_solver_on_one_matrix_is_not_told_to_take_a_larger_batch():
    """Twice the rows would be another matrix, not two of them."""
    with FlopMeter(H100) as meter:
        matrix, x = torch.empty(2000, 2000, device="meta"), torch.empty(2000, 1, device="meta")
        for _ in range(20):
            x = matrix @ x
            x = x / x.norm()
    assert not any("times the batch" in each.remedy for each in meter.report().advice)


def assert_a_larger_batch_takes_what_is_told(report_of):
    """`report_of` a step on so many items: the advice for 8 of them, beside a step on as many as it names."""
    advice = next(each for each in report_of(8).advice if "times the batch" in each.remedy)
    times = int(advice.remedy.split()[0])
    assert times >= 16
    assert advice.run_seconds_then == pytest.approx(report_of(8 * times).seconds / times, rel=0.05)


def test_a_larger_batch_is_told_where_layers_hold_the_first_word_of_all_texts_before_the_second():
    """As torch's own encoder does inside, though its user has the texts first."""

    def report_of(texts):
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, device="meta")
        with FlopMeter(H100) as meter:
            layer(torch.empty(texts, 32, 64, device="meta")).sum().backward()
        return meter.report()

    assert_a_larger_batch_takes_what_is_told(report_of)


def test_a_larger_batch_is_told_of_microbatches_of_which_a_loader_makes_the_next_meanwhile():
    """One was ready before the step, the other is made in it of single items, and comes to the device then."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to("meta")
    ready = torch.zeros(8, 256)
    with FlopMeter(H100) as meter:
        for make in (lambda: ready, lambda: torch.stack([torch.zeros(256) for _ in range(8)])):
            model(make().to("meta")).square().sum().backward()
    assert any("times the batch" in each.remedy for each in meter.report().advice)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_larger_batch_is_told_beside_an_average_of_the_weights_that_is_larger_than_the_data(foreach):
    """The images come from the host, as from a loader, and the average lies on the device from before."""

    def report_of(items):
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to("meta")
        average = [torch.empty_like(weight, requires_grad=False) for weight in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlopMeter(H100) as meter:
            x = torch.randn(items, 64, device="cpu").to("meta")
            model(x).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                weights = [weight.detach() for weight in model.parameters()]
                if foreach:
                    torch._foreach_lerp_(average, weights, 0.1)
                else:
                    for mean, weight in zip(average, weights, strict=True):
                        mean.sub_(0.1 * (mean - weight))
        return meter.report()

    assert_a_larger_batch_takes_what_is_told(report_of)


def test_a_larger_batch_is_told_beside_an_optimizer_that_multiplies_matrices_of_the_weights_size():
    """Its products stay as they are, as those of Muon and SOAP."""

    class Whitens(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for weight in self.param_groups[0]["params"]:
                weight -= 0.1 * (weight.grad @ weight.grad.T) @ weight.grad

    def report_of(items):
        model = nn.Linear(512, 512, bias=False, device="meta")
        optimizer = Whitens(model.parameters())
        with FlopMeter(H100) as meter:
            model(torch.empty(items, 512, device="meta")).square().sum().backward()
            optimizer.step()
        return meter.report()

    assert_a_larger_batch_takes_what_is_told(report_of)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_larger_batch_is_told_of_data_that_the_step_itself_makes_on_the_host_or_on_the_device(device):
    def report_of(items):
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to("meta")
        with FlopMeter(H100) as meter:
            x, y = torch.randn(items, 256, device=device), torch.randint(0, 10, (items,), device=device)
            nn.functional.cross_entropy(model(x.to("meta")), y.to("meta")).backward()
        return meter.report()

    assert_a_larger_batch_takes_what_is_told(report_of)


def test_a_larger_batch_is_told_where_a_known_mask_picks_from_each_item():
    """As in masked language models, whose loss is of some tokens."""

    def report_of(items):
        model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to("meta"), torch.empty(items, 256)
        labels, is_masked = torch.randint(0, 10, (items,)), torch.arange(items) % 2 == 0
        with FlopMeter(H100) as meter:
            x_there, labels_there, mask_there = x.to("meta"), labels.to("meta"), is_masked.to("meta")
            nn.functional.cross_entropy(model(x_there)[mask_there], labels_there[mask_there]).backward()
        return meter.report()

    assert_a_larger_batch_takes_what_is_told(report_of)


def reason_of(name, run, device=H100):
    with FlopMeter(device) as meter:
        run()
    return next(spot.why for spot in meter.report().hot_spots if spot.what.startswith(name))


def test_a_repeated_operand_is_named_as_the_reason_and_not_a_change_of_order():
    x, shift = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 256, 1152), (64, 1, 6912)))
    assert "operands do not lie alike" in reason_of("add", lambda: x + shift[..., :1152])
    assert "another order" in reason_of("clone", lambda: x.transpose(1, 2).contiguous())


def test_what_takes_many_instructions_an_element_is_not_said_to_have_operands_that_lie_apart():
    """Operands of one shape and order, or none at all."""
    image, x = torch.empty(64, 64, 112, 112, device="meta"), torch.empty(2**25, device="meta")
    half, rows = x.bfloat16(), x.view(8192, 4096)
    assert "random numbers" in reason_of("normal_", x.normal_)
    assert "another type" in reason_of("_to_copy", half.float)
    pool, enlarge = torch.nn.functional.avg_pool2d, torch.nn.functional.interpolate
    programs = {
        "avg_pool2d": lambda: pool(image, 2),
        "upsample_nearest2d": lambda: enlarge(image, scale_factor=2),
        "roll": lambda: rows.roll(5, 0),
    }
    for name, program in programs.items():
        assert reason_of(name, program) == "it takes longer to compute where each element lies than to move its bytes"


def test_an_element_wise_function_of_many_instructions_is_not_said_to_combine_results():
    """On a B200 erf takes longer than the bytes; each thread has elements of its own."""
    x = torch.empty(2**16, 4096, dtype=torch.bfloat16, device="meta")
    gelu = torch.nn.functional.gelu
    assert reason_of("gelu", lambda: gelu(x), "b200-sxm-180gb") == "its elements take longer to compute than to move"


def test_a_convolution_whose_image_is_turned_is_not_called_bound_by_memory():
    """In tf32 at 345 FLOP/B, over the ridge point of 148: what moves is the layout."""
    x, weight = (torch.empty(shape, device="meta") for shape in ((64, 256, 4096), (256, 256, 3)))
    why = reason_of("convolution", lambda: torch.nn.functional.conv1d(x, weight, padding=1))
    assert why == "the layout is NCHW, which matrix units take by way of copies"


def test_the_reason_is_that_of_the_kernels_with_most_time_over_their_floor():
    """One large addition near the bandwidth, and many small ones that are not."""
    large, small, shift = (
        torch.empty(shape, device="meta") for shape in ((4096, 8192), (64, 256, 1152), (64, 1, 2304))
    )

    def run():
        large + large
        for _ in range(40):
            small + shift[..., :1152]

    assert "operands do not lie alike" in reason_of("add", run)


def test_scores_that_go_to_the_host_are_made_smaller_before():
    def report(is_mended: bool) -> flopmeter.Report:
        with flopmeter.cuda(H100) as device, torch.no_grad():
            model = nn.Linear(8192, 65536, dtype=HALF, device=device)
            for _ in range(3):
                scores = model(torch.empty(16384, 8192, dtype=HALF, device=device))
                scores.argmax(-1).cpu() if is_mended else scores.cpu().argmax(-1)
        return device.report().step

    faulty = report(is_mended=False)
    first = faulty.advice[0]
    assert first.remedy.startswith("make it smaller on the device first")
    assert first.gain_seconds == pytest.approx(faulty.seconds - report(is_mended=True).seconds, rel=0.05)


def test_activations_that_wait_on_the_host_are_not_scores():
    with flopmeter.cuda(H100) as device:
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss = model(torch.zeros(8192, 4096, device=device)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    step = device.report().step
    assert any(kernel.cost.link_bytes for kernel in step.kernels)
    assert not any("make it smaller" in each.remedy for each in step.advice)


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_ranks_too_are_told_of_needless_checkpoints(wrap):
    def report(is_mended):
        def forward(x):
            for layer in layers:
                x = layer(x) if is_mended else checkpoint(layer, x, use_reentrant=False)
            return x.sum()

        with world(8):
            with torch.device("meta"):
                make = lambda: nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))  # noqa: E731
                layers = nn.ModuleList(make() for _ in range(4)).to(HALF)
                x = torch.empty(8192, 2048, dtype=HALF, requires_grad=True)
            if wrap == "FSDP2":
                for layer in layers:
                    fully_shard(layer)
            else:
                layers = nn.ModuleList(DistributedDataParallel(layer) for layer in layers)
            forward(x).backward()  # the first step makes DDP's buckets anew
            with FlopMeter(H100) as meter:
                forward(x).backward()
        return meter.report()

    before = report(is_mended=False)
    (advice,) = (each for each in before.advice if each.remedy == "no checkpointing")
    assert advice.gain_seconds == pytest.approx(before.seconds - report(is_mended=True).seconds, rel=0.05)


class Penalty(torch.autograd.Function):
    """Gives its input back; to the gradient it adds that of a loss of its own, as icefall's Balancer does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            loss = (x.square().mean(0).sqrt() - 1).abs().sum()
            return gradient + torch.autograd.grad(loss, x)[0]


class Balanced(nn.Module):
    def forward(self, x):
        return Penalty.apply(x)


@pytest.mark.parametrize("kind", ["penalty", "penalty and checkpoint", "checkpoint"])
def test_a_graph_that_a_backward_pass_builds_for_itself_is_no_checkpoint(kind):
    """Beside one, the checkpoint alone is told to go."""
    with FlopMeter(H100), torch.device("meta"):
        layer = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
        model = nn.ModuleList([layer, Balanced()] if "penalty" in kind else [layer])
        x = torch.empty(8192, 2048, requires_grad=True)
    with FlopMeter(H100) as meter:
        y = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in kind else layer(x)
        for each in model[1:]:
            y = each(y)
        y.sum().backward()
    told = [each for each in meter.report().advice if each.remedy == "no checkpointing"]
    assert len(told) == ("checkpoint" in kind)
    assert all(each.what.startswith(("addmm ", "relu ", "addmm, relu")) for each in told)


@pytest.mark.parametrize(("feeds_back", "is_told"), [(True, True), (False, False)])
def test_a_compiled_function_in_a_loop_is_told_to_compile_the_loop_if_one_call_reads_what_another_made(
    feeds_back, is_told
):
    """Of batches on which a model is called in turn, none has to do with the next."""
    compiled = torch.compile(lambda state, x: torch.tanh(state * 0.9 + x))
    state = x = torch.empty(256, 1024, device="meta")
    with FlopMeter(H100) as meter:
        for _ in range(8):
            made = compiled(state, x)
            state = made if feeds_back else state
    told = [each.remedy for each in meter.report().advice if each.remedy.startswith("compile it as one")]
    assert told == ["compile it as one: torch.compile on what makes these calls"] * is_told


@pytest.mark.parametrize(("dtype", "is_said"), [(torch.bfloat16, True), (torch.float16, False)])
def test_who_is_advised_to_compile_int8_weights_is_told_which_kernel_may_come(dtype, is_said):
    """Of bf16 inductor may take the kernel that is priced at a hundred times the eager product."""

    def times(is_compiled):
        with torch.device("meta"):
            x = torch.empty(1, 512, 8192, dtype=dtype)
            weight, scales = torch.empty(8192, 8192, dtype=torch.int8), torch.empty(8192, dtype=dtype)

        def linear(x):
            return F.linear(x, weight.to(x.dtype)) * scales

        with torch.no_grad(), FlopMeter(H100) as meter:
            (torch.compile(linear) if is_compiled else linear)(x)
        return meter.report()

    eager = times(False)
    (advice,) = (each for each in eager.advice if each.remedy.startswith("torch.compile"))
    assert ("_weight_int8pack_mm" in advice.why) == is_said
    assert (times(True).seconds > 10 * eager.seconds) == is_said


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


@pytest.mark.parametrize("kind", ["of the input", "penalty", "second order", "two losses", "one after another", "no"])
def test_compiling_is_told_with_torch_func_where_gradients_of_gradients_are_taken(kind):
    """torch.compile of such a program raises "does not currently support double backward", with torch.func it does not:
    by torch's own compiler, at the end."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
        x = torch.empty(1 << 20, 64, requires_grad=kind != "no")
    with FlopMeter(H100) as meter:
        loss = _square(model(x))
        if kind in ("of the input", "second order"):
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            if kind == "second order":  # two passes with no op between
                (slope,) = torch.autograd.grad(slope, x, torch.empty_like(slope), create_graph=True)
            loss = _square(slope)
        elif kind == "penalty":
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + sum(map(_square, slopes))
        elif kind == "two losses":
            loss.backward(retain_graph=True)
        elif kind == "one after another":
            loss.backward()
            loss = _square(model(x))
        loss.backward()
    told = [each.remedy for each in meter.report().advice if each.remedy.startswith("torch.compile")]
    is_double = kind in ("of the input", "penalty", "second order")
    assert len(told) == 1
    assert ("torch.func.grad" in told[0]) == is_double
    if is_double:
        torch._dynamo.reset()  # what it keeps of other programs decides which error comes
        model, x = model.to_empty(device="cpu"), torch.zeros(16, 64)
        compiled = torch.compile(
            lambda x: _square(torch.func.grad(lambda x: _square(model(x)))(x)), backend="aot_eager"
        )
        compiled(x).backward()
        compiled = torch.compile(model, backend="aot_eager")
        (slope,) = torch.autograd.grad(_square(compiled(x.requires_grad_())), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            _square(slope).backward()


def test_hooks_that_gather_gradients_in_a_buffer_are_no_gradients_of_gradients():
    """As those of ZeRO: each gradient goes into a buffer, which the next backward pass adds to."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]).to("meta")
    buffers = {}

    def gather(parameter):
        scratch = torch.empty(parameter.numel(), device="meta")
        if parameter in buffers:
            buffers[parameter] = torch.cat((parameter.grad.flatten() + buffers[parameter], scratch[:0]))
        else:
            buffers[parameter] = scratch.copy_(parameter.grad.flatten())
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(gather)
    with FlopMeter(H100) as meter:
        for _ in range(2):
            _square(model(torch.empty(1 << 18, 256, device="meta"))).backward()
    told = [each.remedy for each in meter.report().advice if each.remedy.startswith("torch.compile")]
    assert len(told) == 1
    assert "torch.func" not in told[0]


def test_an_optimizer_that_is_written_out_adds_numbers_and_tensors_in_one_loop():
    """The Adam of GaLore and others. Beside it one with torch's functions for lists, which is the change that is told:
    of the loop's eight ops six have such a function in the advice, and each takes all 24 parameters."""
    with torch.device("meta"):
        states = [[torch.empty(64, 64) for _ in range(24)] for _ in range(4)]
    foreach = torch._foreach_mul_, torch._foreach_add_, torch._foreach_addcmul_, torch._foreach_sqrt, torch._foreach_div

    def one_by_one():
        for p, g, m, v in zip(*states, strict=True):
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.99).addcmul_(g, g, value=0.01)
            p.add_(m / v.sqrt().add_(1e-8), alpha=-0.1)

    def at_once():
        mul_, add_, addcmul_, sqrt, div = foreach
        p, g, m, v = states
        mul_(m, 0.9)
        add_(m, g, alpha=0.1)
        mul_(v, 0.99)
        addcmul_(v, g, g, value=0.01)
        roots = sqrt(v)
        add_(roots, 1e-8)
        add_(p, div(m, roots), alpha=-0.1)

    reports = []
    for run in (one_by_one, at_once):
        with FlopMeter(H100) as meter:
            run()
        reports.append(meter.report())
    before, after = reports
    (told,) = (each for each in before.advice if each.remedy.startswith("torch._foreach_"))
    assert "120 kernels for one tensor each" in told.why  # mul_ twice, add_ three times, for each of 24
    assert before.seconds > told.run_seconds_then > after.seconds


def test_batches_that_the_host_makes_op_by_op_are_told_where_they_are_made():
    """Not where the device's first kernel is called."""
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    image = torch.zeros(8, 64)

    def made() -> torch.Tensor:
        batch = image
        for _ in range(200):
            batch = batch.mul(2)  # of the batch
        return batch

    with FlopMeter(H100, source=True) as meter:
        model(made().to("meta"))
        for _ in range(3):
            model(torch.empty(8, 64, device="meta"))
    (told,) = (each for each in meter.report().advice if each.remedy.startswith("DataLoader(num_workers"))
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# of the batch")
    )
    assert told.where.endswith(f"test_advice.py:{line}")
    assert told.what.startswith("all that the host sends after 200 ops on tensors of its own")


def test_a_batch_that_is_cut_out_of_a_text_by_numbers_of_the_host_is_made_by_a_dataloader():
    """The places are read one by one: what draws them and adds to them is work on the batch as well."""
    text = torch.zeros(10_000, dtype=torch.long)
    with torch.device("meta"):
        model = nn.Embedding(64, 64)
    with FlopMeter(H100, source=True) as meter:
        for _ in range(3):
            places = torch.randint(9_000, (64,))
            model(torch.stack([text[place : place + 256] for place in places]).to("meta"))
    found = [each for each in meter.report().advice if "on tensors of its own" in each.what]
    assert [each.remedy.split(",")[0] for each in found] == ["DataLoader(num_workers=...)"]
    # randint, unbind and stack; of each text an addition, a cut and the two numbers that it takes
    assert found[0].what == f"all that the host sends after {3 * (3 + 64 * 4)} ops on tensors of its own"


def test_figures_of_a_schedule_on_the_host_are_no_batches():
    """As schedulers of diffusion keep them: the device takes each as an argument of its kernels, or a copy of one
    number, so that no process of a DataLoader could make them."""
    with torch.device("meta"):
        model, x = nn.Linear(64, 64), torch.empty(8, 64)
    noise = torch.linspace(1, 0.1, 50)

    with FlopMeter(H100, source=True) as meter:
        for step in range(20):
            now, then = noise[step], noise[step + 1]
            ratio = torch.exp(torch.log(then) - torch.log(now))
            x = x * ratio + model(x) * (1 - ratio).to("meta")
    remedies = [each.remedy for each in meter.report().advice]
    assert any(remedy.startswith("made once, on the device") for remedy in remedies)
    assert not any("DataLoader(num_workers" in remedy for remedy in remedies)


@pytest.mark.parametrize("read", [lambda loss: loss.item(), lambda loss: loss.detach().cpu().numpy()])
def test_a_loss_that_is_copied_to_the_host_is_advised_as_one_that_is_read(read):
    """It is not to be made smaller first: what takes time is that the host waits."""
    with flopmeter.cuda(H100, steps=3) as device:
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), fused=True)
        for _ in range(4):
            loss = model(torch.ones(4096, 2048).cuda()).square().mean()  # the next batch is copied after the wait
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read(loss)
    told = [(each.remedy, each.what) for each in device.report().step.advice]
    once = "keep the values on the device, or read them once in many steps"
    assert (once, "all that the host sends after 1 read of a value") in told
    assert not any("make it smaller" in remedy for remedy, _ in told)


def test_an_op_of_several_kernels_that_read_from_the_cache_is_told_by_their_number():
    """The neighbours of 32 x 1,024 points: each of four digits is counted by three kernels, one gathers, one sorts."""
    distances = torch.empty(32, 1024, 1024, device="meta")
    with FlopMeter("rtx-4090") as meter:
        distances.topk(20, dim=-1)
    (spot,) = meter.report().hot_spots
    assert spot.why.startswith("a call is 14 kernels one after another")
