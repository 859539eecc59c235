"""Pages of zero.report in a real browser: axes, no text over other text, both colour schemes, no network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.zero.helpers import pages
from tests.zero.helpers.runs import TIMELINE, written
from zero.report import timeline
from zero.report.records import POINTS, read
from zero.report.run_report import run_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZES = [(400, "dark"), (1600, "light")]
HEIGHT = 900
PAPER = 718  # A4's width within its margins
LIMIT = 120_000  # milliseconds, on a busy machine
CONTRAST = 4.5  # of text, as WCAG 2 asks for at least

LOOK = """() => {
  const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
  const seen = (e) => e.textContent.trim() && getComputedStyle(e).opacity !== "0" &&
    e.getBoundingClientRect().width > 0;
  const titles = ".role-axis-title text", labels = ".role-axis-label text";
  return [...document.querySelectorAll(".chart")].map((chart) => ({
    frame: box(chart.closest("figure")),
    texts: [...chart.querySelectorAll("svg text")].filter(seen).map((e) => [e.textContent, ...box(e)]),
    titles: [...chart.querySelectorAll(titles)].filter(seen).length,
    labels: [...chart.querySelectorAll(labels)].filter(seen).length,
    ink: getComputedStyle(chart.querySelector(labels)).fill,
    paper: getComputedStyle(chart.closest("figure")).backgroundColor,
  }));
}"""


@dataclass
class Seen:
    """What is wrong with a page, as the browser says."""

    wrong: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda message: self.wrong.append(message.text))
        page.on("request", lambda asked: self._asked(asked.url))

    def _asked(self, url: str) -> None:
        if not url.startswith("file:"):
            self.wrong.append(url)


Opened = Callable[[str, int, str], tuple[Page, Seen]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser of {', '.join(BROWSERS)}: install one, or run make browser as root")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of more units, and of a longer history, than a figure shows, and the page of one step."""
    folder = tmp_path_factory.mktemp("pages")
    units = {f"model.layers.{n}.self_attention_with_a_long_name": 1000 * n + 100 for n in range(60)}
    texts = {
        "run": run_page(read(written(folder, POINTS + 100, units=units))).render(),
        "step": timeline.page({**TIMELINE, "exact": False}).render(),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture(scope="module")
def opened(browser: Browser, made: dict[str, Path]) -> Opened:
    """`opened(name, width, scheme)`: a page that is drawn. It is set back for the next test, whatever an
    earlier one has done to it and found wrong."""
    known: dict[tuple[str, int, str], tuple[Page, Seen]] = {}

    def open_(name: str, width: int, scheme: Any) -> tuple[Page, Seen]:
        if (name, width, scheme) not in known:
            known[name, width, scheme] = draw(name, width, scheme)
            return known[name, width, scheme]
        page, seen = known[name, width, scheme]
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": HEIGHT})
        page.emulate_media(media="screen", color_scheme=scheme)
        seen.wrong.clear()
        return page, seen

    def draw(name: str, width: int, scheme: Any) -> tuple[Page, Seen]:
        page, seen = (
            browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme),
            Seen(),
        )
        page.set_default_timeout(LIMIT)
        seen.watch(page)
        page.goto(f"file://{made[name]}")
        page.locator("body[data-drawn], body[data-failed]").wait_for()
        return page, seen

    return open_


def overlapping(texts: list[list[Any]]) -> list[tuple[str, str]]:
    """Texts whose boxes share more than a pixel each way."""
    found = []
    for n, (one, left, top, right, bottom) in enumerate(texts):
        for other, left_, top_, right_, bottom_ in texts[n + 1 :]:
            if min(right, right_) - max(left, left_) > 1 and min(bottom, bottom_) - max(top, top_) > 1:
                found.append((one, other))
    return found


def luminance(colour: str) -> float:
    """Of "rgb(1, 2, 3)", as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def check(page: Page, width: int, figures: int) -> list[dict[str, Any]]:
    """Every figure is drawn within its frame, with axes and legible text that covers no other."""
    assert page.evaluate("document.body.dataset.failed") is None
    charts: list[dict[str, Any]] = page.evaluate(LOOK)
    assert len(charts) == figures
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for chart in charts:
        left, top, right, bottom = chart["frame"]
        assert overlapping(chart["texts"]) == []
        outside = [
            t
            for t, *at in chart["texts"]
            if not (left <= at[0] and at[2] <= right and top <= at[1] and at[3] <= bottom)
        ]
        assert outside == []
        assert chart["titles"] == 2
        assert chart["labels"] >= 4
        light, dark = sorted((luminance(chart["ink"]), luminance(chart["paper"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > CONTRAST
    return charts


@pytest.mark.parametrize(("width", "scheme"), SIZES)
@pytest.mark.parametrize("name", ["run", "step"])
def test_pages_are_legible_narrow_and_wide_in_either_scheme(
    opened: Opened, made: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    page, seen = opened(name, width, scheme)
    charts = check(page, width, len(pages.figures(made[name].read_text())))
    assert (luminance(charts[0]["paper"]) < 0.2) is (scheme == "dark")
    assert seen.wrong == []


def test_pointing_at_a_figure_tells_its_values_and_a_resized_page_is_drawn_anew(opened: Opened) -> None:
    page, seen = opened("step", 1600, "light")
    box = page.locator(".chart svg").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2 - 20, box["y"] + 100)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100, steps=3)
    told = page.locator("#vg-tooltip-element.visible")
    told.wait_for()
    for word in ("backward", "parameters", "milliseconds"):
        assert word in told.inner_text()
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": 400, "height": HEIGHT})
    page.locator(".chart[data-columns='2']").wait_for()  # of the legend
    check(page, 400, 1)
    assert seen.wrong == []


def test_a_value_that_a_step_does_not_have_is_told_as_none(opened: Opened) -> None:
    page, seen = opened("run", 1600, "light")
    box = page.locator(".chart svg").first.bounding_box()  # the losses
    assert box
    told = page.locator("#vg-tooltip-element.visible")
    lacking = page.locator("#vg-tooltip-element.visible td", has_text="\u2013")
    for shift in range(20):  # one step in ten has a validation loss
        page.mouse.move(box["x"] + box["width"] / 2 + 10 * shift, box["y"] + 100)
        told.wait_for()
        assert "validation_loss" in told.inner_text()
        assert "null" not in told.inner_text()
        if lacking.count():
            break
    else:
        pytest.fail("all steps have all values")
    assert seen.wrong == []


def test_a_printed_page_is_black_on_white(opened: Opened, made: dict[str, Path]) -> None:
    page, seen = opened("run", 1600, "light")
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": PAPER, "height": HEIGHT})
    page.wait_for_function(
        "charts => charts.every(c => c.dataset.columns <= 5)", arg=page.query_selector_all(".chart")
    )
    charts = check(page, PAPER, len(pages.figures(made["run"].read_text())))
    assert all(luminance(chart["paper"]) > 0.99 for chart in charts)
    assert {chart["ink"] for chart in charts} == {"rgb(0, 0, 0)"}
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert seen.wrong == []
