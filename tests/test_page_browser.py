"""The HTML report in a real Chromium: tables that sort, branches that fold, both colour schemes, no complaints.

Skipped where Chromium, its driver or selenium is missing: `apt-get install chromium chromium-driver` (Debian) and
`pip install selenium`.
"""

import shutil
import time
from collections import defaultdict

import pytest
from page_support import bert_training

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
)
BY = ("class", "phase", "module", "op", "kernel")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def report():
    return bert_training()


@pytest.fixture(scope="module")
def url(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.render("html"), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, url):
    """The report, opened anew at the size of a desktop, in the light scheme."""
    show(browser, 1280, "light")
    browser.get(url)
    while browser.execute_script("return document.readyState") != "complete":  # where the machine is busy
        time.sleep(0.05)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def show(browser, width, scheme):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def column(browser, table, place):
    """What the cells of a column sort by, as the page shows them from top to bottom."""
    return browser.execute_script(
        """const [table, place] = arguments;
        return [...document.querySelectorAll("table")[table].tBodies[0].rows].map((row) => {
          const cell = row.cells[place];
          return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
        });""",
        table,
        place,
    )


def paths(browser):
    script = 'return [...document.querySelectorAll(".tree tbody th")].map((cell) => cell.title)'
    return browser.execute_script(script)


def headers(browser, table):
    grid = browser.find_elements("tag name", "table")[table]
    return grid.find_elements("css selector", "thead th")


def button(header):
    return header.find_element("tag name", "button")


def test_the_page_has_the_tables_of_the_report(page, report):
    rows = page.execute_script('return [...document.querySelectorAll("table")].map((t) => t.tBodies[0].rows.length)')
    assert rows == [len(report.rows(by)) for by in BY]


@pytest.mark.parametrize("table", [0, 1, 3, 4], ids=["class", "phase", "op", "kernel"])
def test_a_click_on_each_header_sorts_and_another_one_turns_the_order(page, table):
    for place, header in enumerate(headers(page, table)):
        before = column(page, table, place)
        is_text = isinstance(before[0], str)
        for is_falling in (not is_text, is_text):
            button(header).click()
            assert column(page, table, place) == sorted(before, reverse=is_falling)
            sorts = [each.get_attribute("aria-sort") for each in headers(page, table)]
            assert sorts.pop(place) == ("descending" if is_falling else "ascending")
            assert set(sorts) == {"none"}


def test_a_tree_sorts_siblings_and_keeps_children_below_their_parents(page):
    before = paths(page)
    for place, header in enumerate(headers(page, 2)):
        button(header).click()
        after = paths(page)
        assert sorted(after) == sorted(before)
        siblings = defaultdict(list)
        for path, figure in zip(after, column(page, 2, place), strict=True):
            siblings[parent_of(path)].append(figure)
        for parent, figures in siblings.items():
            assert figures == sorted(figures, reverse=not isinstance(figures[0], str)), parent
        assert_nested(after)


def parent_of(path):
    return path.rpartition(".")[0]


def assert_nested(order):
    """Each path follows its parent before anything else at the parent's depth does."""
    around = []
    for path in order:
        while around and parent_of(path) != around[-1]:
            around.pop()
        assert around or not parent_of(path) or parent_of(path) not in order, path
        around.append(path)


def test_sorting_needs_no_mouse(page):
    from selenium.webdriver.common.keys import Keys

    header = headers(page, 0)[2]
    for key, order in ((Keys.ENTER, "descending"), (Keys.SPACE, "ascending")):
        button(header).send_keys(key)
        assert header.get_attribute("aria-sort") == order


def test_a_branch_folds_and_unfolds_with_all_that_is_below(page):
    def seen():
        rows = page.find_elements("css selector", ".tree tbody tr")
        return {path for path, row in zip(paths(page), rows, strict=True) if row.is_displayed()}

    first = seen()
    assert "Bert" in first
    assert "Bert.blocks" in first
    assert "Bert.blocks.3" not in first
    (blocks,) = page.find_elements("css selector", '.fold[aria-label="below Bert.blocks"]')
    assert blocks.get_attribute("aria-expanded") == "false"
    blocks.click()
    assert blocks.get_attribute("aria-expanded") == "true"
    assert {f"Bert.blocks.{number}" for number in range(12)} <= seen()
    root = page.find_element("css selector", '.fold[aria-label="below Bert"]')
    root.click()
    assert not any("." in path for path in seen())
    root.click()
    assert "Bert.blocks.3" in seen()
    blocks.click()
    assert seen() == first


def test_nothing_is_fetched(page):
    assert page.execute_script('return performance.getEntriesByType("resource").map((entry) => entry.name)') == []


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_the_page_is_never_wider_than_the_window(page, width):
    show(page, width, "light")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [360, 1280])
def test_no_texts_of_a_picture_overlap(page, width):
    show(page, width, "light")
    overlaps = page.execute_script(
        """const found = [];
        for (const svg of document.querySelectorAll("svg.picture")) {
          const texts = [...svg.querySelectorAll("text:not(.slope)")];
          const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
          for (const [i, [a, p]] of boxes.entries())
            for (const [b, q] of boxes.slice(i + 1))
              if (p.left < q.right && q.left < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom)
                found.push([a, b]);
        }
        return found;"""
    )
    assert overlaps == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(page, scheme):
    """Contrast as WCAG 2.2 has it: 7 for text at level AAA, 4.5 for what is less important at level AA."""
    show(page, 1280, scheme)
    paper = luminance(page.find_element("tag name", "body").value_of_css_property("background-color"))
    assert (paper > 0.5) == (scheme == "light")
    for selector, least in (("h1", 7), ("td", 7), ("h1 + p", 4.5), ("figcaption", 4.5), (".facts dt", 4.5)):
        ink = luminance(page.find_element("css selector", selector).value_of_css_property("color"))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= least, selector


def luminance(colour):
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_without_script_every_row_is_there(browser, url, report):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(url)
        rows = browser.find_elements("css selector", "tbody tr")
        assert len(rows) == sum(len(report.rows(by)) for by in BY)
        assert all(row.is_displayed() for row in rows)
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
