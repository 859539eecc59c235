"""What a flight recorder writes: one file for each rank, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from zero.errors import StateError

KEPT = 200
"""How many of the last collectives of a line are written."""
_NAME = "rank-{:05d}.flight.json"


@dataclass(frozen=True)
class Collective:
    """A collective, or an exchange in host memory (op "exchange").

    number: from 1, the same on all ranks. text: says what it is, and is the same on all ranks. bytes: of the
    whole buffer. state: "beginning" while it is handed over, "under way", "waited for", "done" or "failed".
    seconds: since it was issued. at: the program's line that led to it; "" where it is not known.
    """

    number: int
    text: str
    op: str
    unit: str
    bytes: int
    state: str
    seconds: float
    at: str


@dataclass(frozen=True)
class Issuing:
    """What the engines on some groups have issued. key: the same on their ranks, and no other line's. alike:
    the ranks that must issue the same, this one among them. collectives: the last, in order."""

    key: str
    alike: tuple[int, ...]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Flight:
    """One rank's. time: in seconds since 1970. reason: why it was written. lines: one for each set of groups.
    stacks: by thread, "file:line in function", the innermost last. place: where the main thread is in the
    program."""

    rank: int
    world_size: int
    host: str
    pid: int
    time: float
    reason: str
    lines: tuple[Issuing, ...]
    stacks: Mapping[str, list[str]]
    place: str

    def write(self, folder: Path) -> Path:
        """Write or replace the rank's file in one step."""
        path = path_of(folder, self.rank)
        new = path.with_suffix(".new")
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        new.write_text(text, encoding="utf-8", errors="replace")  # names of files may be any bytes
        os.replace(new, path)
        return path


def path_of(folder: Path, rank: int) -> Path:
    return folder / _NAME.format(rank)


def read(folder: Path) -> list[Flight]:
    """The newest job's files in a folder, by rank. Raises StateError if there is none, or one is damaged."""
    found = [_read(path) for path in sorted(folder.glob(_NAME.replace("{:05d}", "*")))]
    if not found:
        raise StateError(
            f"{folder} has no flights: start the job with ZERO_FLIGHT_RECORDER={folder} or call "
            "engine.record_flight(folder), and send one of its processes SIGUSR1 when it hangs"
        )
    size = max(found, key=lambda flight: flight.time).world_size
    return [flight for flight in found if flight.world_size == size and flight.rank < size]


def _read(path: Path) -> Flight:
    if not path.is_file():
        raise StateError(f"{path} is no regular file, as a flight recorder writes")
    try:
        return TypeAdapter(Flight).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        told = "".join(f"{part}: " for part in first["loc"]) + first["msg"]
        raise StateError(f"{path} is not what a flight recorder writes: {told}") from error
