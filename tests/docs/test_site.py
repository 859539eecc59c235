"""The built site: complete, and read without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import zero.observe

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_RESOURCE = {"canonical", "next", "prev"}


class Loaded(HTMLParser):
    """Addresses of what a browser fetches with a page, not of what a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in NO_RESOURCE and (address := given.get(LOADS[tag])):
            self.found.append(address)


def _pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert len(found) > 60
    return found


def test_nothing_is_fetched_from_elsewhere() -> None:
    for page in _pages():
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert not [address for address in loaded.found if re.match(r"(\w+:)?//", address)], page
    for sheet in SITE.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_every_file_that_a_page_loads_is_there() -> None:
    for page in _pages():
        if page.name == "404.html":  # which stands anywhere
            continue
        loaded = Loaded()
        loaded.feed(page.read_text())
        for address in loaded.found:
            if not address.startswith("data:"):
                assert (page.parent / re.split(r"[?#]", address)[0]).exists(), f"{page}: {address}"


def test_a_folder_can_be_searched() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"there is no browser of {', '.join(BROWSERS)}: install one, or run make browser as root")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom")
    address = f"file://{SITE}/index.html?q=flight%20recorder"
    shown = subprocess.run(
        [browser, *options, address], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.findall(r'href="[^"]*/([\w/-]+\.html)[^"]*" class="md-search-result__link"', shown.stdout)
    assert any(page.endswith("debug.html") for page in found)


@pytest.mark.parametrize("name", ["UsageError", "ConfigError", "BackendNotFoundError"])
def test_errors_have_pages(name: str) -> None:
    text = (SITE / "errors" / f"{name}.html").read_text()
    assert "What to do:" in text
    assert text.count("<li><code>") >= 2


def test_scripts_of_migrations_are_shown_with_what_changes() -> None:
    text = (SITE / "source" / "examples" / "migration.html").read_text()
    came = re.findall(r'class="gi">\+(.*?)</span>', text)
    assert came.count("import zero") == 2  # for FSDP2 and Accelerate
    assert "from zero.integrations import deepspeed" in came


def test_the_reference_has_signatures_and_docstrings() -> None:
    reference = "".join(page.read_text() for page in (SITE / "api").glob("*.html"))
    for name in (*zero.__all__, *zero.observe.__all__):
        assert name.endswith("Error") or re.search(rf'id="zero\.[\w.]+\.{name}"', reference), name
    for name in ("save_checkpoint", "clip_grad_norm_", "memory_report", "offload_states"):
        assert f'id="zero.engine.Engine.{name}"' in (SITE / "api/engine.html").read_text()
