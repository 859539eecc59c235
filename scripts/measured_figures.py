"""The figures of the pages of benchmarks: bars of what was measured, from the files of benchmarks/results.

A page's figure shows the run that the page's text tells of; a newer run means another name in `FIGURES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.drawing import WIDTH, Drawing
from scripts.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
LABELS = 230  # where the bars begin
HEAD, LINE, FOOT = 74, 30, 12  # of a figure, in units of the view box
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One bar of each row. key: of the result's rows. unit: what one is written in, of that many `scale`."""

    heading: str
    key: str
    unit: str
    scale: float = 1.0


def rows_of(file: str) -> list[Row]:
    """Of the one result that is stored under this name."""
    (result,) = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["results"]
    return list(result["rows"])


def bars(title: str, rows: Sequence[tuple[str, Row]], columns: Sequence[Column]) -> Drawing:
    """rows: with a label each. Those of this engine have a colour of their own; the shorter, the better."""
    headings = " and ".join(column.heading for column in columns)
    described = "; ".join(f"{label}: {', '.join(_texts(row, columns))}" for label, row in rows)
    drawing = Drawing(title, HEAD + LINE * len(rows) + FOOT, f"{headings}. {described}.")
    wide = (WIDTH - LABELS) / len(columns)
    for place, column in enumerate(columns):
        left = LABELS + place * wide
        drawing.text(left, 58, column.heading, "soft small")
        most = max(row[column.key] for _, row in rows if row[column.key] is not None)
        for number, (label, row) in enumerate(rows):
            if row[column.key] is None:
                continue
            y, length = HEAD + LINE * number, max(row[column.key] / most * (wide - 90), 1)
            drawing.box(left, y, length, 18, "a" if _ours(label) else "e")
            drawing.text(left + length + 6, y + 13.5, _text(row, column), "ink small")
    for number, (label, _) in enumerate(rows):
        drawing.text(20, HEAD + LINE * number + 13.5, label)
    return drawing


def _ours(label: str) -> bool:
    return label.startswith(("zero", "accelz"))


def _text(row: Row, column: Column) -> str:
    value = row[column.key] / column.scale
    return f"{value:.1f} {column.unit}" if value < 10 else f"{value:,.0f} {column.unit}"


def _texts(row: Row, columns: Sequence[Column]) -> Iterator[str]:
    return (_text(row, column) for column in columns if row[column.key] is not None)


MILLISECONDS = partial(Column, key="median", unit="ms", scale=1e-3)
SECONDS = partial(Column, key="median", unit="s")


def device_step() -> Drawing:
    """Two comparisons of their own, each with its baseline."""
    named = {
        "fsdp2": "FSDP2",
        "fsdp2-host": "FSDP2, CPUOffloadPolicy",
        "zero3-host-params": "zero3, all on host",
    }
    rows = [*rows_of("2026-11-26-h200-step"), *rows_of("2026-11-26-h200-offload")]
    return bars(
        "A step of 0.94 G parameters on one H200, bf16, AdamW",
        [(named.get(row["peer"], row["peer"]), row) for row in rows],
        (MILLISECONDS("a step"), Column("peak on the device", "rank_bytes", "GB", 1e9)),
    )


def consolidate() -> Drawing:
    named = {
        "zero fp32": "zero consolidate, fp32",
        "zero bf16": "zero consolidate, bf16",
        "zero_to_fp32": "DeepSpeed's zero_to_fp32",
    }
    return bars(
        "Whole weights of a checkpoint of 1 G parameters by 8 ranks",
        [
            (named.get(str(row["by"]), str(row["by"])), row)
            for row in rows_of("2026-11-22-consolidate-8-ranks")
        ],
        (SECONDS("from start to end"), Column("peak of the process", "peak_bytes", "MB", 1e6)),
    )


def compiled() -> Drawing:
    rows = rows_of("2026-11-22-compiled-5-gbit")
    return bars(
        "A step through torch.compile: 34 M parameters, two ranks, 5 Gbit/s",
        [(row["peer"].replace("fsdp2", "FSDP2"), row) for row in rows],
        (MILLISECONDS("a step"), Column("peak on the device", "peak_bytes", "MB", 1e6)),
    )


def collectives() -> Drawing:
    """Of the largest buffers, by what they go through."""
    by: dict[str, Row] = {}
    for row in rows_of("2026-11-25-collectives-2-ranks"):
        if row["bytes"] == 64_000_000:
            by.setdefault(row["through"], {})[row["operation"]] = row["median"]
    named = {
        "accelz": "accelz, shared memory",
        "lanes": "accelz, no shared memory",
        "copy": "a copy of the buffer",
    }
    names = ("all_gather", "reduce_scatter", "all_reduce")
    return bars(
        "Collectives of 64 MB between two ranks of one machine",
        [(named.get(through, f"plain {through}"), row) for through, row in by.items()],
        [Column(name.replace("_", "-"), name, "ms", 1e-3) for name in names],
    )


FIGURES: dict[str, Callable[[], Drawing]] = {
    "measured-device-step": device_step,
    "measured-consolidate": consolidate,
    "measured-compiled": compiled,
    "measured-collectives": collectives,
}
