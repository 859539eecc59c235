"""Which units stay gathered until the weights change: those whose gathers cost the most time per byte.

All ranks decide this together after the first steps. Two steps are watched for what they gather and for their
highest point in memory; then each unit is gathered alone a few times and timed. What persisting saves is the
gathers that are repeated within a step, in the backward or in a later micro-batch. When later steps come too
close to what the device has, the units worth least are given up again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from accelz import Accelerator
from zero.communication.communicator import Communicator
from zero.compiled.ops import ALLGATHER, RELEASE, WAIT
from zero.compiled.runtime import Gathered, Profile, Runtime
from zero.tiers.room import usable

WARM_UP = 2  # steps before: graphs are compiled, and offload="auto" places optimizer state
WATCHED = 2  # steps
REPEATS = 3  # gathers of each unit that are timed; the fastest counts


@dataclass(frozen=True)
class PersistCandidate:
    """A unit that may persist. nbytes: what it then takes, besides memory that ranks have in common, on the
    rank where that is most. saved: gathers saved per step. seconds: of one gather. Both are means over the
    ranks.
    """

    unit: str
    what: Gathered
    nbytes: int
    saved: float
    seconds: float

    @property
    def worth(self) -> float:
        """Seconds per step that each byte saves."""
        return self.saved * self.seconds / max(self.nbytes, 1)


def choose(candidates: Iterable[PersistCandidate], room: int) -> tuple[PersistCandidate, ...]:
    """Choose those with the most worth per byte first, as far as `room` bytes go; equals in the order
    given."""
    chosen: list[PersistCandidate] = []
    for candidate in sorted(candidates, key=lambda c: -c.worth):
        if candidate.saved > 0 and candidate.nbytes <= room:
            room -= candidate.nbytes
            chosen.append(candidate)
    return tuple(chosen)


@dataclass(eq=False, repr=False)
class Persistence:
    """budget: bytes that units may take on each rank; "auto": what the watched steps left of the device.

    chosen: units that persist, worth most first. room: the budget in bytes; None before it is decided.
    """

    runtime: Runtime
    accelerator: Accelerator
    communicator: Communicator
    budget: int | Literal["auto"]

    def __post_init__(self) -> None:
        self.chosen: tuple[PersistCandidate, ...] = ()
        self.room: int | None = None
        self._steps = 0

    def after_step(self) -> None:
        """Collective. Called between optimizer steps."""
        if self.room is not None:
            self._follow_growth()
        elif self.budget != 0:
            self._watch()

    def _watch(self) -> None:
        self._steps += 1
        if self._steps == WARM_UP:
            self.runtime.profile = Profile(self.accelerator.memory)
        elif self._steps == WARM_UP + WATCHED:
            profile, self.runtime.profile = self.runtime.profile, None
            assert profile is not None
            self._decide(profile)
        self.accelerator.memory.reset_peak()

    def _follow_growth(self) -> None:
        memory, exact = self.accelerator.memory, self.accelerator.capabilities.exact_memory
        if not (self.chosen and exact and self.budget == "auto"):
            return
        excess = memory.stats().peak - usable(self.accelerator)
        if self.communicator.agree(excess > 0):
            self._give_up(max(self.communicator.all_gather_object(excess)))
            memory.reset_peak()

    def _give_up(self, nbytes: int) -> None:
        """Let the units go that are worth least, until this many bytes are free."""
        assert self.room is not None
        while self.chosen and nbytes > 0:
            *stay, last = self.chosen
            self.runtime.set_persistent(last.what, False)
            self.chosen, nbytes, self.room = tuple(stay), nbytes - last.nbytes, self.room - last.nbytes

    @torch.no_grad()
    def _decide(self, profile: Profile) -> None:
        self.runtime.invalidate(self.runtime.units)
        candidates = self._candidates(profile)
        self.room = min(self.communicator.all_gather_object(self._room(profile.peak)))
        self.chosen = choose(candidates, self.room)
        for candidate in self.chosen:
            self.runtime.set_persistent(candidate.what, True)

    def _candidates(self, profile: Profile) -> list[PersistCandidate]:
        """The candidates, the same on every rank."""
        repeated = self._repeated(profile)
        with self.runtime.unseen():
            mine = [
                (profile.gathers[what] / WATCHED - 1, self._seconds(what), self.runtime.nbytes(what))
                for what in repeated
            ]
        found = []
        for what, of_ranks in zip(
            repeated, zip(*self.communicator.all_gather_object(mine), strict=True), strict=True
        ):
            saved, seconds, nbytes = zip(*of_ranks, strict=True)
            name = self.runtime.unit(what).name
            found.append(PersistCandidate(name, what, max(nbytes), fmean(saved), fmean(seconds)))
        return found

    def _repeated(self, profile: Profile) -> list[Gathered]:
        """What all ranks gather more than once per step, in the same order."""
        mine = [(unit, str(dtype)) for (unit, dtype), n in profile.gathers.items() if n > WATCHED]
        theirs = (
            {(unit, name) for unit, name in found} for found in self.communicator.all_gather_object(mine)
        )
        return [(u, getattr(torch, n.removeprefix("torch."))) for u, n in sorted(set.intersection(*theirs))]

    def _seconds(self, what: Gathered) -> float:
        """The time of one gather by itself, carried out as graphs do it."""
        unit, dtype = what
        handle, streams = self.runtime.handle, self.accelerator.streams
        numbers, params = self.runtime.parameters_of(unit)
        times = []
        for _ in range(REPEATS):
            begun = streams.current().record()
            ALLGATHER(params, handle, unit, dtype)
            values = WAIT(params, handle, numbers, dtype)
            times.append(streams.current().record().seconds_since(begun))
            RELEASE(values, handle, unit)
            self.runtime.invalidate([self.runtime.units[unit]])
        return min(times)

    def _room(self, peak: int) -> int:
        """Bytes that this rank can spare."""
        if self.budget != "auto":
            return self.budget
        stats, ranks = self.accelerator.memory.stats(), self.communicator.group.size
        room = usable(self.accelerator) - peak
        if self.accelerator.capabilities.shared_device:
            room = min(room, stats.free // ranks)
        return max(room, 0)
