"""Plans for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero.planning.memory import TIERS
from zero.planning.plan import Plan
from zero.sizes import human


def describe(plan: Plan) -> str:
    """A few tables; all bytes are of one rank."""
    return "\n".join((_headline(plan), "", *_state(plan), "", *_peaks(plan), "", *_traffic(plan)))


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines: the first column to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _headline(plan: Plan) -> str:
    frozen = plan.parameters - plan.trainable
    parts = [
        f"{plan.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else ""),
        f"stage {plan.config.stage}, precision {plan.config.precision!r}",
        f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}, {len(plan.units)} units",
        "bytes of each rank:",
    ]
    return "\n".join(parts)


def _state(plan: Plan) -> list[str]:
    memory = plan.memory
    rows = [["between steps", *TIERS]]
    for name in ("parameters", "optimizer"):
        rows.append([name, *(_bytes(getattr(memory.rest[tier], name)) for tier in TIERS)])
    rows.append(["gradients, until the step", *(_bytes(memory.gradients[tier]) for tier in TIERS)])
    if memory.buffers:
        rows.append(["buffers of the disk", "-", _bytes(memory.buffers), "-"])
    return table(rows)


def _peaks(plan: Plan) -> list[str]:
    rows = [["peak on the device", "all", "parameters", "gathered", "gradients", "optimizer"]]
    for phase, held in plan.memory.peaks.items():
        parts = held.total, held.parameters, held.gathered, held.gradients, held.optimizer
        rows.append([phase, *map(_bytes, parts)])
    return [*table(rows), "besides activations, buffers of modules, and what libraries take"]


def _traffic(plan: Plan) -> list[str]:
    traffic = plan.traffic
    moved = {kind.replace("_", "-"): nbytes for kind, nbytes in traffic.collectives.items()}
    moved |= {
        "sent to other ranks": traffic.link,
        "device to host": traffic.to_host,
        "host to device": traffic.to_device,
        "read from disk": traffic.read,
        "written to disk": traffic.written,
    }
    rows = [[name, _bytes(nbytes)] for name, nbytes in moved.items() if nbytes]
    return table([["moved in an optimizer step", ""], *rows]) if rows else ["nothing moves"]


def _bytes(nbytes: int) -> str:
    return human(nbytes) if nbytes else "-"
