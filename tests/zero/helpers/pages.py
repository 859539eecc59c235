"""Reads the pages that zero.report makes."""

from __future__ import annotations

import json
import re
from typing import Any


def figures(page: str) -> dict[str, dict[str, Any]]:
    """The page's Vega-Lite specifications by title."""
    told = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert told is not None
    titles = re.findall(r"<h3>([^<]*)</h3>(?:<p>[^<]*</p>)?<div class=chart", page)
    return dict(zip(titles, json.loads(told[1]), strict=True))


def rows(figure: dict[str, Any]) -> list[dict[str, Any]]:
    """What a figure draws."""
    found: list[dict[str, Any]] = figure["data"]["values"]
    return found


def series(figure: dict[str, Any]) -> list[str]:
    """The names in a figure's legend, in order."""
    domain: list[str] = figure["layer"][0]["encoding"]["color"]["scale"]["domain"]
    return domain
