"""scripts/article.py: the article's experiments come out as the article tells them."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def article():
    path = Path(__file__).parents[1] / "scripts" / "article.py"
    spec = importlib.util.spec_from_file_location("article", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(article, capsys, experiment):
    assert article.main([experiment]) == 0
    return capsys.readouterr().out


def test_a_fused_chain_of_multiplies_takes_what_the_article_measured(article):
    for times, microseconds in article.ARTICLE_MICROSECONDS.items():
        assert article.multiplied(times).kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.1)


def test_the_chain_is_flat_up_to_32_repeats_and_compute_bound_past_64(article, capsys):
    rows = [line.split() for line in run(article, capsys, "repeat").splitlines()[2:]]
    bound_by = {int(row[0]): row[4] for row in rows}
    assert {bound_by[times] for times in (1, 2, 4, 8, 16, 32)} == {"memory"}
    assert {bound_by[times] for times in (128, 256)} == {"compute"}


def test_doubling_tells_overhead_from_rising_intensity(article, capsys):
    small_ops, product, activation = run(article, capsys, "doubling").split("\n\n\n")
    assert "overhead-bound, time grows by less than 10 %" in small_ops
    assert "the same weights serve more items, not overhead" in product
    assert "memory-bound, time grows with the size" in activation


def test_products_that_a_faster_device_turns_memory_bound_are_listed(article, capsys):
    """228 FLOP/B lies between the ridge points of the A100 (153) and the H100 (295)."""
    out = run(article, capsys, "devices")
    (line,) = [line for line in out.splitlines() if line.startswith("mm (tensor contraction) [256,4096] [4096,4096]")]
    assert line.index("compute") < line.index("memory")
