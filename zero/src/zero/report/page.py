"""Figures and tables as one HTML page, with Vega-Embed (Vega-Lite, Vega; BSD-3-Clause) inside it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from zero.errors import UsageError
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
        return _PAGE.format(
            title=html.escape(self.title),
            facts=f"<p>{html.escape(self.facts)}</p>" if self.facts else "",
            numbers=f"<dl>{numbers}</dl>" if numbers else "",
            body=body,
            figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
            style=_STYLE,
            library=library(),
            draw=_DRAW,
        )


@cache
def library() -> str:
    """The text of the library that draws, with a name for its function in the page."""
    try:
        from vl_convert import javascript_bundle
    except ImportError as error:
        raise UsageError(
            "a report is drawn by Vega-Lite, which comes with the package vl-convert-python: "
            "pip install 'accelz-zero[report]'"
        ) from error
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


_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --text: #1d2430; --soft: #5d6675; --line: #dfe3e8 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --card: #1d2128; --text: #e4e7ec; --soft: #9aa3b0; --line: #343a44 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 100rem; padding: 1.5rem clamp(0.75rem, 2.5vw, 2.5rem);
  background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 0.2rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 1.8rem 0 0.6rem }
h3 { font-size: 0.95rem; margin: 0 }
p { color: var(--soft); margin: 0.15rem 0 0.4rem; font-size: 0.85rem; overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.6rem;
  margin: 1rem 0 0 }
dl div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
dl div { padding: 0.6rem 0.8rem }
dt { color: var(--soft); font-size: 0.8rem }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums }
.parts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.8rem }
figure { margin: 0; padding: 0.8rem; min-width: 0 }
.wide { grid-column: 1 / -1 }
.chart { width: 100%; min-height: 60px; color: var(--text) }
.chart svg { max-width: 100% }
.table { overflow: auto; max-height: 32rem }
table { border-collapse: collapse; font-size: 0.85rem; width: 100% }
th, td { text-align: left; padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); vertical-align: top }
td.long { min-width: 15rem; overflow-wrap: anywhere }
th { color: var(--soft); font-weight: 500; white-space: nowrap }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
#vg-tooltip-element.zero-theme { background: var(--card); color: var(--text); border: 1px solid var(--line);
  border-radius: 6px; padding: 6px 8px; font: 12px system-ui, sans-serif; box-shadow: 0 2px 8px #0003 }
#vg-tooltip-element.zero-theme td.key { color: var(--soft); text-align: right; padding: 1px 6px; border: 0 }
#vg-tooltip-element.zero-theme td.value { padding: 1px 2px; border: 0; font-variant-numeric: tabular-nums }
@media (max-width: 60rem) { .parts { grid-template-columns: minmax(0, 1fr) } }
@media print {
  :root { --page: #fff; --card: #fff; --text: #000; --soft: #444; --line: #ccc }
  body { padding: 0; max-width: none }
  .parts { grid-template-columns: minmax(0, 1fr) }
  figure, dl div { break-inside: avoid }
  h2, h3 { break-after: avoid }
  .table { max-height: none; overflow: visible }
}
"""
_DRAW = """
const specs = JSON.parse(document.getElementById("figures").textContent);
const options = { renderer: "svg", actions: false, ast: true, tooltip: { theme: "zero" } };
const place = (number) => document.getElementById("figure-" + number);
const columns = (number) => Math.max(1, Math.floor((place(number).clientWidth - 40) / 130));  // of a legend
const views = [];
async function draw(number) {
  const fitting = specs[number].config.legend.columns = columns(number);
  views[number]?.finalize();
  views[number] = await vegaEmbed(place(number), specs[number], options);
  place(number).dataset.columns = fitting;
}
const redraw = () => specs.forEach(
  (_, number) => columns(number) != place(number).dataset.columns && draw(number));
let waiting;
addEventListener("resize", () => {  // what fits into a row changes; the rest follows by itself
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 150);
});
Promise.all(specs.map((_, number) => draw(number))).then(
  () => document.body.dataset.drawn = specs.length, (error) => document.body.dataset.failed = String(error));
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>{facts}{numbers}
{body}
<script type="application/json" id="figures">{figures}</script>
<script type="module">{library}
{draw}</script>
</body></html>
"""
