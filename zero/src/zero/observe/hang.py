"""`zero explain-hang`: from all ranks' flights, one sentence about what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from zero.observe.flight_file import Collective, Flight

_WAITING = ("waited for", "beginning", "failed")


@dataclass(frozen=True)
class _Rank:
    """A rank in one line. alike: as in `Issuing`. elsewhere: whether it waits in another line."""

    rank: int
    place: str
    alike: tuple[int, ...]
    collectives: tuple[Collective, ...]
    elsewhere: bool


def explain(flights: Sequence[Flight]) -> str:
    """flights: of the ranks of one job that have written any; at least one."""
    lines = list(_lines(flights))
    absences = sorted(filter(None, map(_absence, lines)), key=lambda absence: absence[0])
    told = [*map(_difference, lines), *(text for _, text in absences), *map(_stuck, lines)]
    return next(filter(None, told), "") or _nowhere(flights)


def table(flights: Sequence[Flight]) -> list[str]:
    """A line for each rank: where it is, and the last collective that it has not left."""
    told = []
    for flight in flights:
        held = [last for line in flight.lines if (last := _held_up(line.collectives))]
        every = held or [line.collectives[-1] for line in flight.lines if line.collectives]
        # Of several, the one that was issued last.
        last = min(every, key=lambda each: each.seconds, default=None)
        text = "no collective" if last is None else f"{_named(last)}: {last.state}, {last.seconds:.1f} s"
        told.append(f"rank {flight.rank} ({flight.host}, pid {flight.pid}): {text}; at {flight.place}")
    return told


def _lines(flights: Sequence[Flight]) -> Iterator[list[_Rank]]:
    """Each line as its ranks have it, the one in which the last was issued first. One that has not come to it
    has issued nothing there."""
    last: dict[tuple[str, tuple[int, ...]], float] = {}
    for line in (line for flight in flights for line in flight.lines):
        seconds = line.collectives[-1].seconds if line.collectives else inf
        place = line.key, line.alike
        last[place] = min(last.get(place, inf), seconds)
    for key, alike in sorted(last, key=last.__getitem__):
        found = []
        for flight in flights:
            if flight.rank in alike:
                issued = [line.collectives for line in flight.lines if line.key == key]
                others = (line.collectives for line in flight.lines if line.key != key)
                elsewhere = any(map(_held_up, others))
                found.append(_Rank(flight.rank, flight.place, alike, issued[0] if issued else (), elsewhere))
        yield found


def _difference(ranks: Sequence[_Rank]) -> str:
    """Where sequences part first; "" if they do not."""
    by_number: dict[int, dict[str, list[tuple[_Rank, Collective]]]] = defaultdict(lambda: defaultdict(list))
    for each in ranks:
        for one in each.collectives:
            by_number[one.number][one.text].append((each, one))
    for number, alike in sorted(by_number.items()):
        if len(alike) > 1:
            sides = [f"{text} on {_ranks(f for f, _ in who)}{_at(who[0][1])}" for text, who in alike.items()]
            return f"The ranks issued different collectives: number {number} is {', but '.join(sides)}."
    return ""


def _absence(ranks: Sequence[_Rank]) -> tuple[bool, str] | None:
    """Who has not come to where others wait, and whether that is because they wait elsewhere; None if all
    have."""
    waiting, held = _waiting(ranks)
    if held is None:
        return None
    there = [each for each, one in waiting if one.number == held.number]
    seconds = max(one.seconds for _, one in waiting if one.number == held.number)
    wait = f"{_ranks(there)} {_have(there)} waited for {seconds:.0f} s in {_named(held)}"
    silent = sorted(set(ranks[0].alike) - {each.rank for each in ranks})
    if silent:
        missed = "s" if len(silent) > 1 else ""
        return False, (
            f"Rank{missed} {', '.join(map(str, silent))} wrote nothing, dead or without a view of this "
            f"folder, and {wait}."
        )
    behind = [each for each in ranks if max((c.number for c in each.collectives), default=0) < held.number]
    if not behind:
        return None
    where = "; ".join(f"rank {each.rank} is at {each.place}" for each in behind)
    text = f"{_ranks(behind).capitalize()} {_have(behind)} not come to where {wait}: {where}."
    return all(each.elsewhere for each in behind), text


def _stuck(ranks: Sequence[_Rank]) -> str:
    """In what ranks wait that all have come to; "" if none waits."""
    waiting, held = _waiting(ranks)
    if held is None:
        return ""
    if len(waiting) == len(ranks) and all(each.number == held.number for _, each in waiting):
        return f"All ranks have come to {_named(held)}, and none gets on: check the connections between them."
    return (
        f"{_ranks(f for f, _ in waiting).capitalize()} wait in {_named(held)}, which the others "
        "have left or begun: the device of one of these is busy, or has failed."
    )


def _nowhere(flights: Sequence[Flight]) -> str:
    places = "; ".join(f"rank {flight.rank} is at {flight.place}" for flight in flights)
    return f"No rank waits in a collective: {places}."


def _held_up(collectives: Sequence[Collective]) -> Collective | None:
    """The last of a line that the rank waits in, as earlier ones may have been given up; None if it waits in
    none."""
    return next((each for each in reversed(collectives) if each.state in _WAITING), None)


def _waiting(ranks: Iterable[_Rank]) -> tuple[list[tuple[_Rank, Collective]], Collective | None]:
    """The ranks that wait, each with the collective, and the last of these; None if none waits."""
    found = [(each, held) for each in ranks if (held := _held_up(each.collectives))]
    return found, max((held for _, held in found), key=lambda held: held.number, default=None)


def _named(each: Collective) -> str:
    return f"collective {each.number}, {each.text}"


def _at(each: Collective) -> str:
    return f" (from {each.at})" if each.at else ""


def _ranks(ranks: Iterable[_Rank]) -> str:
    numbers = [str(each.rank) for each in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _have(ranks: Sequence[_Rank]) -> str:
    return "has" if len(ranks) == 1 else "have"
