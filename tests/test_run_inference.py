"""Scripts that only infer: where they are stopped, and which go on because they may still train."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import textwrap
from types import SimpleNamespace

import pytest

from flopmeter.run import session, steps
from flopmeter.run.report import RunReport
from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

BEGIN = """
import time

import torch
from torch import nn

def linear(wide=64):
    return nn.Linear(64, wide, bias=False).cuda()

x = torch.zeros(8, 64).cuda()
"""


@pytest.fixture
def ran(tmp_path):
    def running(text: str, beside: str = "", **wishes) -> tuple[RunReport, str, str]:
        """The report of a script, what it wrote and what was written to its stderr."""
        script = tmp_path / "infer.py"
        script.write_text(BEGIN + textwrap.dedent(text))
        (tmp_path / "beside_it.py").write_text(textwrap.dedent(beside))
        opened = ScriptSession("a100-sxm4-80gb", Wishes(**{"steps": 3, **wishes}))
        out, err = io.StringIO(), io.StringIO()
        with opened.open(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ending = run(Script(str(script)), opened)
            assert ending.error is None, err.getvalue()
            return opened.report("infer.py"), out.getvalue(), err.getvalue()

    return running


def end_after(monkeypatch, looks):
    """Patience ends after that many looks at the clock, however busy the machine is (None: never)."""
    clock = itertools.count()
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(session, "PATIENCE_S", math.inf if looks is None else looks)


MANY = """
model = linear()
with torch.no_grad():
    for _ in range(5000):
        model(x)
print("to the end")
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(session, "PATIENCE_S", 0.0)
    monkeypatch.setattr(session, "PATIENCE_TO_PRINT_S", 0.0)


def test_a_script_that_only_infers_is_stopped_and_its_headline_says_so(ran):
    report, out, _ = ran(MANY)
    assert (report.parts.count, report.parts.marked_by, out) == (32, "calls of Linear", "")
    assert report.step.macs == 8 * 64 * 64
    assert report.headline.endswith(
        "ended there, as nothing had trained (--step-marker optimizer waits for it; --steps for so many calls)"
    )


def test_it_is_stopped_where_it_forgot_no_grad_too(ran):
    report, out, _ = ran(MANY.replace("no_grad", "enable_grad"))
    assert (report.parts.count, out) == (32, "")


def test_it_runs_as_many_calls_as_were_asked_for(ran):
    report, _, _ = ran(MANY, steps=100)
    assert 100 <= report.parts.count < 120


def test_without_a_number_of_steps_it_runs_to_its_end(ran):
    report, out, _ = ran(MANY.replace("5000", "200"), steps=None)
    assert (report.parts.count, out) == (200, "to the end\n")


DRAFTED = """
draft, target = linear(), linear(128)
with torch.no_grad():
    for _ in range({rounds}):
        for _ in range({tokens}):
            draft(x)
        target(x)
print("to the end")
"""


def test_what_comes_every_few_calls_is_in_the_round_when_it_is_stopped(ran):
    report, out, _ = ran(DRAFTED.format(rounds=1000, tokens=6))
    assert out == ""
    assert report.step.macs == 6 * 8 * 64 * 64 + 8 * 64 * 128


def test_a_target_that_checks_many_tokens_of_a_draft_is_in_the_round_when_it_is_stopped(ran, monkeypatch):
    """At the first look, after 32 calls, the target has been called once, which is no round yet."""
    end_after(monkeypatch, 20)
    report, out, _ = ran(DRAFTED.format(rounds=10_000, tokens=20))
    assert out == ""
    assert report.parts.marked_by == "rounds of calls: Linear ×21"
    assert report.step.macs == 20 * 8 * 64 * 64 + 8 * 64 * 128


def test_one_rank_of_many_goes_on_until_a_round_of_many_layers_has_come_again(ran):
    report, out, _ = ran(
        """
        layers = [linear() for _ in range(40)]
        with torch.no_grad():
            for _ in range(5000):
                for layer in layers:
                    layer(x)
        print("to the end")
        """,
        gpus=2,
    )
    assert out == ""
    assert report.parts.marked_by == "rounds of calls: Linear ×40"
    assert report.step.macs == 40 * 8 * 64 * 64


def test_the_rounds_of_a_module_that_is_called_compiled_too_are_told_by_its_class(ran):
    report, _, _ = ran("""
        class Net(nn.Linear): pass
        net = Net(64, 64).cuda()
        token = torch.compile(net)
        with torch.no_grad():
            for _ in range(20):
                net(x)
                for _ in range(3):
                    token(x)
    """)
    assert report.parts.marked_by == "rounds of calls: Net ×4"
    assert "\nNet, forward" in report.render()


PREPARES = """
class Decoder(nn.Module):  # its layers run one by one, outside of its forward
    def __init__(self):
        super().__init__()
        self.fill = nn.ModuleList(linear() for _ in range(40))
        self.layers = nn.ModuleList(linear() for _ in range(5))
        self.head = linear(128)

    def one_token(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

decoder, vocoder = Decoder(), nn.Sequential(linear(), linear())
with torch.no_grad():
    for fill in decoder.fill:
        fill(x)
    for _ in range({tokens}):
        decoder.one_token(x)
    vocoder(x)
print("to the end")
"""


@pytest.mark.parametrize(("tokens", "until_the_end"), [(30, True), (10_000, False)])
def test_the_rounds_of_a_decoder_are_the_steps_after_many_calls_that_only_prepare_them(
    ran, monkeypatch, tokens, until_the_end
):
    """A token goes through five layers of 64 x 64 and a head of 64 x 128."""
    end_after(monkeypatch, None if until_the_end else 20)
    report, out, _ = ran(PREPARES.format(tokens=tokens))
    assert bool(out) is until_the_end
    assert report.parts.marked_by == "rounds of calls: Linear ×6"
    assert report.step.macs == 8 * 64 * (5 * 64 + 128)


COMPILED = """
class Speech:  # no module, but it has one
    def __init__(self):
        self.model = linear()

    def one_token(self, x):
        return self.model(x).relu() + 1

speech = Speech()
one_token = torch.compile(speech.one_token)
with torch.no_grad():
    for _ in range({tokens}):
        one_token(x)
    linear()(x)
print("to the end")
"""


@pytest.mark.parametrize("tokens", [20, 10_000])
def test_calls_of_a_compiled_function_outside_of_modules_are_steps_and_its_weights_parameters(ran, tokens):
    report, out, _ = ran(COMPILED.format(tokens=tokens))
    assert bool(out) is (tokens == 20)
    assert report.parts.marked_by == "calls of Speech.one_token"
    assert report.parts.count == (20 if out else 32)
    assert report.step.macs == 8 * 64 * 64
    assert report.step.memory.at_peak["parameters"] >= 4 * 64 * 64


FEATURES_FIRST = """
    encoder, head = linear(), linear(10)
    with torch.no_grad():
        features = [encoder(x) for _ in range(100)]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for each in features:
        head(each).sum().{train}
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_that_computes_features_before_it_trains_goes_on_to_its_training(ran):
    report, _, _ = ran(FEATURES_FIRST.format(train="backward()"))
    assert (report.parts.count, report.parts.marked_by) == (3, "optimizer.step()")
    assert "ended there" not in report.headline


def test_a_pass_in_a_module_beside_the_script_counts_as_its_own(ran):
    text = "    import beside_it\n" + FEATURES_FIRST.replace("head(each).sum().{train}", "beside_it.learn(head(each))")
    report, _, _ = ran(text, beside="def learn(y):\n    y.sum().backward()\n")
    assert (report.parts.count, report.parts.marked_by) == (3, "optimizer.step()")


def test_calls_on_the_cpu_before_any_on_the_device_are_not_the_end(ran):
    report, _, _ = ran("""
        on_cpu, model = nn.Linear(64, 64), linear()
        del x
        with torch.no_grad():
            for _ in range(100):
                on_cpu(torch.zeros(8, 64))
            for _ in range(100):
                model(torch.zeros(4, 64, device="cuda"))
    """)
    assert report.step.macs == 4 * 64 * 64


def test_a_command_may_train_if_the_package_that_it_enters_has_words_of_training(tmp_path, monkeypatch):
    """As pip installs them: a few lines in bin, which import the package."""
    package = tmp_path / "site-packages" / "learns_well"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        textwrap.dedent(BEGIN)
        + textwrap.dedent("""
            def main():
                model = linear()
                with torch.no_grad():
                    for _ in range(64):
                        model(x)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                while True:
                    model(x).sum().backward()
                    optimizer.step()
        """)
    )
    command = tmp_path / "bin" / "learn"
    command.parent.mkdir()
    command.write_text(
        "import sys\nfrom learns_well.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    for script in (Script(str(command)), Script("learns_well.cli", is_module=True)):
        if script.is_module:
            (package / "cli.py").write_text(
                (package / "cli.py").read_text() + "\nif __name__ == '__main__':\n    main()\n"
            )
        opened = ScriptSession("a100-sxm4-80gb", Wishes(steps=3))
        with opened.open():
            ending = run(script, opened)
            assert ending.error is None
            assert opened.report("learn").parts.marked_by == "optimizer.step()"


def test_rollouts_before_the_first_step_of_an_optimizer_are_not_the_end(ran):
    report, _, _ = ran("""
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.no_grad():
                for _ in range(64):
                    model(x)
            torch.autograd.backward(model(x).sum())
            optimizer.step()
    """)
    assert (report.parts.count, report.parts.marked_by) == (3, "optimizer.step()")


def test_whoever_waits_for_a_script_that_may_still_train_is_told_once_how_to_end_it(ran, monkeypatch):
    monkeypatch.setattr(steps, "SECONDS_WITHOUT_WORD", 0.0)
    text = MANY.replace("5000", "200") + "optimizer = torch.optim.SGD\n# loss.backward()\n"
    report, out, err = ran(text)
    assert (report.parts.count, out) == (200, "to the end\n")
    assert err.count("nothing has trained: if this only infers") == 1


def test_whoever_waits_for_the_next_step_is_told_too(ran, monkeypatch):
    monkeypatch.setattr(steps, "SECONDS_WITHOUT_WORD", 0.0)
    _, _, err = ran("""
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for _ in range(64):
                    model(x)
    """)
    assert err.count("1 of 3 steps so far, and 32 calls: if this evaluates") == 1


def test_replays_of_a_cuda_graph_end_too(ran):
    report, out, _ = ran("""
        model, graph = linear(), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            model(x)
        for _ in range(5000):
            graph.replay()
        print("to the end")
    """)
    assert (report.parts.marked_by, out) == ("replays of a CUDA graph", "")


@pytest.mark.parametrize("frames", [10, 1_000_000])
def test_a_step_of_several_graphs_that_are_replayed_in_turn_is_a_round_of_them(ran, monkeypatch, frames):
    """An encoder, a decoder that runs twice, and 16 graphs that only fill a cache; each of one product."""
    end_after(monkeypatch, None if frames == 10 else 20)
    report, out, _ = ran(f"""
        def captured(model):
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                model(x)
            return graph

        for _ in range(16):
            captured(linear(8)).replay()
        encoder, decoder = captured(linear()), captured(linear(128))
        for _ in range({frames}):
            encoder.replay()
            decoder.replay()
            decoder.replay()
        print("to the end")
    """)
    assert bool(out) is (frames == 10)
    assert report.parts.marked_by == "rounds of 3 replays of CUDA graphs"
    assert report.step.macs == 8 * 64 * (64 + 2 * 128)


ENDS = {
    "by the host's clock": """
        model, start = linear(), time.time()
        with torch.no_grad():
            for _ in range(200):
                model(x)
        torch.cuda.synchronize()
        print("took" if time.time() > start else "took no time")
    """,
    "by events": """
        model = linear()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.no_grad():
            for _ in range(200):
                model(x)
        end.record()
        print("took" if start.elapsed_time(end) > 0 else "took no time")
    """,
    "with a backward pass, and no optimizer": """
        model, start = linear(), time.perf_counter()
        for _ in range(200):
            model(x).sum().backward()
        print("took" if time.perf_counter() > start else "took no time")
    """,
    "without a module": """
        w, start = torch.zeros(64, 64, device="cuda", requires_grad=True), time.perf_counter()
        for _ in range(200):
            (x @ w).sum().backward()
        print("took" if time.perf_counter() > start else "took no time")
    """,
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_a_benchmark_gets_to_its_own_print(ran, monkeypatch, text):
    monkeypatch.setattr(session, "PATIENCE_TO_PRINT_S", 600.0)
    report, out, _ = ran(text)
    assert out == "took\n"
    assert report.parts.count in (199, 200)  # the setup is before the first backward pass
    assert "ended there" not in report.headline


def test_an_inference_gets_to_its_end_if_that_is_near(ran, monkeypatch):
    end_after(monkeypatch, None)
    report, out, _ = ran(MANY.replace("5000", "200"))
    assert (report.parts.count, out) == (200, "to the end\n")


def test_where_patience_ends_does_not_change_the_report(ran, monkeypatch):
    end_after(monkeypatch, 20)
    report, out, _ = ran("""
        growing = nn.Linear(8, 64, bias=False).cuda()
        with torch.no_grad():
            for count in range(1, 1_000_000):
                growing(x.new_zeros(count, 8))
        print("to the end")
    """)
    assert (report.parts.count, report.step.macs, out) == (32, 32 * 8 * 64, "")


def test_patience_with_an_inference_is_none_with_a_training_that_follows(ran, monkeypatch):
    end_after(monkeypatch, None)
    report, out, _ = ran(
        """
        import beside_it
        model = linear()
        with torch.no_grad():
            for _ in range(100):
                model(x)
        for _ in range(1000):
            getattr(beside_it, "lear" + "n")(model(x))
        print("to the end")
    """,
        beside="learn = lambda y: getattr(y.sum(), 'back' + 'ward')()",
    )
    assert (report.parts.count, out) == (3, "")
    assert "calls of Linear, with backward passes and no optimizer" in report.headline


WARMED_UP = {
    "a module": "step = lambda: model(x).sum().backward()",
    "tensors": "w = torch.zeros(64, 64, device='cuda', requires_grad=True); step = lambda: (x @ w).sum().backward()",
}


@pytest.mark.parametrize("step", WARMED_UP.values(), ids=WARMED_UP)
@pytest.mark.parametrize("timed", ["time.perf_counter()", "time.time()", "time.monotonic_ns()"])
def test_a_benchmark_that_warms_up_before_it_reads_a_clock_gets_to_its_own_print(ran, monkeypatch, step, timed):
    monkeypatch.setattr(session, "PATIENCE_TO_PRINT_S", 600.0)
    report, out, _ = ran(f"""
        model = linear()
        {step}
        for _ in range(100):
            step()
        start = {timed}
        for _ in range(100):
            step()
        print("took" if {timed} > start else "took no time")
    """)
    assert out == "took\n"
    assert report.parts.count in (199, 200)


@pytest.mark.parametrize(
    "timer", ["benchmark.Timer('step()', globals={'step': step}).timeit(9).mean", "do_bench(step)"]
)
def test_a_benchmark_that_hands_its_warm_steps_to_a_timer_gets_to_its_own_print(ran, monkeypatch, timer):
    monkeypatch.setattr(session, "PATIENCE_TO_PRINT_S", 600.0)
    if timer.startswith("do_bench"):
        pytest.importorskip("triton")
    _, out, _ = ran(f"""
        from torch.utils import benchmark
        try:
            from triton.testing import do_bench
        except ImportError:
            pass
        model = linear()
        step = lambda: model(x).sum().backward()
        for _ in range(5):
            step()
        print("took" if {timer} > 0 else "took no time")
    """)
    assert out == "took\n"
