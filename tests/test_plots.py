"""Pictures: drawn from the same figures as the tables. Skipped where matplotlib is not installed, but for the error."""

import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from flopmeter import FlopMeter, plots, sweep
from flopmeter.ask.sweep_curve import sweep_curve
from flopmeter.cli import main
from flopmeter.models import BUILTINS, backward
from flopmeter.records import ATTENTION, CONTRACTION, ELEMENTWISE
from flopmeter.report.figures import REGIME_LOOKS, Dot, beside, dots, merged, roofline_of
from flopmeter.report.plots import PICTURES, PlotError, bars, memory_timeline, roofline, save
from flopmeter.report.quantities import duration


@pytest.fixture(scope="module")
def meter():
    with FlopMeter("a100-sxm4-80gb") as metered:
        backward(*BUILTINS["encoder-layer"](batch=2, seq=128))
    return metered


def test_all_drawers_stand_under_the_public_path():
    assert (plots.PICTURES, plots.PlotError, plots.bars, plots.memory_timeline, plots.roofline, plots.save) == (
        PICTURES, PlotError, bars, memory_timeline, roofline, save,
    )  # fmt: skip
    assert plots.sweep_curve is sweep_curve


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def products(batch):
    torch.empty(batch, 4096, dtype=torch.float16, device="meta") @ torch.empty(
        4096, 4096, dtype=torch.float16, device="meta"
    )


def test_every_kernel_of_some_intensity_is_a_dot_under_the_roof(matplotlib, meter):
    report = meter.report()
    (panel,) = roofline(report).axes
    dots = [dot for marks in panel.collections for dot in marks.get_offsets()]
    assert len(dots) == len(
        {kernel.cost for kernel in report.kernels if kernel.cost.executed_flops >= 0.01 * kernel.cost.bytes}
    )
    for intensity, flop_per_s in dots:
        assert flop_per_s <= min(312e12, intensity * 2039e9)


def test_dots_take_the_space_that_kernels_take_of_the_time(matplotlib, meter):
    """Dots have areas: beyond the smallest of 12 points² they add up to 900 for all of the time."""
    report = meter.report()
    (panel,) = roofline(report).axes
    areas = sum(size - 12 for marks in panel.collections for size in marks.get_sizes())
    pairs = zip(report.kernels, report.timings, strict=True)
    seconds = sum(timing.seconds for kernel, timing in pairs if kernel.cost.executed_flops >= 0.01 * kernel.cost.bytes)
    assert areas == pytest.approx(900 * seconds / report.kernel_seconds)


def test_the_roofline_names_the_longest_kernels_and_is_as_wide_as_the_data(matplotlib, meter):
    report = meter.report()
    (panel,) = roofline(report).axes
    key = panel.get_legend().get_title().get_text()
    longest = max(dots(report), key=lambda dot: dot.seconds)
    lines = [line for line in key.splitlines() if line[:1].isdigit()]
    assert any(f"  {longest.name} " in line for line in lines)
    shares = [int(line.split()[-2]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    numbered = [text for text in panel.texts if text.get_text().isdigit()]
    assert [text.get_text() for text in numbered] == [line.split()[0] for line in lines]
    # Each beside its dot, in points: no farther than the largest dot is wide and three numbers are high.
    assert all(math.hypot(*text.xyann) < math.sqrt(12 + 900) + 3 * 9 for text in numbered)
    low, high = panel.get_xlim()
    intensities = [dot.intensity for dot in dots(report)]
    assert max(0.01, min(intensities) / 3) <= low <= min(intensities)
    assert max(intensities) <= high


def test_the_bandwidth_stands_in_the_middle_of_the_slope(matplotlib, meter):
    """On logarithmic axes, between the left end and the ridge point of the vector units: 19.5 TFLOP/s in fp32."""
    (panel,) = roofline(meter.report()).axes
    (label,) = [text for text in panel.texts if text.get_text() == "2039 GB/s"]
    intensity, flop_per_s = label.xy
    assert flop_per_s / intensity == pytest.approx(2039e9)
    assert intensity / panel.get_xlim()[0] == pytest.approx(19.5e12 / 2039e9 / intensity)


def test_dots_on_one_pixel_are_one_dot_with_the_calls_and_the_time_of_all():
    dot = Dot("mm", "layer", CONTRACTION, 2, 10.0, 1e12, 0.5)
    shown = [
        dot, dot._replace(name="bmm", calls=3, seconds=0.25), dot._replace(calls=4, seconds=0.125),
        dot._replace(op_class=ELEMENTWISE, seconds=1.0), dot._replace(name="far", intensity=12.0),
    ]  # fmt: skip
    found = merged(shown, lambda each: (each.intensity + 0.2, 7.0))
    assert [(each.name, each.calls, each.seconds) for each in found] == [
        ("mm", 2, 1.0), ("mm and 1 more", 9, 0.875), ("far", 2, 0.5)
    ]  # fmt: skip


@pytest.mark.parametrize(("op_class", "peak"), [(CONTRACTION, 312e12), (ATTENTION, 312e12), (ELEMENTWISE, 19.5e12)])
def test_a_kernel_is_measured_by_the_roof_of_the_unit_that_it_runs_on(op_class, peak):
    with FlopMeter("a100-sxm4-80gb") as meter:
        products(4096)
    shown = roofline_of(meter.report())
    dot = Dot("any", "", op_class, 1, 1e6, peak / 4, 1.0)
    assert shown.share_of_roof(dot) == pytest.approx(1 / 4)
    assert shown.share_of_roof(dot._replace(intensity=1.0, flop_per_s=2039e9 / 2)) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    "points",
    [
        [(93, 109), (123, 111), (116, 92), (79, 104), (98, 106), (94, 101)],
        [(109, 111), (78, 97), (99, 88), (95, 98), (94, 106), (125, 89)],
    ],
)
def test_no_number_stands_on_the_line_from_another_to_its_dot(points):
    labels = beside(points, [8.0] * len(points), 14.0)
    for number, (end, start) in enumerate(zip(points, labels, strict=True)):
        along = [tuple(a + part / 50 * (b - a) for a, b in zip(start, end, strict=True)) for part in range(51)]
        others = [label for other, label in enumerate(labels) if other != number]
        assert min(math.dist(spot, label) for spot in along for label in others) > 5


def boxes(figure):
    """What the figure shows beside its axes, in pixels."""
    figure.draw_without_rendering()
    return [panel.get_legend().get_window_extent() for panel in figure.axes if panel.get_legend()] + [
        legend.get_window_extent() for legend in figure.legends
    ]


def test_no_key_is_cut_off_or_takes_the_place_of_dots_however_long_a_fused_kernel_is(matplotlib):
    with FlopMeter("a100-sxm4-80gb", compile="rules") as metered:
        x = torch.empty(4096, 4096, device="meta")
        for function in (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sqrt, torch.sigmoid, torch.erf) * 4:
            x = function(x)
    figure = roofline([metered.report(mode="eager"), metered.report(mode="compiled")])
    whole = figure.bbox
    for panel, key in zip(figure.axes, boxes(figure), strict=True):
        assert whole.x0 <= key.x0
        assert key.x1 <= whole.x1
        assert whole.y0 <= key.y0
        assert key.y1 < panel.get_window_extent().y0
        assert panel.get_window_extent().width > 0.35 * whole.width


def test_the_legend_of_bars_with_every_regime_is_in_the_picture(matplotlib):
    with FlopMeter("a100-sxm4-80gb") as metered:
        products(8192)
        torch.empty(2**26, device="meta").sin()
        torch.empty(4, device="meta").sin()
    figure = bars(metered.report(), "kernel")
    (legend,) = boxes(figure)
    assert len(figure.legends[0].get_texts()) == 4  # FLOPs and three regimes
    assert figure.bbox.x0 <= legend.x0


def test_two_modes_are_two_panels_on_the_same_axes(matplotlib, meter):
    eager, compiled = roofline([meter.report(), meter.report(mode="compiled")]).axes
    assert eager.get_ylim() == compiled.get_ylim()
    assert eager.get_title(loc="left").endswith("eager")
    assert compiled.get_title(loc="left").endswith("compiled")


@pytest.mark.parametrize("by", ["class", "op", "module"])
def test_bars_are_as_long_as_the_shares(matplotlib, meter, by):
    report = meter.report()
    (panel,) = bars(report, by).axes
    flops, times = panel.containers[0], panel.containers[1]
    for row, flop_bar, time_bar in zip(report.rows(by), flops, times, strict=False):
        assert flop_bar.get_width() == pytest.approx(100 * row.flops / report.flops)
        assert time_bar.get_width() == pytest.approx(100 * row.seconds / report.kernel_seconds)
    texts = [text.get_text() for text in panel.texts]
    for row in report.rows(by)[:3]:
        assert any(text.startswith(duration(row.seconds)) and text.endswith(row.regime) for text in texts)


def test_the_sweep_curve_has_the_points_of_the_sweep(matplotlib):
    result = sweep(products, [64, 128, 256, 512, 1024, 2048], "a100-sxm4-80gb")
    time, rate, memory = sweep_curve(result).axes
    assert list(time.lines[0].get_ydata()) == [point.seconds * 1e3 for point in result.points]
    assert list(rate.lines[0].get_ydata()) == [point.items_per_s for point in result.points]
    assert list(memory.lines[0].get_ydata()) == [point.peak_memory_bytes / 1e9 for point in result.points]
    regimes = {point.regime for point in result.points}
    colours = {line.get_markerfacecolor() for line in time.lines if line.get_label().endswith("-bound")}
    assert len(colours) == len(regimes)
    assert colours == {REGIME_LOOKS[regime].colour for regime in regimes}


def test_ticks_of_a_sweep_are_plain_figures_and_few(matplotlib):
    result = sweep(products, [2**power for power in range(14)], "a100-sxm4-80gb")
    figure = sweep_curve(result)
    figure.canvas.draw()
    for panel in figure.axes:
        across = [text.get_text() for text in panel.get_xticklabels()]
        assert across[0] == "1"
        assert len(across) <= 9
    for panel in (figure.axes[0], figure.axes[2]):
        shown = [float(text.get_text()) for text in panel.get_yticklabels()]
        assert shown == sorted(shown)
        assert len(shown) >= 3


def test_the_memory_timeline_reaches_the_peak(matplotlib, meter):
    report = meter.report()
    over_time, over_ops = memory_timeline(report).axes
    for panel in (over_time, over_ops):
        highest = max(path.vertices[:, 1].max() for area in panel.collections for path in area.get_paths())
        assert highest == pytest.approx(report.peak_memory_bytes / 1e9)
        assert any(text.get_text().startswith("peak ") for text in panel.texts)
    assert over_time.get_xlim() == (0, pytest.approx(1e3 * report.seconds))
    assert len(memory_timeline(meter.report(mode="compiled")).axes) == 1  # its ops have no time of their own


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_pictures_are_saved_as_their_name_says(matplotlib, meter, tmp_path, name):
    save(roofline(meter.report()), str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert ElementTree.fromstring(content).tag.endswith("svg")


def test_what_cannot_be_drawn_or_written_is_told(matplotlib, meter, tmp_path):
    with FlopMeter() as copies:
        torch.empty(1 << 20, device="meta").clone()
    with pytest.raises(PlotError, match="no kernel has FLOPs"):
        roofline(copies.report())
    with pytest.raises(PlotError, match="cannot be written"):
        save(bars(meter.report()), str(tmp_path / "picture.nonsense"))
    with pytest.raises(PlotError, match="cannot be written"):
        save(bars(meter.report()), str(tmp_path / "missing" / "picture.png"))


def test_the_command_draws(matplotlib, tmp_path, capsys):
    pictures = [("table", "--batch", "1", "--picture", name) for name in PICTURES]
    for command in (("table", "--batch", "1"), *pictures, ("sweep", "--batch", "1,2")):
        path = tmp_path / f"{command[-1]}.svg"
        assert main([command[0], "encoder-layer", *command[1:], "--seq", "64", "--plot", str(path)]) == 0
        assert path.exists()
        capsys.readouterr()


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["table", "encoder-layer", "--batch", "1", "--seq", "64", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == "flopmeter: pictures need matplotlib: pip install 'flopmeter[plot]'\n"


def test_causal_attention_stays_under_the_roof(matplotlib):
    """It is counted in full, but what it executes places it."""
    q = torch.empty(1, 32, 8192, 128, dtype=torch.bfloat16, device="meta")
    with FlopMeter("a100-sxm4-80gb") as attention:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    (panel,) = roofline(attention.report()).axes
    ((_, flop_per_s),) = panel.collections[0].get_offsets()
    assert 0.1 * 312e12 < flop_per_s < 312e12


def test_shares_have_no_ticks_beyond_a_hundred_percent(matplotlib, meter):
    (panel,) = bars(meter.report()).axes
    assert list(panel.get_xticks()) == [0, 20, 40, 60, 80, 100]


def test_bars_of_many_modules_stop_at_the_depth_that_has_room(matplotlib, meter):
    (panel,) = bars(meter.report(), "module", most=5).axes
    names = [label.get_text() for label in panel.get_yticklabels()]
    depth = next(depth for depth in (3, 2, 1) if len(meter.report().rows("module", depth=depth)) <= 5)
    assert len(names) == len(meter.report().rows("module", depth=depth))


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_of_a_report_is_drawn(matplotlib, meter, tmp_path, name):
    save(PICTURES[name](meter.report()), str(tmp_path / "picture.svg"))
    assert (tmp_path / "picture.svg").stat().st_size > 10_000
