"""scripts/examples: each runs as its docstring says and prints what it promises."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopmeter.costs import RULES

FOLDER = Path(__file__).parents[1] / "scripts" / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {"hf_llama": "transformers", "timm_vit": "timm"}
MOST_LINES = 60


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Runs an example as a script; returns what it printed."""
    rules = dict(RULES)

    def run(name: str, *arguments: str) -> str:
        if name in NEEDS:
            pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed", exc_type=ImportError)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run
    RULES.clear()
    RULES.update(rules)


def lines_of_table(out: str, *names: str) -> list[list[str]]:
    """The cells of the lines that start with each name; StopIteration where one is missing."""
    return [next(line for line in out.splitlines() if line.startswith(name))[len(name) :].split() for name in names]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    docstring = text.split('"""')[1]
    assert f"python scripts/examples/{path.name}" in docstring
    assert len(text.splitlines()) < MOST_LINES
    assert path.stem not in NEEDS or f"pip install {NEEDS[path.stem]}" in docstring


def test_every_example_that_needs_another_package_is_known_to_need_it():
    for path in EXAMPLES:
        imported = {
            line.split()[1].split(".")[0]
            for line in path.read_text().splitlines()
            if line.startswith(("import ", "from "))
        }
        assert imported - {*sys.stdlib_module_names, "torch", "tabulate", "flopmeter"} == (
            {NEEDS[path.stem]} if path.stem in NEEDS else set()
        )


def test_a_hopper_reads_faster_than_an_ampere_and_that_than_an_l4(run):
    out = run("compare_gpus")
    times = [float(cells[0]) for cells in lines_of_table(out, "h100-sxm5-80gb", "a100-sxm4-80gb", "l4")]
    assert times == sorted(times)
    assert "what would help" in out


def test_compiling_makes_the_training_step_faster_and_recomputation_shows_in_hfu(run):
    out = run("training_step")
    phases = ("forward, device ms", "recompute, device ms", "backward, device ms", "optimizer, device ms")
    total, mfu, hfu, *rows = (
        [float(cell) for cell in cells]
        for cells in lines_of_table(out, "predicted, ms", "MFU, %", "HFU, with the recomputed forward, %", *phases)
    )
    assert total[0] > total[1] > 0
    assert all(useful < executed for useful, executed in zip(mfu, hfu, strict=True))
    assert all(sum(row[mode] for row in rows) <= total[mode] + 0.05 for mode in (0, 1))


def test_the_rule_of_a_custom_op_counts_five_flops_an_element(run):
    out = run("custom_op")
    without, with_rule = lines_of_table(out, "none", "swiglu_cost")
    elements = 4096 * 14336
    # silu reads and writes one tensor, the product reads two and writes one.
    assert without[:4] == ["element-wise", f"{5 * elements:,}", f"{3 * elements * 2:,}", f"{2 * elements * 2:,}"]
    assert with_rule[:4] == ["element-wise", f"{5 * elements:,}", f"{2 * elements * 2:,}", f"{elements * 2:,}"]


def test_a_hugging_face_llama_reads_and_generates(run):
    out = run("hf_llama")
    first, each, rate = (
        float(*cells)
        for cells in lines_of_table(
            out, "time to the first token, ms", "each token after it, ms", "tokens per second, all sequences"
        )
    )
    assert first > each > 0
    assert rate == pytest.approx(4 / each * 1e3, rel=0.01)
    assert "assumed: generation: no sequence ends before max_new_tokens" in out
    assert "does NOT fit" not in out  # 8 billion parameters in bf16: 16 of 80 GB
    assert "parameters 16.1 GB" in out


def test_a_timm_transformer_is_swept_over_the_batch(run):
    out = run("timm_vit")
    sizes = [line.split()[0] for line in out.splitlines() if line[:8].strip().isdigit()]
    assert sizes == ["1", "2", "4", "8", "16", "32", "64"]


def test_this_cpu_is_calibrated_predicted_and_timed(run):
    """Tests share their cores with others, so the figures need only be of the right order."""
    out = run("predict_this_cpu", "--models", "resnet-50", "--repeats", "3", "--seconds", "2")
    ((measured, best, predicted, error),) = lines_of_table(out, "resnet-50")
    assert 0 < float(best) <= float(measured)
    assert float(measured) / 10 < float(predicted) < float(measured) * 10
    assert float(error) == pytest.approx(100 * (float(predicted) / float(measured) - 1), abs=1)
    assert "flopmeter calibrate" in out


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_a_llama_on_64_ranks_says_what_goes_over_the_links(run):
    out = run("llama_70b_fsdp_tp", "2", "64")
    (calls, *_, bound) = lines_of_table(out, "communication ")[0]
    assert int(calls) == 36
    assert bound == "communication"
    assert "in 36 collectives over" in out
    assert "uncounted: none" in out
    assert "does NOT fit" not in out
    (rate,) = (float(line.split()[0]) for line in out.splitlines() if line.endswith("tokens/s a GPU"))
    assert rate > 0
