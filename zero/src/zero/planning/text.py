"""Plans for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero.config.sizes import human
from zero.planning.activations import Flops
from zero.planning.memory import MemoryPlan
from zero.planning.step_time import TimePlan
from zero.planning.traffic import TrafficPlan
from zero.tiers.tier import TIERS

_BAR = 48  # characters
_MARKS = {"parameters": "█", "gathered": "▒", "gradients": "▓", "optimizer": "░", "activations": "·"}


_BOUND = {
    "compute": "computing",
    "link": "what ranks send each other",
    "host": "what moves between device and host",
}


def describe(memory: MemoryPlan, traffic: TrafficPlan, flops: Flops | None, time: TimePlan | None) -> str:
    """A few tables; all bytes are of one rank."""
    tables = [_state(memory), _peaks(memory), _chart(memory), _traffic(traffic)]
    if flops is not None:
        tables.append(_flops(flops))
    if time is not None:
        tables.append(_time(time))
    return "\n\n".join(map("\n".join, tables))


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


def _flops(flops: Flops) -> list[str]:
    parts = {"forward": flops.forward, "backward": flops.backward, "recomputed": flops.recomputed}
    rows = [[name, f"{count:.3g}"] for name, count in parts.items() if count]
    return table([["operations per optimizer step", f"{flops.all:.3g}"], *rows])


def _time(time: TimePlan) -> list[str]:
    rows = [[_BOUND[name], seconds(part)] for name, part in time.parts.items() if part]
    rows.append(["all of it at once", seconds(time.overlapped)])
    rows.append(["one after another", seconds(time.in_turn)])
    lines = table([["least time of an optimizer step", ""], *rows])
    lines.append(f"bound by {_BOUND[time.bound_by]}")
    if time.balanced_batch is not None:
        lines[-1] += f"; a batch {time.balanced_batch:.3g} times as large takes as long to compute"
    return lines


def seconds(value: float) -> str:
    """Format a time for people."""
    for unit in ("s", "ms"):
        if value >= 0.9995:
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
        value *= 1000
    return f"{value:.3g} µs"


def _bytes(nbytes: int) -> str:
    return human(nbytes) if nbytes else "-"
