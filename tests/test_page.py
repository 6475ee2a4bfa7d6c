"""The HTML report: one file that needs nothing else, with every figure of the report in it."""

import html.parser
import re
from html import escape
from itertools import pairwise
from math import dist, pi

import pytest
import torch
from page_support import bert_training

from flopmeter import FlopMeter, load_hardware
from flopmeter.launch.modes import ALL_MODES
from flopmeter.records import (
    ATTENTION,
    OP_CLASSES,
    Call,
    Cost,
    FormulaWork,
    Kernel,
    Launches,
    Op,
    Region,
    Switches,
    Timing,
    Trace,
    VectorWork,
)
from flopmeter.report.figures import CLASS_LOOKS, beside, dots, memory_picture, ranges, roofline_of
from flopmeter.report.page.markup import Markup, tag
from flopmeter.report.page.memory import _staircase
from flopmeter.report.page.tables import plain_table
from flopmeter.report.quantities import decimal, scale, tick, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.tables import Column, Table
from flopmeter.timing.peak_memory import CATEGORIES, memory_of


@pytest.fixture(scope="module")
def report():
    return bert_training()


@pytest.fixture(scope="module")
def text(report):
    return report.render("html")


class Elements(html.parser.HTMLParser):
    """Every element with its attributes, and the texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "link", "br"):
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)


def synthetic(count, module="Net", name="add"):
    """A run of so many kernels, no two alike."""
    op = Op(Call(torch.ops.aten.add.Tensor, (), {}, (), ()), (), module, "forward", None)
    classes = OP_CLASSES[:4]
    kernels, timings, start = [], [], 0.0
    for place in range(count):
        op_class = classes[place % len(classes)]
        cost = Cost(
            f"{name}{place % 97}",
            op_class,
            ((op_class, 1000 + place * 37),),
            (Region(None, 500 + place),),
            (Region(None, 100),),
            "fp32",
            FormulaWork(0) if op_class == ATTENTION else VectorWork(),
        )
        seconds = 1e-6 * (1 + place % 13)
        kernels.append(Kernel((op._replace(module=f"{module}.{place % 5000}"),), cost, 0, 1))
        timings.append(Timing(seconds, seconds, seconds, 0.0, 0.0, start, op_class, start))
        start += seconds
    return Report(
        launches=Launches(kernels, [None] * count, ALL_MODES[0]), timings=timings,
        hardware=load_hardware("a100-sxm4-80gb"), switches=Switches(False, False, False), host_seconds=0.0,
        memory=memory_of(Trace()),
    )  # fmt: skip


def test_every_element_is_closed_and_every_reference_stays_in_the_page(text):
    page = Elements(text)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes in page.elements:
        assert "src" not in attributes
        assert not any(key.startswith("on") for key in attributes)
        for target in (attributes.get("href", ""), *re.findall(r"url\((.*?)\)", attributes.get("fill", ""))):
            assert target in ("", "data:,") or target.removeprefix("#") in ids, (name, target)
    assert "http" not in re.sub(r'http-equiv="', "", text)


def test_every_row_of_every_grouping_is_in_the_page(report, text):
    texts = set(Elements(text).texts)
    for by in ("class", "phase", "op"):
        assert {row.name for row in report.rows(by)} <= texts
    titles = {attributes.get("title") for _, attributes in Elements(text).elements}
    assert {row.name for row in report.rows("module")} <= titles
    assert text.count("<tr") == 5 + sum(len(report.rows(by)) for by in ("class", "phase", "module", "op", "kernel"))


def test_cells_sort_by_the_figures_of_the_report(report, text):
    table = re.search(r"<table>.*?</table>", text, re.DOTALL).group()
    sorted_by = [[float(v) for v in re.findall(r'data-v="(.*?)"', row)] for row in table.split("<tr>")[2:]]
    for cells, row in zip(sorted_by, report.rows(), strict=True):
        seconds, _, calls, _, flops, read, written, joules, intensity, rate = cells
        assert (calls, flops, read, written) == (
            pytest.approx((row.calls, row.flops, row.bytes_read, row.bytes_written), rel=1e-5)
        )
        assert (seconds, joules, intensity, rate) == (
            pytest.approx((row.seconds, row.joules, row.intensity, row.flop_per_s), rel=1e-5)
        )


def test_a_device_of_unknown_power_has_no_column_of_energy(text):
    unknown = synthetic(3).render("html")  # its clock is not known
    assert "energy (" in text
    assert "energy (" not in unknown
    assert "<dt>energy</dt><dd><b>unknown</b>" in unknown


def test_each_kernel_with_a_place_is_in_one_dot_and_areas_are_shares_of_the_time(report, text):
    eager = re.search(r'<g class="dots">.*?</g>', text, re.DOTALL).group()
    counted = sum(int(calls) for calls in re.findall(r"\n(\d+) kernels, ", eager))
    assert counted == sum(dot.calls for dot in dots(report))
    radii = [float(radius) for radius in re.findall(r"scale\((.*?)\)", eager)]
    area = sum(pi * (radius**2 - 3.0**2) for radius in radii)
    share = sum(dot.seconds for dot in dots(report)) / report.kernel_seconds
    assert area == pytest.approx(pi * 22.0**2 * share, rel=0.03)


def test_no_two_classes_have_one_shape_and_no_two_categories_one_hatching(text):
    assert len({look.marker for look in CLASS_LOOKS.values()}) == len(CLASS_LOOKS)
    shapes = re.findall(r'<path id="mark\d+" class="class\d+" d="(.*?)">', text)
    assert len(set(shapes)) == len(CLASS_LOOKS)
    hatchings = re.findall(r'<path class="hatch" d="(.*?)">', text)
    assert len(set(hatchings)) == len(hatchings) == len(CATEGORIES) - 1  # the first is plain


def test_the_memory_picture_reaches_the_peak_of_the_report(report, text):
    top, bottom = 24.0, 320.0 - 50
    for over in ("time (ms)", "op"):
        drawn = re.search(
            rf'<svg[^>]*aria-label="Memory alive over {re.escape(over)}.*?</svg>', text, re.DOTALL
        ).group()
        areas = re.findall(r'<path class="area" d="(.*?)"', drawn)
        points = [(float(x), float(y)) for area in areas for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", area)]
        highest = min(y for _, y in points)
        outline = re.search(r'<path class="phase" d="(M[^V]*?)"', drawn).group(1)  # in ink: it shows in either scheme
        assert min(float(y) for y in re.findall(r" (-?[\d.]+)", outline)) == highest
        assert bottom - highest == pytest.approx((bottom - top) / 1.15, abs=0.2)
        x, y = map(float, re.search(r'class="peak" cx="([\d.]+)" cy="([\d.]+)"', drawn).groups())
        assert y == pytest.approx(highest, abs=0.1)
        assert min(abs(x - at) for at, height in points if height == highest) < 1  # a pixel
        assert f"peak {with_prefix(report.peak_memory_bytes, 'B')}</text>" in drawn
    assert f"At the peak of {with_prefix(report.peak_memory_bytes, 'B')} at {report.memory.peak_op.call.name}" in text


def test_the_peak_over_time_is_where_the_device_runs_its_op():
    """Three matmuls of known work: the peak is in the last one, which begins when the first two have ended."""
    with FlopMeter("a100-sxm4-80gb") as meter:
        x = torch.empty(4096, 4096, device="meta")
        y = x @ x
        z = y @ x
        torch.cat([z, z, z, z])
    report = meter.report()
    shown = memory_picture(report)
    assert shown.starts[-1] == report.seconds
    assert shown.starts[shown.peak_step] == report.timings[-1].start_seconds
    assert report.timings[-1].start_seconds > 2 * 4096**3 * 2 / 312e12


def test_the_longest_kernels_are_named_beside_the_roofline_and_each_has_one_number(report, text):
    for drawn in re.findall(r"<figure><h3>.*?</figure>", text, re.DOTALL):
        key = re.search(r'<ol class="key">.*?</ol>', drawn, re.DOTALL).group()
        numbers = re.findall(r'class="number"[^>]*>(\d+)<', drawn)
        assert numbers == [str(number + 1) for number in range(key.count("<li>"))]
    first = max(dots(report), key=lambda dot: dot.seconds)
    assert first.name in Elements(text).texts or any(first.name in each for each in Elements(text).texts)


def test_axes_are_as_wide_as_the_data():
    with FlopMeter("a100-sxm4-80gb") as meter:
        x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
        x @ x
    (dot,) = dots(meter.report())
    intensity, rate = ranges([roofline_of(meter.report())])
    vector_ridge = 19.5e12 / 2039e9
    assert vector_ridge / 3 < intensity.low < vector_ridge
    assert dot.intensity < intensity.high < 10 * dot.intensity
    assert 19.5e12 / 3 < rate.low < 19.5e12
    assert 312e12 < rate.high < 1000e12


def test_numbers_keep_off_each_other_and_off_the_dots():
    points = [(100.0 + 3 * place, 100.0) for place in range(6)]
    places = beside(points, [10.0] * 6, 16.0)
    for place, at in enumerate(places):
        assert all(dist(at, other) >= 15.9 for other in places[:place])
        assert all(dist(at, point) >= 10 for point in points)


def test_advice_stands_before_all_else_and_its_first_remedy_is_that_of_the_report(report, text):
    assert text.index("Where to win") < text.index("What the time goes to") < text.index("Roofline")
    assert f'<ol class="wins"><li><b>{escape(report.advice[0].remedy, quote=True)}</b>' in text
    assert text.count(escape(report.advice[0].remedy, quote=True)) == 1  # and is not told again among the notes


def test_what_a_screen_reader_needs_is_there(text):
    """Pictures have a text, tables headers with a scope, sections a heading, the page a language and a title; what
    scrolls can be reached by the keyboard."""
    elements = Elements(text).elements
    assert ("html", {"lang": "en"}) in elements
    assert "<title>" in text
    for name, attributes in elements:
        if name == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes["aria-label"]
        if name == "th":
            assert attributes["scope"] in ("col", "row")
        if "scroll" in (attributes.get("class") or ""):
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
        assert int(attributes.get("tabindex", 0)) == 0  # the order of focus is that of the page
    levels = [int(name[1]) for name, _ in elements if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_inks_stand_out_from_the_paper_as_wcag_asks(text, scheme):
    """7 to 1 is level AAA of WCAG 2.2 (1.4.6); lines of pictures need 3 to 1 (1.4.11)."""
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--(\w+): (#[0-9a-f]+)", dark))
    for paper in ("paper", "band"):
        assert contrast(colours["ink"], colours[paper]) >= 7
        assert contrast(colours["soft"], colours[paper]) >= 7
        assert contrast(colours["accent"], colours[paper]) >= 3
    assert contrast("#000", "#fff") == 21


def contrast(one, other):
    """By the formula of WCAG 2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_hundred_thousand_different_kernels_are_a_page_of_a_few_megabytes():
    text = synthetic(100_000).render("html")
    assert 100_000 < len(text.encode()) < 4_000_000
    assert "The 300 of" in text
    assert "To depth 1" in text


def test_hostile_names_stay_text():
    name = "</script><img src=x onerror=alert(1)>\"'&amp;\x00"
    page = Elements(synthetic(3, module=name, name=name).render("html"))
    names = [element for element, _ in page.elements]
    assert "img" not in names
    assert names.count("script") == 1
    assert any("</script><img" in text for text in page.texts)


def test_a_run_without_kernels_has_a_page():
    x = torch.empty(0, 8, device="meta")
    with FlopMeter() as meter:
        x.t()
    text = meter.report().render("html")
    assert "No kernel has FLOPs" in text
    assert "holds no memory" in text
    assert Elements(text).open == []


def test_a_notebook_shows_the_first_screen_without_script(report, text):
    shown = report._repr_html_()
    page = Elements(shown)
    assert page.open == []
    assert "script" not in {name for name, _ in page.elements}
    assert "predicted time" in page.texts
    for row in report.rows():
        assert row.name in page.texts
    for each in report.advice:
        assert each.remedy in page.texts
    assert shown[shown.index("<header>") : -len("</div>")] in text  # what the page begins with
    assert len(shown) < 20_000


def test_the_style_of_a_notebooks_cell_reaches_nothing_else(report):
    (style,) = re.findall(r"<style>(.*?)</style>", report._repr_html_(), re.DOTALL)
    depth = [0]
    for sign in re.sub(r"[^{}]", "", style):
        depth.append(depth[-1] + (1 if sign == "{" else -1))
    assert style.startswith(".flopmeter {")
    assert depth[-1] == 0
    assert 0 not in depth[1:-1]  # all of it is inside of the first brace
    assert not re.search(r"^\s*(:root|body|html)\b", style, re.MULTILINE)


def test_markup_escapes_all_that_is_not_markup():
    assert tag("td", "a < b", Markup("<b>"), title='"') == '<td title="&quot;">a &lt; b<b></td>'
    assert tag("p", class_="n", data_v=3, aria_label=None) == '<p class="n" data-v="3"></p>'
    assert tag("path", x=0.25, y=7.0) == '<path x="0.2" y="7"></path>'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (2.039e12, "2.04 TB"),
        (80e9, "80.0 GB"),
        (2**100, "1.27e+06 YB"),
    ],
)
def test_a_figure_is_shown_with_three_digits_and_a_prefix(value, text):
    assert with_prefix(value, "B") == text


def test_seconds_have_prefixes_below_one():
    assert [with_prefix(seconds, "s") for seconds in (0.0125, 3.2e-6, 4e-10)] == ["12.5 ms", "3.20 µs", "0.400 ns"]


def test_a_column_has_one_unit_and_small_figures_are_not_shown_as_zero():
    divisor, unit = scale([1.5e9, 2e6, 3.0], "B")
    assert (divisor, unit) == (1e9, "GB")
    assert [decimal(value / divisor) for value in (1.5e9, 2e6, 0)] == ["1.50", "<0.01", "0"]
    assert [tick(value) for value in (0.01, 1.0, 1e4, 1e15)] == ["0.01", "1", "10 k", "1 P"]


def test_a_staircase_has_no_point_between_others_of_its_level():
    assert _staircase([0, 1, 2, 3, 4], [5, 5, 5, 6]) == ["0.0 5.0", "3.0 5.0", "3.0 6.0", "4.0 6.0"]
    assert _staircase([0, 1, 2], [6, 5]) == ["0.0 6.0", "1.0 6.0", "1.0 5.0", "2.0 5.0"]


def test_a_plain_table_marks_its_columns_of_figures():
    made = plain_table(Table([Column("op", "<"), Column("ms")], [("mm", "1.5"), ("x<y", "20")]), "op")
    assert str(made) == (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table by op"><table><thead><tr>'
        '<th scope="col" class="t">op</th><th scope="col" class="n">ms</th></tr></thead><tbody>'
        '<tr><td class="t">mm</td><td class="n" data-v="1.5">1.5</td></tr>\n'
        '<tr><td class="t">x&lt;y</td><td class="n" data-v="20">20</td></tr></tbody></table></div>'
    )
