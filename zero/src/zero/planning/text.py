"""Plans for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero.config.sizes import human
from zero.planning.memory import MemoryPlan
from zero.planning.traffic import TrafficPlan
from zero.tiers.tier import TIERS

_BAR = 48  # characters
_MARKS = {"parameters": "█", "gathered": "▒", "gradients": "▓", "optimizer": "░", "activations": "·"}


def describe(memory: MemoryPlan, traffic: TrafficPlan) -> str:
    """A few tables; all bytes are of one rank."""
    return "\n".join((*_state(memory), "", *_peaks(memory), "", *_chart(memory), "", *_traffic(traffic)))


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """The rows as lines: the first column to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _state(memory: MemoryPlan) -> list[str]:
    rows = [["between steps", *(tier.name for tier in TIERS)]]
    for name in ("parameters", "optimizer"):
        rows.append([name, *(_bytes(getattr(memory.rest[tier.name], name)) for tier in TIERS)])
    rows.append(["gradients, until the step", *(_bytes(memory.gradients[tier.name]) for tier in TIERS)])
    if memory.buffers:
        buffers = [_bytes(memory.buffers) if tier.in_host_memory else "-" for tier in TIERS]
        rows.append(["disk buffers", *buffers])
    return table(rows)


def _peaks(memory: MemoryPlan) -> list[str]:
    known = ["activations"] if memory.activations else []
    rows = [["peak on the device", "all", "parameters", "gathered", "gradients", "optimizer", *known]]
    for phase, held in memory.peaks.items():
        parts = memory.total(phase), held.parameters, held.gathered, held.gradients, held.optimizer
        alive = [memory.activations.get(phase, 0)] if known else []
        rows.append([phase, *map(_bytes, (*parts, *alive))])
    rest = "module buffers" if known else "activations, module buffers"
    return [*table(rows), f"in addition: {rest}, and what libraries take"]


def _chart(memory: MemoryPlan) -> list[str]:
    """The peaks as bars, whose parts are as long as they are large."""
    most = max(memory.device, 1)
    lines = []
    for phase, held in memory.peaks.items():
        parts = [getattr(held, name) for name in _MARKS if name != "activations"]
        parts.append(memory.activations.get(phase, 0))
        ends = [round(_BAR * sum(parts[: n + 1]) / most) for n in range(len(parts))]
        lengths = (end - begin for begin, end in zip([0, *ends], ends, strict=False))
        bar = "".join(mark * length for mark, length in zip(_MARKS.values(), lengths, strict=True))
        lines.append(f"{phase:8}  {bar:{_BAR}}  {_bytes(memory.total(phase))}".rstrip())
    known = [name for name in _MARKS if name != "activations" or memory.activations]
    return [*lines, " " * 10 + "  ".join(f"{_MARKS[name]} {name}" for name in known)]


def _traffic(traffic: TrafficPlan) -> list[str]:
    moved = {kind.replace("_", "-"): nbytes for kind, nbytes in traffic.collectives.items()}
    moved |= {
        "sent to other ranks": traffic.link,
        "of which to other copies": traffic.to_copies,
        "device to host": traffic.to_host,
        "host to device": traffic.to_device,
        "read from disk": traffic.read,
        "written to disk": traffic.written,
    }
    rows = [[name, _bytes(nbytes)] for name, nbytes in moved.items() if nbytes]
    return table([["moved per optimizer step", ""], *rows]) if rows else ["nothing moves"]


def _bytes(nbytes: int) -> str:
    return human(nbytes) if nbytes else "-"
