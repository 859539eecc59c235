"""`zero explain-hang`: from all ranks' flights, one sentence about what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from zero.observe.flight_file import Collective, Flight

_WAITING = ("waited for", "beginning", "failed")


def explain(flights: Sequence[Flight]) -> str:
    """flights: of the ranks of one job that have written any; at least one."""
    sets = [[f for f in flights if f.alike == alike] for alike in dict.fromkeys(f.alike for f in flights)]
    told = [*map(_difference, sets), *map(_absence, sets), *map(_stuck, sets)]
    return next(filter(None, told), "") or _nowhere(flights)


def table(flights: Sequence[Flight]) -> list[str]:
    """A line for each rank: where it is, and the last collective that it has not left."""
    lines = []
    for flight in flights:
        last = _held_up(flight) or (flight.collectives[-1] if flight.collectives else None)
        told = "no collective" if last is None else f"{_named(last)}: {last.state}, {last.seconds:.1f} s"
        lines.append(f"rank {flight.rank} ({flight.host}, pid {flight.pid}): {told}; at {flight.place}")
    return lines


def _difference(flights: Sequence[Flight]) -> str:
    """Where sequences part first; "" if they do not."""
    by_number: dict[int, dict[str, list[tuple[Flight, Collective]]]] = defaultdict(lambda: defaultdict(list))
    for flight in flights:
        for each in flight.collectives:
            by_number[each.number][each.text].append((flight, each))
    for number, alike in sorted(by_number.items()):
        if len(alike) > 1:
            sides = [f"{text} on {_ranks(f for f, _ in who)}{_at(who[0][1])}" for text, who in alike.items()]
            return f"The ranks issued different collectives: number {number} is {', but '.join(sides)}."
    return ""


def _absence(flights: Sequence[Flight]) -> str:
    """Who has not come to where others wait; "" if all have."""
    waiting = [(flight, held) for flight in flights if (held := _held_up(flight))]
    if not waiting:
        return ""
    number, held = _latest(waiting)
    there = [flight for flight, each in waiting if each.number == number]
    seconds = max(each.seconds for _, each in waiting if each.number == number)
    wait = f"{_ranks(there)} {_have(there)} waited for {seconds:.0f} s in {_named(held)}"
    silent = sorted(set(flights[0].alike) - {flight.rank for flight in flights})
    if silent:
        missed = "s" if len(silent) > 1 else ""
        return (
            f"Rank{missed} {', '.join(map(str, silent))} wrote nothing, dead or without a view of this "
            f"folder, and {wait}."
        )
    behind = [f for f in flights if max((c.number for c in f.collectives), default=0) < number]
    if not behind:
        return ""
    where = "; ".join(f"rank {flight.rank} is at {flight.place}" for flight in behind)
    return f"{_ranks(behind).capitalize()} {_have(behind)} not come to where {wait}: {where}."


def _stuck(flights: Sequence[Flight]) -> str:
    """In what ranks wait that all have come to; "" if none waits."""
    waiting = [(flight, held) for flight in flights if (held := _held_up(flight))]
    if not waiting:
        return ""
    number, held = _latest(waiting)
    if len(waiting) == len(flights) and all(each.number == number for _, each in waiting):
        return f"All ranks have come to {_named(held)}, and none gets on: check the connections between them."
    return (
        f"{_ranks(f for f, _ in waiting).capitalize()} wait in {_named(held)}, which the others "
        "have left or begun: the device of one of these is busy, or has failed."
    )


def _nowhere(flights: Sequence[Flight]) -> str:
    places = "; ".join(f"rank {flight.rank} is at {flight.place}" for flight in flights)
    return f"No rank waits in a collective: {places}."


def _held_up(flight: Flight) -> Collective | None:
    """The last collective that the rank waits in, as earlier ones may have been given up; None if it waits in
    none."""
    return next((each for each in reversed(flight.collectives) if each.state in _WAITING), None)


def _latest(waiting: Iterable[tuple[Flight, Collective]]) -> tuple[int, Collective]:
    held = max((each for _, each in waiting), key=lambda each: each.number)
    return held.number, held


def _named(each: Collective) -> str:
    return f"collective {each.number}, {each.text}"


def _at(each: Collective) -> str:
    return f" (from {each.at})" if each.at else ""


def _ranks(flights: Iterable[Flight]) -> str:
    numbers = [str(flight.rank) for flight in flights]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _have(flights: Sequence[Flight]) -> str:
    return "has" if len(flights) == 1 else "have"
