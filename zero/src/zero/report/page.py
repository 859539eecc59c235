"""Figures and tables as one HTML page, with Vega-Embed (Vega-Lite, Vega; BSD-3-Clause) inside it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from zero.errors import extra
from zero.report.figures import Spec

_LONG = 30  # characters that may be broken over lines


@dataclass(frozen=True)
class Figure:
    """A picture with a title. note: what there is to know of it. wide: takes a row of its own."""

    title: str
    spec: Spec
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """head: of the columns. rows: of text; what is a number in all rows is aligned on the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Figure | Table] = ()


@dataclass(frozen=True)
class Page:
    """facts: in one line below the title. numbers: those to see first, by name."""

    title: str
    sections: Sequence[Section]
    facts: str = ""
    numbers: dict[str, str] = field(default_factory=dict)

    def render(self) -> str:
        """The page. Raises UsageError where what draws it is not installed."""
        figures: list[Spec] = []
        body = "".join(_section(section, figures) for section in self.sections if section.parts)
        numbers = "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(number)}</dd></div>"
            for name, number in self.numbers.items()
        )
        return _text_of("page.html").format(
            title=html.escape(self.title),
            facts=f"<p>{html.escape(self.facts)}</p>" if self.facts else "",
            numbers=f"<dl>{numbers}</dl>" if numbers else "",
            body=body,
            figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
            style=_text_of("page.css"),
            library=library(),
            draw=_text_of("page.js"),
        )


def _text_of(name: str) -> str:
    return resources.files("zero.report").joinpath(name).read_text(encoding="utf-8")


@cache
def library() -> str:
    """The text of the library that draws, with a name for its function in the page."""
    with extra("report"):
        from vl_convert import javascript_bundle
    bundle: str = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _section(section: Section, figures: list[Spec]) -> str:
    parts = "".join(_part(part, figures) for part in section.parts)
    return f"<h2>{html.escape(section.title)}</h2><div class=parts>{parts}</div>"


def _part(part: Figure | Table, figures: list[Spec]) -> str:
    note = f"<p>{html.escape(part.note)}</p>" if part.note else ""
    title = f"<h3>{html.escape(part.title)}</h3>"
    if isinstance(part, Table):
        return f"<figure class=wide>{title}{note}<div class=table>{_table(part)}</div></figure>"
    figures.append(part.spec)
    kind = " class=wide" if part.wide else ""
    return f"<figure{kind}>{title}{note}<div class=chart id=figure-{len(figures) - 1}></div></figure>"


def _table(table: Table) -> str:
    numeric = [all(_is_number(row[n]) for row in table.rows) for n in range(len(table.head))]
    rows = [_row("th", table.head, numeric), *(_row("td", row, numeric) for row in table.rows)]
    return f"<table><thead>{rows[0]}</thead><tbody>{''.join(rows[1:])}</tbody></table>"


def _row(cell: str, texts: Sequence[str], numeric: Sequence[bool]) -> str:
    return "<tr>" + "".join(_cells(cell, texts, numeric)) + "</tr>"


def _cells(cell: str, texts: Sequence[str], numeric: Sequence[bool]) -> Iterator[str]:
    for text, is_number in zip(texts, numeric, strict=True):
        kind = " class=number" if is_number else " class=long" if len(text) > _LONG else ""
        yield f"<{cell}{kind}>{html.escape(text)}</{cell}>"


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or text[0] == "-"
