"""The HTML report: one file that needs nothing else, with every figure of the report in it."""

import html.parser
import re
from math import pi

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
from flopmeter.report.figures import CLASS_LOOKS, dots
from flopmeter.report.page.markup import Markup, tag
from flopmeter.report.quantities import decimal, scale, tick, with_prefix
from flopmeter.report.report import Report
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
        calls, _, _, flops, read, written, seconds, intensity, rate = cells
        expected = (row.calls, row.seconds, row.flops, row.bytes_read, row.bytes_written, row.intensity, row.flop_per_s)
        assert (calls, seconds, flops, read, written, intensity, rate) == pytest.approx(expected, rel=1e-5)


def test_each_kernel_with_a_place_is_in_one_dot_and_areas_are_shares_of_the_time(report, text):
    eager = text[text.index('class="dots"') : text.index("<figcaption>eager")]
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
    areas = re.findall(r'<path class="area" d="(.*?)"', text)
    heights = [float(y) for area in areas for _, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", area)]
    top, bottom = 28.0, 360.0 - 52
    assert bottom - min(heights) == pytest.approx((bottom - top) / 1.08, abs=0.2)
    assert f"At the peak of {with_prefix(report.peak_memory_bytes, 'B')} at {report.memory.peak_op.call.name}" in text


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


def test_a_notebook_shows_the_class_table_without_script_or_style(report):
    page = Elements(report._repr_html_())
    names = {name for name, _ in page.elements}
    assert names <= {"div", "p", "b", "small", "br", "table", "thead", "tbody", "tr", "th", "td"}
    for row in report.rows():
        assert any(row.name in text for text in page.texts)
    assert len(report._repr_html_()) < 10_000


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
        (2**100, "1.27e+12 EB"),
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
