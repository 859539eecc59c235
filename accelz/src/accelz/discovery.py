"""Finding backends: reads the entry points of the group `accelz.backends`, and asks each for its state.

A backend that cannot be imported, was written for another API version, repeats a name or has a probe that
raises, hangs or crashes becomes a row with the reason. It never keeps another that is asked for from being
used: each is first imported and probed in a child process, and here only if that went well.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions
from types import ModuleType
from typing import Any

import pluggy

from accelz import apart, hooks
from accelz.earlier import adapted
from accelz.errors import BackendError, SelectionError
from accelz.hooks import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    OLDEST_API_VERSION,
    PROJECT,
    BackendDescriptor,
    Probe,
)
from accelz.patience import PATIENCE, patience
from accelz.ranks import machine

FIRST_PARTY = ("cpu", "cuda", "hpu", "xpu")
"""Names whose distributions are published together with this one, as accelz-NAME."""

PROBE_SECONDS = 10.0
"""What importing a plugin and its probe may take each; ACCELZ_PATIENCE multiplies it."""
IMPORT, PROBE = "importing it", "its probe"
WRITTEN_FOR = "written for accelz API"
"""How the reason of a backend begins that was written for a version of the interface that is not taken."""
LONGEST_REASON = 300


class Status(str, Enum):
    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"  # installed and sound, but its device is not usable here
    BROKEN = "broken"  # import, descriptor, version, name or probe failed
    DISABLED = "disabled"  # named in ACCELZ_DISABLE, not loaded


@dataclass(frozen=True)
class BackendRow:
    """One installed backend as `accelz list` shows it. `descriptor` is None unless it could be read. late: it
    is broken because it did not answer in time, so it may be sound."""

    name: str
    distribution: str
    version: str
    status: Status
    reason: str
    priority: int | None = None
    descriptor: BackendDescriptor | None = None
    late: bool = False


def list_backends(environ: Mapping[str, str] | None = None) -> list[BackendRow]:
    """List every installed backend with its state, best first (by priority, then name).

    environ: where ACCELZ_DISABLE is read from; the process environment by default. Never raises because of a
    backend.
    """
    disabled = disabled_names(os.environ if environ is None else environ)
    _warn_of_unknown(disabled)
    rows = [*inspect(installed(), disabled), *_unreadable()]
    return sorted(_mark_duplicates(rows), key=_rank)


def best(rows: Iterable[BackendRow]) -> BackendRow | None:
    """The backend to use when none is asked for: the first available one with priority 0 or more."""
    return next(_fit(rows), None)


def best_host(rows: Iterable[BackendRow]) -> BackendRow | None:
    """The backend for host memory: the first available one that declares `host=True`."""
    return next(
        (r for r in rows if r.status is Status.AVAILABLE and r.descriptor and r.descriptor.host), None
    )


def unheard(rows: Iterable[BackendRow]) -> BackendRow | None:
    """A backend that did not answer in time and may be better than the `best` one: a rank that is faster
    would have it. One whose priority is not known may be."""
    rows = list(rows)
    return _late(best(rows), (r for r in rows if r.priority is None or r.priority >= 0))


def unheard_host(rows: Iterable[BackendRow]) -> BackendRow | None:
    """The same for host memory. One without a descriptor may be a host's."""
    rows = list(rows)
    return _late(best_host(rows), (r for r in rows if r.descriptor is None or r.descriptor.host))


def _late(first: BackendRow | None, rows: Iterable[BackendRow]) -> BackendRow | None:
    """One of `rows` that did not answer in time, and may come before the `first` that did."""
    late = (r for r in rows if r.late)
    return next((r for r in late if first is None or r.priority is None or _rank(r) < _rank(first)), None)


def what_to_do_unheard(row: BackendRow) -> str:
    return (
        f"backend {row.name!r} ({row.distribution}) may be the best one, but {row.reason}; other ranks may "
        "have it, so none is chosen. Set ACCELZ_DEVICE to the backend that is meant, on all ranks; or "
        f"{_more_time(row)}"
    )


def what_to_do_unheard_host(row: BackendRow) -> str:
    return (
        f"backend {row.name!r} ({row.distribution}) may be the one for host memory, but {row.reason}; other "
        f"ranks may have it, so none is chosen. Set on all ranks {_more_time(row)}"
    )


def _more_time(row: BackendRow) -> str:
    return f"{PATIENCE}, a factor for the time, such as 3; or ACCELZ_DISABLE={row.name}"


def ties(rows: Iterable[BackendRow]) -> list[str]:
    """The names of those that could be used as well as the `best` one: first-party backends come first, and
    then the alphabet decides."""
    fit = list(_fit(rows))
    return [row.name for row in fit[1:] if row.priority == fit[0].priority]


def _fit(rows: Iterable[BackendRow]) -> Iterator[BackendRow]:
    return (r for r in rows if r.status is Status.AVAILABLE and r.priority is not None and r.priority >= 0)


def installed(name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of all backends, or of those called `name`, in a fixed order. Imports none."""
    found: list[EntryPoint] = []
    for distribution in _declaring():
        try:
            found += distribution.entry_points.select(group=ENTRY_POINT_GROUP)
        except Exception:  # one distribution's file is not the others' failure: see `_unreadable`
            continue
    return sorted(
        (e for e in found if name is None or e.name == name), key=lambda e: (e.name, _distribution(e))
    )


def _declaring() -> list[Distribution]:
    """The installed distributions that declare backends; of two of one name, the one that Python imports."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        try:
            declares = ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or "")
        except Exception:
            continue
        if declares:
            found.setdefault(_normalized(str(distribution.name)), distribution)
    return list(found.values())


def _unreadable() -> Iterator[BackendRow]:
    for distribution in _declaring():
        try:
            distribution.entry_points  # noqa: B018
        except Exception as error:
            name = str(distribution.name)
            reason = f"its entry_points.txt cannot be read: {_one_line(error)}"
            yield BackendRow(name, name, str(distribution.version), Status.BROKEN, reason)


def how_to_have(name: str) -> str:
    """What to do about a name that no installed backend has: a misspelling, or a package to install."""
    known = sorted({*FIRST_PARTY, *(entry.name for entry in installed())})
    if ":" in name:
        return (
            f"ACCELZ_DEVICE names a backend and no device number: write {name.partition(':')[0]}. Each "
            "process takes the device of its local rank, which torchrun sets (LOCAL_RANK); which devices it "
            "sees is up to the vendor's own variable"
        )
    if name in FIRST_PARTY:
        return f"To add it: pip install accelz-{name}"
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)  # "gpu" is not meant as "xpu"
    if near:
        return f"Did you mean {near[0]!r}? The names known here are {', '.join(known)}"
    return f"The names known here are {', '.join(known)}; for another device, install its vendor's package"


def disabled_names(environ: Mapping[str, str]) -> frozenset[str]:
    """The names in ACCELZ_DISABLE, a comma-separated list."""
    return frozenset(n.strip() for n in environ.get("ACCELZ_DISABLE", "").split(",") if n.strip())


def _warn_of_unknown(disabled: Iterable[str]) -> None:
    names = {entry.name for entry in installed()}
    for name in sorted(set(disabled) - names):
        machine.warn(
            f"ACCELZ_DISABLE names {name!r}, and no installed backend has that name; write names as for "
            f"ACCELZ_DEVICE: {', '.join(sorted(names)) or 'none is installed'}",
            stacklevel=3,
        )


def inspect(entries: Sequence[EntryPoint], disabled: Iterable[str] = ()) -> list[BackendRow]:
    """Import each backend's plugin and call its probe, first in a child process, with a limit on its time."""
    asked = [entry for entry in entries if entry.name not in disabled]
    calls: dict[apart.Call, EntryPoint] = {partial(_ask, entry): entry for entry in asked}
    limit = PROBE_SECONDS * patience()
    found = apart.answers([*calls], limit, lambda call, at: _warn_of_wait(calls[call], at, limit))
    rows = [_row(e, Status.DISABLED, "switched off by ACCELZ_DISABLE") for e in entries if e not in asked]
    return rows + [_inspected(entry, answer) for entry, answer in zip(asked, found, strict=True)]


def _warn_of_wait(entry: EntryPoint, at: str, limit: float) -> None:
    name = entry.name
    machine.warn(
        f"waiting for backend {name!r} ({_distribution(entry)}): {at} has not returned yet, and may take up "
        f"to {limit:g} s; ACCELZ_DISABLE={name} leaves it out, and with ACCELZ_DEVICE only the backend that "
        "it names is asked",
        stacklevel=2,
    )


def _ask(entry: EntryPoint, say: apart.Say) -> dict[str, Any]:
    """In the child process: a status and its reason, and whether the plugin could be imported."""
    imported = False
    try:
        say(IMPORT)
        descriptor = read_descriptor(entry)
        imported = True
        say(PROBE)
        probe = _checked_probe(descriptor.probe())
        status = Status.AVAILABLE if probe.available else Status.UNAVAILABLE
        reason = probe.reason
    except BaseException as error:
        status = Status.BROKEN
        reason = f"{'probe failed: ' if imported else ''}{_one_line(error)}"
    return {"imported": imported, "status": status.value, "reason": reason}


def _inspected(entry: EntryPoint, answer: dict[str, Any] | apart.Lost) -> BackendRow:
    late = isinstance(answer, apart.Lost) and answer.late
    if isinstance(answer, apart.Lost):
        imported, status, reason = answer.at == PROBE, Status.BROKEN, f"{answer.at} {answer.how}"
    else:
        imported, status, reason = answer["imported"], Status(answer["status"]), answer["reason"]
    if not imported:
        return replace(_row(entry, Status.BROKEN, reason), late=late)
    try:
        return replace(_row(entry, status, reason, read_descriptor(entry)), late=late)
    except (Exception, SystemExit) as error:
        return _row(entry, Status.BROKEN, _one_line(error))


def read_descriptor(entry: EntryPoint) -> BackendDescriptor:
    """Import a backend's plugin and return its validated descriptor.

    Each plugin gets its own plugin manager, so that none can disturb another's registration.
    Raises BackendError (or whatever importing the plugin raises).
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    plugin: ModuleType = entry.load()
    manager.register(plugin, entry.name)
    manager.check_pending()
    answers = manager.hook.accelz_backend()
    if len(answers) != 1:
        raise BackendError(
            f"{entry.value} answered the hook accelz_backend {len(answers)} times; decorate exactly one "
            "function of that name with @accelz.hookimpl and return a BackendDescriptor from it"
        )
    return _checked(entry, answers[0])


def _checked_probe(probe: object) -> Probe:
    if not isinstance(probe, Probe):
        raise BackendError(f"probe() returned {type(probe).__name__}; it must return accelz.Probe")
    for field, kind in {"available": bool, "reason": str}.items():
        value = getattr(probe, field)
        if not isinstance(value, kind):
            raise BackendError(f"probe() returned {field}={value!r}; it must be {_KINDS[kind]}")
    return probe


_KINDS: dict[Any, str] = {str: "a string", bool: "True or False", int: "an integer", Callable: "callable"}
_FIELDS: dict[str, Any] = {
    "name": str,
    "api_version": int,
    "priority": int,
    "probe": Callable,
    "load": Callable,
}


def _checked(entry: EntryPoint, descriptor: object) -> BackendDescriptor:
    if not isinstance(descriptor, BackendDescriptor):
        raise BackendError(
            f"{entry.value}: accelz_backend returned {type(descriptor).__name__}; "
            "it must return accelz.BackendDescriptor"
        )
    for field, kind in _FIELDS.items():
        value = getattr(descriptor, field)
        if not isinstance(value, kind):
            raise BackendError(
                f"{entry.value}: the descriptor's {field} is {value!r}; it must be {_KINDS[kind]}"
            )
    if not OLDEST_API_VERSION <= descriptor.api_version <= API_VERSION:
        newer = "accelz" if descriptor.api_version > API_VERSION else _distribution(entry)
        raise BackendError(
            f"{WRITTEN_FOR} {descriptor.api_version}, this accelz has API {API_VERSION} and takes "
            f"{OLDEST_API_VERSION} too: pip install --upgrade {newer}"
        )
    if descriptor.name != entry.name:
        raise BackendError(
            f"the entry point is called {entry.name!r} but its descriptor {descriptor.name!r}; "
            "give both the same name"
        )
    return adapted(descriptor)


def _mark_duplicates(rows: list[BackendRow]) -> list[BackendRow]:
    """Of backends with one name those are broken that are not meant by it."""
    result = []
    for row in rows:
        others = [r.distribution for r in rows if r.name == row.name and r is not row]
        is_meant = owner(row.name, [row.distribution, *others]) == row.distribution
        if others and row.status is not Status.DISABLED and not is_meant:
            reason = f"duplicate name: {', '.join(others)} provides {row.name!r} too; uninstall one of them"
            row = replace(
                row, status=Status.BROKEN, reason=reason, priority=None, descriptor=None, late=False
            )
        result.append(row)
    return result


def owner(name: str, distributions: Sequence[str]) -> str | None:
    """The distribution whose backend is meant by a name: the first party's, or else the only one; None of
    several others."""
    own = [each for each in distributions if _is_first_party(name, each)]
    (first, *more) = own or distributions
    return None if more else first


def meant(name: str, entries: Sequence[EntryPoint]) -> EntryPoint:
    """Of the entry points with a name, which are some, the one that is meant by it. Raises SelectionError if
    the name does not say which."""
    distributions = [_distribution(entry) for entry in entries]
    if (found := owner(name, distributions)) is None:
        raise SelectionError(
            f"{name!r} is the name of two backends, of {' and '.join(distributions)}, and says not which is "
            "meant: uninstall one"
        )
    return entries[distributions.index(found)]


def _is_first_party(name: str, distribution: str) -> bool:
    return name in FIRST_PARTY and _normalized(distribution) == f"accelz-{name}"


def _rank(row: BackendRow) -> tuple[int, bool, str, str]:
    priority = row.priority if row.priority is not None else -(10**9)
    return (-priority, not _is_first_party(row.name, row.distribution), row.name, row.distribution)


def _row(
    entry: EntryPoint, status: Status, reason: str, descriptor: BackendDescriptor | None = None
) -> BackendRow:
    version = str(entry.dist.version) if entry.dist else "?"
    priority = descriptor.priority if descriptor else None
    line = _plain(reason)
    if status is Status.BROKEN and len(line) > LONGEST_REASON:
        line = f"{line[:LONGEST_REASON]} …"
    return BackendRow(entry.name, _distribution(entry), version, status, line, priority, descriptor)


def _distribution(entry: EntryPoint) -> str:
    return str(entry.dist.name) if entry.dist else "?"


def _normalized(distribution: str) -> str:
    """A distribution's name as installers compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _plain(text: str) -> str:
    """In one line, without what would steer a terminal."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def _one_line(error: BaseException) -> str:
    text = _plain(str(error))
    return text if isinstance(error, BackendError) else f"{type(error).__name__}: {text}"
