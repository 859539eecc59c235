"""The figures of the documentation are what the code says, and can be read."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from scripts import drawing, figures

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_what_is_drawn_now(name: str) -> None:
    path = figures.FOLDER / f"{name}.svg"
    assert path.read_text() == figures.FIGURES[name]().svg(), "python -m scripts.figures --write"
    picture = ElementTree.parse(path).getroot()
    assert picture.find(f"{SVG}title") is not None
    texts = [*picture.iter(f"{SVG}text")]
    assert len(texts) >= 6
    for text in (
        text for text in texts if text.get("text-anchor") == "start"
    ):  # about 7 units a letter; titles are wider
        wide = 8.6 if "title" in str(text.get("class")) else 7.2
        assert float(text.get("x", 0)) + wide * len(text.text or "") < drawing.WIDTH, text.text


def test_prefetch_shortens_the_step() -> None:
    alone, ahead = (figures.timeline(units)[1] for units in (0, 1))
    assert ahead < alone
