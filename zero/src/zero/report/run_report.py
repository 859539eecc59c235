"""The page of a run: `zero report RUN`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

from zero.config.sizes import human
from zero.report import timeline
from zero.report.figures import COLOURS, Spec, Unit, areas, bars, capped, lines, safe
from zero.report.page import Figure, Page, Section, Table
from zero.report.records import POINTS, Records, Row

_PHASES = ("outside", "forward", "backward", "step", "evaluation", "checkpoint")
_HELD = ("parameters", "gathered", "gradients", "optimizer")
_ROOM = ("allocated", "peak", "capacity", *_HELD)
_LATEST = 200  # events shown


def run_page(records: Records) -> Page:
    run = records.runs[-1] if records.runs else {}
    sections = [
        Section("Training", list(_training(records))),
        Section("Speed", list(_speed(records))),
        Section("Memory", list(_memory(records))),
        Section("Traffic", list(_traffic(records))),
        Section("Events and settings", list(_rest(records, run))),
    ]
    return Page(_title(records), sections, _facts(records, run), _numbers(records))


# -- sections -------------------------------------------------------------------------------------------


def _training(records: Records) -> Iterator[Figure | Table]:
    logged = records.names()
    losses = [name for name in logged if name.split("/")[-1].endswith("loss") or name.startswith("val")]
    if losses:
        yield Figure("Loss", _lines(records, losses, "loss"), _means(records), wide=True)
    for name, title in (("grad_norm", "Gradient norm, before clipping"), ("learning_rate", "Learning rate")):
        if records.column(name):
            yield Figure(title, _lines(records, [name], title.partition(",")[0].lower()))
    if records.column("loss_scale"):
        skipped = sum(bool(n) for n in records.column("skipped"))
        note = f"{skipped} steps were skipped, as gradients overflowed."
        yield Figure("Loss scale", _lines(records, ["loss_scale"], "loss scale"), note)
    for name in logged:
        if name not in losses:
            yield Figure(name, _lines(records, [name], name))


def _speed(records: Records) -> Iterator[Figure | Table]:
    if records.column("tokens_per_second"):
        yield Figure(
            "Throughput", _lines(records, ["tokens_per_second"], "tokens per second"), "Of all ranks."
        )
    if records.column("mfu"):
        note = "Model FLOPs utilization: the share of the device's peak that the model's own operations take."
        yield Figure("MFU", _lines(records, ["mfu"], "MFU", "%"), note)
    phases = [name for name in _PHASES if name in records.names("seconds")]
    if phases:
        colours = dict(zip(phases, COLOURS, strict=False))
        note = "The device's time. Outside is everything else since the step before, such as loading data."
        rows = records.rows(phases, "seconds")
        spec, cut = _without_spikes(areas(rows, colours, "seconds", "s"), rows, phases)
        yield Figure("Time per step, by phase", spec, note + cut)
        means = {name: fmean(records.column(f"seconds/{name}")) for name in phases}
        yield Figure(
            "Mean time in a phase", bars(means, "phase", "seconds", "s"), "Over the steps that had it."
        )
    if any(records.column("waited")):
        note = "Of the host; a device that works by itself need not have waited."
        yield Figure("Waited for collectives", _lines(records, ["waited"], "seconds of a step", "s"), note)


def _memory(records: Records) -> Iterator[Figure | Table]:
    there = records.names("memory")
    held = {name: timeline.COLOURS[name] for name in _HELD if name in there}
    if held:
        note = "Bytes of the device after a step, by the engine's own accounting; looked up once a second."
        rows = records.rows(list(held), "memory")
        yield Figure("Held by the engine", areas(rows, held, "bytes", "B"), note)
    ranks = [name for name in there if name not in _ROOM]
    totals = [name for name in ("allocated", "peak") if name in there] + ranks
    if totals:
        capacity = max(records.column("memory/capacity"), default=0)
        note = f"The device has {human(capacity)}." if capacity else ""
        yield Figure("In use", _lines(records, totals, "bytes", "B", "memory"), note)
    traced = [event for event in records.events if event["event"] == "memory" and event.get("details")]
    if traced:
        yield from timeline.parts(traced[-1]["details"], f"Memory inside step {traced[-1]['step']}")


def _traffic(records: Records) -> Iterator[Figure | Table]:
    if units := records.units():
        note = "Whole buffers of gathers and reductions that this rank takes part in, in a step."
        yield Figure("Collectives, by unit", bars(units, "unit", "bytes per step", "B"), note)
    if rates := records.names("rates"):
        note = "Whole buffers of collectives, and copies; once a second, of what was waited for."
        yield Figure("Achieved bandwidth", _lines(records, rates, "bytes per second", "B/s", "rates"), note)
    if moved := records.names("moved"):
        yield Figure("Between tiers", _lines(records, moved, "bytes per step", "B", "moved"))
    rows = [_collective(records, name) for name in records.names("calls")]
    if rows:
        yield Table("Collectives of a step", ("kind", "calls", "bytes", "bytes per second"), rows, "Means.")


def _collective(records: Records, name: str) -> tuple[str, ...]:
    calls, nbytes = (fmean(records.column(f"{kind}/{name}") or [0.0]) for kind in ("calls", "bytes"))
    rates = records.column(f"rates/{name}")
    return name, f"{calls:.4g}", human(nbytes), f"{human(median(rates))}/s" if rates else ""


def _rest(records: Records, run: Row) -> Iterator[Figure | Table]:
    if records.events:
        began = records.steps[0]["time"]
        rows = [_event(event, began) for event in records.events[-_LATEST:]]
        hidden = len(records.events) - len(rows)
        note = f"The last {len(rows)}; {hidden} came before." if hidden else ""
        yield Table("Events", ("step", "after", "what", "", "bytes", "time"), rows, note)
    settings = {name: value for name, value in run.get("settings", {}).items() if value is not None}
    if settings:
        rows = [(name, str(value)) for name, value in settings.items()]
        yield Table("Settings", ("zero.Config", ""), rows)


def _event(event: Row, began: float) -> tuple[str, ...]:
    seconds = event.get("seconds", {})
    told = ", ".join(f"{phase} {_duration(s)}" for phase, s in seconds.items())
    nbytes = human(event["bytes"]) if event.get("bytes") else ""
    after = _clock(max(event.get("time", began) - began, 0.0))
    return str(event["step"]), after, str(event["event"]), str(event.get("text", "")), nbytes, told


# -- what comes first -----------------------------------------------------------------------------------


def _title(records: Records) -> str:
    path = records.path.resolve()
    return path.parent.name if path.stem == "metrics" and path.parent.name else path.stem


def _facts(records: Records, run: Row) -> str:
    """A line about the job."""
    first, last = records.steps[0], records.steps[-1]
    told = [f"steps {first['step']:,} to {last['step']:,}", _clock(last["time"] - first["time"])]
    if run:
        ranks = run["world_size"]
        told = [
            f"{run['model']}, {run['parameters'] / 1e6:,.4g} M parameters",
            f"{ranks} rank{'s' * (ranks != 1)}, rank {run['rank']} on {run['device']}",
            *told,
        ]
    if len(records.runs) > 1:
        told.append(f"begun {len(records.runs)} times")
    return " · ".join(told)


def _numbers(records: Records) -> dict[str, str]:
    """The figures to see first, as far as they are known."""
    found: dict[str, str] = {}

    def tell(
        title: str, name: str, pick: Callable[[list[float]], float], text: Callable[[float], str]
    ) -> None:
        if values := records.column(name):
            found[title] = text(pick(values))

    tell("last loss", "loss", _last, "{:.4g}".format)
    for name in records.names():
        if name.startswith(("val", "eval")):
            word, pick = ("best", min) if name.endswith("loss") else ("last", _last)
            tell(f"{word} {name.replace('_', ' ')}", name, pick, "{:.4g}".format)
            break
    tell("tokens per second", "tokens_per_second", median, "{:,.0f}".format)
    tell("MFU", "mfu", median, "{:.1%}".format)
    tell("time per step", "seconds", median, _duration)
    tell("peak memory", "memory/peak", max, human)
    tell("skipped steps", "loss_scale", lambda _: sum(map(bool, records.column("skipped"))), "{:.0f}".format)
    return found


# -- helpers --------------------------------------------------------------------------------------------


def _lines(records: Records, names: list[str], y: str, unit: Unit = "", kind: str = "") -> Spec:
    rows: list[dict[str, Any]] = [
        {safe(name): value for name, value in row.items()} for row in records.rows(names, kind)
    ]
    return lines(rows, [safe(name) for name in names], y, unit)


def _without_spikes(spec: Spec, rows: list[dict[str, Any]], names: list[str]) -> tuple[Spec, str]:
    """The picture of sums, up to what is usual, and a note if that leaves something out: the first steps, in
    which memory is found and kernels are compiled, would press all others flat."""
    sums = sorted(sum(row[name] or 0 for name in names) for row in rows)
    usual, most = sums[int(0.95 * (len(sums) - 1))], sums[-1]
    if most <= 3 * usual:
        return spec, ""
    return capped(spec, 1.5 * usual), f" Spikes of up to {_duration(most)} are cut off."


def _means(records: Records) -> str:
    each = -(-len(records.steps) // POINTS)
    return f"Each point is the mean of {each} steps." if each > 1 else ""


def _last(values: list[float]) -> float:
    return values[-1]


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
