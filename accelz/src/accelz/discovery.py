"""Finding backends: reads the entry points of the group `accelz.backends`, each in its own try.

A backend that cannot be imported, was written for another API version, repeats a name or has a probe that
raises becomes a row with the reason. It never makes anything else crash.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pluggy

from accelz import hooks
from accelz.errors import BackendError
from accelz.hooks import API_VERSION, ENTRY_POINT_GROUP, PROJECT, BackendDescriptor, Probe
from accelz.ranks import machine

FIRST_PARTY = ("cpu", "cuda", "hpu", "xpu")
"""Names whose distributions are published together with this one, as accelz-NAME."""


class Status(str, Enum):
    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"  # installed and sound, but its device is not usable here
    BROKEN = "broken"  # import, descriptor, version, name or probe failed
    DISABLED = "disabled"  # named in ACCELZ_DISABLE, not loaded


@dataclass(frozen=True)
class BackendRow:
    """One installed backend as `accelz list` shows it. `descriptor` is None unless it could be read."""

    name: str
    distribution: str
    version: str
    status: Status
    reason: str
    priority: int | None = None
    descriptor: BackendDescriptor | None = None


def list_backends(environ: Mapping[str, str] | None = None) -> list[BackendRow]:
    """List every installed backend with its state, best first (by priority, then name).

    environ: where ACCELZ_DISABLE is read from; the process environment by default. Never raises because of a
    backend.
    """
    disabled = disabled_names(os.environ if environ is None else environ)
    _warn_of_unknown(disabled)
    rows = [inspect(entry, disabled) for entry in installed()]
    return sorted(_mark_duplicates(rows), key=_rank)


def best(rows: Iterable[BackendRow]) -> BackendRow | None:
    """The backend to use when none is asked for: the first available one with priority 0 or more."""
    fit = (r for r in rows if r.status is Status.AVAILABLE and r.priority is not None and r.priority >= 0)
    return next(fit, None)


def installed(name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of all backends, or of those called `name`, in a fixed order. Imports none."""
    found = entry_points(group=ENTRY_POINT_GROUP)
    return sorted(
        (e for e in found if name is None or e.name == name), key=lambda e: (e.name, _distribution(e))
    )


def how_to_have(name: str) -> str:
    """What to do about a name that no installed backend has: a misspelling, or a package to install."""
    known = sorted({*FIRST_PARTY, *(entry.name for entry in installed())})
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


def inspect(entry: EntryPoint, disabled: Iterable[str] = ()) -> BackendRow:
    """Load one backend's descriptor and call its probe."""
    if entry.name in disabled:
        return _row(entry, Status.DISABLED, "switched off by ACCELZ_DISABLE")
    try:
        descriptor = read_descriptor(entry)
    except (Exception, SystemExit) as error:
        return _row(entry, Status.BROKEN, _one_line(error))
    try:
        probe = _checked_probe(descriptor.probe())
    except (Exception, SystemExit) as error:
        return _row(entry, Status.BROKEN, f"probe failed: {_one_line(error)}", descriptor)
    status = Status.AVAILABLE if probe.available else Status.UNAVAILABLE
    return _row(entry, status, probe.reason, descriptor)


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
    if descriptor.api_version != API_VERSION:
        newer = "accelz" if descriptor.api_version > API_VERSION else _distribution(entry)
        raise BackendError(
            f"written for accelz API {descriptor.api_version}, this accelz has API {API_VERSION}: "
            f"pip install --upgrade {newer}"
        )
    if descriptor.name != entry.name:
        raise BackendError(
            f"the entry point is called {entry.name!r} but its descriptor {descriptor.name!r}; "
            "give both the same name"
        )
    return descriptor


def _mark_duplicates(rows: list[BackendRow]) -> list[BackendRow]:
    seen: dict[str, BackendRow] = {}
    result = []
    for row in rows:
        first = seen.setdefault(row.name, row)
        if first is not row and row.status is not Status.DISABLED:
            reason = (
                f"duplicate name: {first.distribution} already provides {row.name!r}; uninstall one of them"
            )
            row = BackendRow(row.name, row.distribution, row.version, Status.BROKEN, reason, row.priority)
        result.append(row)
    return result


def _rank(row: BackendRow) -> tuple[int, str, str]:
    return (-(row.priority if row.priority is not None else -(10**9)), row.name, row.distribution)


def _row(
    entry: EntryPoint, status: Status, reason: str, descriptor: BackendDescriptor | None = None
) -> BackendRow:
    version = entry.dist.version if entry.dist else "?"
    priority = descriptor.priority if descriptor else None
    return BackendRow(entry.name, _distribution(entry), version, status, reason, priority, descriptor)


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, BackendError) else f"{type(error).__name__}: {text}"
