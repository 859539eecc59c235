"""Results as tables on the terminal, as Markdown and as JSON: the same columns everywhere.

What is written for others has no absolute paths, which say nothing but where it was made.
"""

# ruff: noqa: RUF001 (multiplication signs in headings)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from scripts.paths import all_relative, relative

from benchmarks.result import Kind, Result

ABSENT = "–"


class Column(NamedTuple):
    key: str
    heading: str
    text: Callable[[Any], str] = str


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.0f}" if size >= 1e6 or not size else f"{size / 1e6:.2g}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def _small(value: float) -> str:
    return f"{value:.1e}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _yes(right: bool) -> str:
    return "yes" if right else "NO"


def _short(digest: str) -> str:
    return digest[:12]


def _loss(value: float) -> str:
    return f"{value:.5f}"


TIMES = (
    Column("median", "median ms", _milliseconds),
    Column("min", "min", _milliseconds),
    Column("max", "max", _milliseconds),
)
COLUMNS: dict[Kind, tuple[Column, ...]] = {
    "step": (
        Column("peer", "peer"),
        *TIMES,
        Column("to_plain", "× plain", _times),
        Column("to_fsdp2", "× fsdp2", _times),
        Column("to_fsdp2-host", "× fsdp2-host", _times),
        Column("to_fsdp2-hsdp", "× fsdp2-hsdp", _times),
        Column("to_deepspeed3-host", "× deepspeed3-host", _times),
        Column("to_zero3", "× zero3", _times),
        Column("rank_bytes", "rank MB", _megabytes),
        Column("node_bytes", "node MB", _megabytes),
        Column("moved_bytes", "moved MB", _megabytes),
        Column("first_loss", "first loss", _loss),
        Column("last_loss", "last loss", _loss),
        Column("loss_error", "loss error", _small),
    ),
    "compiled": (
        Column("peer", "peer"),
        *TIMES,
        Column("to_unfused", "× not fused", _times),
        Column("to_eager", "× eager", _times),
        Column("to_one_ahead", "× one ahead", _times),
        Column("to_fsdp2", "× fsdp2", _times),
        Column("to_fsdp2_autocast", "× fsdp2 autocast", _times),
        Column("gathered_bytes", "gathered MB", _megabytes),
        Column("reduced_bytes", "reduced MB", _megabytes),
        Column("peak_bytes", "peak MB", _megabytes),
        Column("peak_to_unfused", "peak × not fused", _times),
        Column("first_loss", "first loss", _loss),
        Column("last_loss", "last loss", _loss),
    ),
    "qlora": (
        Column("way", "way"),
        *TIMES,
        Column("to_unsharded", "× unsharded", _times),
        Column("rank_bytes", "rank MB", _megabytes),
        Column("node_bytes", "node MB", _megabytes),
        Column("to_bf16", "node × lora in bf16", _times),
        Column("first_loss", "first loss", _loss),
        Column("last_loss", "last loss", _loss),
    ),
    "offload": (
        Column("by", "optimizer step"),
        *TIMES,
        Column("bytes_per_parameter", "B per parameter", _times),
        Column("kernel_bytes_per_parameter", "by the kernel", _times),
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("of_raw", "of raw disk", _times),
        Column("to_deepspeed", "× deepspeed cpu", _times),
    ),
    "optimizer": (
        Column("case", "AdamW step"),
        *TIMES,
        Column("bytes", "MB", _megabytes),
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("to_cast", "× cast + fused + cast", _times),
        Column("to_fused", "× fused fp32", _times),
        Column("to_copy", "× copy", _times),
        Column("error", "error / lr", _small),
    ),
    "collectives": (
        Column("operation", "operation"),
        Column("bytes", "MB", _megabytes),
        Column("through", "through"),
        *TIMES,
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("speedup", "gloo's time ÷ its own", _times),
        Column("right", "right", _yes),
    ),
    "bandwidth": (
        Column("kernel", "kernel"),
        Column("dtypes", "dtypes"),
        Column("origin", "by"),
        Column("bytes", "MB", _megabytes),
        Column("median", "median ms", _milliseconds),
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("of_copy", "of copy", _times),
        Column("launch", "host µs", _microseconds),
    ),
    "bits": (
        Column("variant", "training"),
        Column("mode", "mode"),
        Column("repeats", "run again"),
        Column("alike", "beside"),
        Column("agrees", "beside it"),
        Column("right", "right", _yes),
        Column("last_loss", "last loss", _loss),
        Column("weights", "weights", _short),
    ),
    "saving": (
        Column("case", "what"),
        *TIMES,
        Column("bytes", "MB", _megabytes),
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("of_raw", "of raw write", _times),
        Column("cost", "cost", _percent),
    ),
    "consolidate": (
        Column("by", "by"),
        *TIMES,
        Column("bytes", "MB", _megabytes),
        Column("bytes_per_second", "GB/s", _gigabytes),
        Column("of_copy", "of copy", _times),
        Column("to_deepspeed", "× zero_to_fp32", _times),
        Column("peak_bytes", "peak MB", _megabytes),
        Column("equal", "bit-equal", _yes),
    ),
}
LEGENDS: dict[Kind, str] = {
    "step": (
        "Milliseconds per step, of the slowest rank. Ratios are taken within each round, then their median. "
        "rank: the largest peak resident set of a rank. node: peak PSS of all ranks. Both are taken during "
        "steps, above the imported processes, in a launch of their own; on a device with memory of its own "
        "they are its allocator's peaks, of a rank and of all. moved: a rank's collectives per "
        "step, as whole buffers, where the peer counts them. loss error: largest relative one, from ddp."
    ),
    "compiled": (
        "fp32 parameters under bf16 autocast (fsdp2: its bf16 policy, or autocast). Milliseconds "
        "per step, of the slowest rank; ratios are taken within each round, then their median. gathered, "
        "reduced: a rank's collectives per step, as whole buffers. peak: of device memory in steps; of "
        "the CPU's peers, exact, on the simulated device with operations run one by one."
    ),
    "qlora": (
        "Milliseconds per step, of the slowest rank. Ratios are taken within each round, then their median. "
        "rank: the largest peak resident set of a rank. node: peak PSS of all ranks. Both are taken during "
        "the first steps, above the imported processes. Unsharded, each rank trains by itself."
    ),
    "offload": (
        "Of the slowest rank, bf16 AdamW, gradients there already; ratios are taken within each round. raw "
        "disk: as many bytes, in the fastest pattern of the moment. B: read and written by all "
        "ranks, as asked for, and by the kernel's I/O statistics of the processes (/proc/self/io)."
    ),
    "optimizer": "MB: what the case itself reads and writes. error: against torch, after the first step.",
    "bandwidth": (
        "MB: what the kernel has to read and write. of copy: its bandwidth over that of a device copy. "
        "host µs: to start a call on 1,024 elements."
    ),
    "bits": (
        "Each variant trains twice, in two processes. run again: the second run's losses and weights beside "
        "the first's. beside: a variant that must give the same bits. deterministic: kernels that give the "
        "same bits twice. late: the same, with side streams delayed at random. default: the kernels that a "
        "user gets, for which nothing is required. weights: the start of their digest."
    ),
    "saving": (
        "Of the slowest rank; ratios are taken within each round. raw write: as many bytes by every rank, "
        "around the page cache from four threads, and synced. Training: all steps of a turn, until the last "
        "save is over."
    ),
    "consolidate": (
        "From the start of the process to its end; files to be read are dropped from the page cache before. "
        "copy: of the fp32 bytes, read and written around it by as many threads, and synced. of copy: bytes "
        "a second, in and out. Ratios are taken within each round. peak: resident."
    ),
    "collectives": (
        "MB: the whole buffer. accelz: shared memory. lanes: accelz between ranks that share none. copy: of "
        "a buffer of that size, for comparison."
    ),
}


def _between_hosts(settings: dict[str, Any]) -> str:
    link = settings.get("link")
    return "" if link is None else f" on two hosts at {link:g} Gbit/s"


def title(result: Result) -> str:
    """One line that distinguishes this result from others."""
    s = result.settings
    if result.kind == "step":
        return (
            f"step on {s['device']}: {s['size']} ({s['parameters'] / 1e6:.1f} M parameters), "
            f"{s['precision']}, {s.get('optimizer', 'adamw')}, "
            f"{_count(s['ranks'], 'rank')} × {_count(s['threads'], 'thread')}{_between_hosts(s)}, "
            f"batch {s['batch']} × {s['length']} per rank"
        )
    if result.kind == "compiled":
        link = "" if s["link"] is None else f" at {s['link']:g} Gbit/s"
        where = s.get("device", "cpu")
        over = f" over gloo{link}" if where == "cpu" else f" on {where}"
        return (
            f"compiled: {s['size']} ({s['parameters'] / 1e6:.1f} M parameters), "
            f"{_count(s['ranks'], 'rank')} × {_count(s['threads'], 'thread')}{over}, "
            f"batch {s['batch']} × {s['length']} per rank"
        )
    if result.kind == "qlora":
        return (
            f"qlora: {s['size']} ({s['parameters'] / 1e6:.1f} M parameters), "
            f"{_count(s['ranks'], 'rank')} × {_count(s['threads'], 'thread')}, "
            f"batch {s['batch']} × {s['length']} per rank"
        )
    if result.kind == "offload":
        return f"offload: {s['parameters'] / 1e6:.1f} M parameters, {_count(s['ranks'], 'rank')}"
    if result.kind == "optimizer":
        return f"optimizer: {s['elements'] / 1e6:.1f} M elements, {_count(s['threads'], 'thread')}"
    if result.kind == "bits":
        return (
            f"bits on {s['device']}: {s['size']} ({s['parameters'] / 1e6:.1f} M parameters), "
            f"{s['precision']}, {_count(s['ranks'], 'rank')}, {s['steps']} steps of {s['batch']} × "
            f"{s['length']} per rank"
        )
    if result.kind == "bandwidth":
        millions = s["elements"] / 1e6
        return f"kernels on {s['device']}: {millions:.1f} M elements, {_count(s['threads'], 'thread')}"
    if result.kind == "saving":
        return (
            f"saving: {s['parameters'] / 1e6:.1f} M parameters, {s['precision']}, "
            f"{_count(s['ranks'], 'rank')}; turns of {s['steps']} steps, a save in the background every "
            f"{s['every']}"
        )
    if result.kind == "consolidate":
        return (
            f"consolidate: {s['parameters'] / 1e6:.0f} M parameters of {_count(s['ranks'], 'rank')}, "
            f"{_count(s['workers'], 'worker')}"
        )
    return f"collectives: bf16, {_count(s['ranks'], 'rank')}"


def show(console: Console, results: Sequence[Result]) -> None:
    """Print every result as a table."""
    for result in results:
        table = Table(title=title(result), caption=LEGENDS[result.kind], title_justify="left")
        for index, heading in enumerate(c.heading for c in _columns(result)):
            table.add_column(heading, justify="right" if index else "left")
        for cells in _cells(result):
            table.add_row(*cells)
        console.print(table)
        for note in result.notes:
            console.print(f"note: {note}", highlight=False)


def as_markdown(context: dict[str, Any], results: Sequence[Result]) -> str:
    lines = [_headline(context), "", f"`{context['command']}`"]
    for result in results:
        headings = [c.heading for c in _columns(result)]
        lines += ["", f"## {title(result)}", "", _markdown_row(headings)]
        lines.append(_markdown_row(["---", *("---:" for _ in headings[1:])]))
        lines += [_markdown_row(cells) for cells in _cells(result)]
        lines += ["", LEGENDS[result.kind], *(f"\n{note[0].upper()}{note[1:]}." for note in result.notes)]
    return relative("\n".join(lines)) + "\n"


def as_json(context: dict[str, Any], results: Sequence[Result]) -> str:
    plain = all_relative({**context, "results": [asdict(r) for r in results]})
    return json.dumps(plain, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """Write `text`, making the directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _headline(context: dict[str, Any]) -> str:
    machine, versions = context["machine"], context["versions"]
    accelerators = f"{machine['accelerators']}, " if machine.get("accelerators") else ""
    allocator = f"{machine['allocator']}, " if machine.get("allocator") else ""
    return (
        f"{context['date']}: {machine['cpu']}, {_count(machine['cores'], 'core')}, "
        f"{machine['memory'] / 2**30:.0f} GiB, {accelerators}{allocator}load {machine['load']} at the start; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
    )


def _columns(result: Result) -> list[Column]:
    """The columns for which any row has a value."""
    return [c for c in COLUMNS[result.kind] if any(row[c.key] is not None for row in result.rows)]


def _cells(result: Result) -> list[list[str]]:
    columns = _columns(result)
    return [[ABSENT if row[c.key] is None else c.text(row[c.key]) for c in columns] for row in result.rows]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
