"""The choice of the process's accelerator: made once, by ACCELZ_DEVICE, `use()` or priority."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache

from accelz import discovery, hardware_hints
from accelz.accelerator import Accelerator
from accelz.discovery import BackendRow, Status
from accelz.errors import BackendError, BackendNotFoundError, BackendUnavailableError, SelectionError
from accelz.gloo import GlooLanes
from accelz.hooks import API_VERSION
from accelz.ranks import machine
from accelz.roles.collectives import Collectives
from accelz.roles.host import HOST
from accelz.roles.kernels import Kernels

_lock = threading.RLock()
_selected: Accelerator | None = None


def current() -> Accelerator:
    """The process's accelerator, chosen at the first call.

    With ACCELZ_DEVICE=name only that backend is asked and loaded, unless loading it needs others, as with
    `host_collectives()`; if it is unset, the available backend with the highest priority wins. Raises
    BackendNotFoundError, BackendUnavailableError or BackendError, saying what is installed, what is available
    and what to install; SelectionError if a backend that may be better did not answer in time.
    """
    if _selected is not None:
        return _selected
    with _lock:
        return _selected or _commit(_choose(os.environ))


def selected() -> Accelerator | None:
    """The process's accelerator if it has been chosen, by `current` or `use`; chooses none."""
    return _selected


def use(name: str) -> Accelerator:
    """Select the backend `name` in code, like ACCELZ_DEVICE=name.

    Raises SelectionError if the process already runs on another accelerator, or if ACCELZ_DEVICE names
    another one.
    """
    with _lock:
        if _selected is not None:
            return _confirm(_selected, name)
        wanted = os.environ.get("ACCELZ_DEVICE", "").strip()
        if wanted and wanted != name:
            raise SelectionError(
                f"accelz.use({name!r}) contradicts ACCELZ_DEVICE={wanted}; unset the variable or remove the "
                "call"
            )
        return _commit(load_named(name, os.environ))


def host_kernels() -> Kernels:
    """Return kernels for tensors in host memory, for state that a device keeps there.

    They are the current accelerator's if its device is the host, else those of the best available backend
    that declares `host=True`, else the torch references. Raises SelectionError as `host_collectives` does.
    """
    accelerator = current()
    if accelerator.device.type == HOST.type:
        return accelerator.kernels
    host = _host_accelerator()
    return Kernels() if host is None else host.kernels


def host_collectives() -> Collectives:
    """Return collectives of host tensors, for a device whose own are staged through the host.

    They are those of the best available backend that declares `host=True`, else gloo's in lanes. Every
    installed backend is asked, in a child process: its descriptor says whose device is the host. Raises
    SelectionError if one that may be a host's did not answer in time: ranks that have it would wait for this
    one.

    Where ranks share memory, a group can do nothing more after a collective that failed, such as one that
    other ranks did not issue.
    """
    host = _host_accelerator()
    return GlooLanes() if host is None else host.collectives


def _host_accelerator() -> Accelerator | None:
    with _lock:
        return _loaded_host()


@cache
def _loaded_host() -> Accelerator | None:
    rows = discovery.list_backends(os.environ)
    if row := discovery.unheard_host(rows):
        raise SelectionError(discovery.what_to_do_unheard_host(row))
    host = discovery.best_host(rows)
    return None if host is None else _load(host)


def load_named(name: str, environ: Mapping[str, str]) -> Accelerator:
    """Load the backend `name` and no other, without changing the process's choice."""
    if name in discovery.disabled_names(environ):
        raise BackendUnavailableError(
            f"backend {name!r} is switched off by ACCELZ_DISABLE; remove it from the list to use it"
        )
    entries = discovery.installed(name)
    if not entries:
        raise BackendNotFoundError(f"no backend called {name!r} is installed. {_advice(name, environ)}")
    (row,) = discovery.inspect([discovery.meant(name, entries)])
    if row.status is Status.BROKEN:
        raise BackendError(f"backend {name!r} ({row.distribution}) is broken: {row.reason}")
    if row.status is Status.UNAVAILABLE:
        raise BackendUnavailableError(
            f"backend {name!r} ({row.distribution}) cannot be used here: {row.reason}. "
            f"{_advice(None, environ)}"
        )
    return _load(row)


def _choose(environ: Mapping[str, str]) -> Accelerator:
    wanted = environ.get("ACCELZ_DEVICE", "").strip()
    if wanted:
        return load_named(wanted, environ)
    rows = discovery.list_backends(environ)
    if row := discovery.unheard(rows):
        raise SelectionError(discovery.what_to_do_unheard(row))
    _warn_missing(rows)
    _warn_broken(rows)
    if row := discovery.best(rows):
        _warn_of_ties(row, rows)
        return _load(row)
    unasked = " or ".join(f"ACCELZ_DEVICE={r.name}" for r in rows if r.status is Status.AVAILABLE)
    hint = f"Available only on request: {unasked}. " if unasked else ""
    raise BackendUnavailableError(f"no backend can be used here. {hint}{_advice(None, environ)}")


def _load(row: BackendRow) -> Accelerator:
    assert row.descriptor is not None
    _warn_of_age(row, row.descriptor.api_version)
    try:
        accelerator = row.descriptor.load()
    except SelectionError:  # of what it needs of the host's backend
        raise
    except (Exception, SystemExit) as error:  # no library may end the user's process
        raise BackendError(
            f"backend {row.name!r} ({row.distribution}) failed to load: {type(error).__name__}: {error}. "
            "Set ACCELZ_DEVICE to another backend, or ACCELZ_DISABLE to skip this one"
        ) from error
    if not isinstance(accelerator, Accelerator):
        raise BackendError(
            f"backend {row.name!r} loaded a {type(accelerator).__name__}; "
            "load() must return accelz.Accelerator"
        )
    return accelerator


def _commit(accelerator: Accelerator) -> Accelerator:
    global _selected
    _selected = accelerator
    return accelerator


def _confirm(selected: Accelerator, name: str) -> Accelerator:
    if selected.name == name:
        return selected
    raise SelectionError(
        f"this process already runs on {selected.name!r}; the choice is made once per process. "
        f"Call accelz.use({name!r}) before the first use of accelz.current(), or set ACCELZ_DEVICE={name}"
    )


def _warn_missing(rows: list[BackendRow]) -> None:
    for hint in hardware_hints.missing_backends({row.name for row in rows}):
        machine.warn(
            f"a {hint.backend} device seems to be present but its backend is not installed: "
            f"pip install {hint.distribution} (or set ACCELZ_DEVICE to silence this)",
            stacklevel=4,
        )


def _warn_broken(rows: list[BackendRow]) -> None:
    """Warn of broken backends.

    On one of several machines, this may be the only sign that its ranks use another device.
    """
    for row in rows:
        if row.status is Status.BROKEN:
            machine.warn(
                f"backend {row.name!r} ({row.distribution}) is broken and was skipped: {row.reason} (set "
                "ACCELZ_DEVICE, or ACCELZ_DISABLE to skip it without this warning)",
                stacklevel=4,
            )


def _warn_of_age(row: BackendRow, version: int) -> None:
    if version < API_VERSION:
        machine.warn(
            f"backend {row.name!r} ({row.distribution}) is for accelz API {version}. This accelz has API "
            f"{API_VERSION} and adapts it; the one after it will not: upgrade {row.distribution}",
            stacklevel=6,
        )


def _warn_of_ties(chosen: BackendRow, rows: list[BackendRow]) -> None:
    if others := discovery.ties(rows):
        machine.warn(
            f"the backends {', '.join([chosen.name, *others])} are available with one priority, "
            f"{chosen.priority}, and {chosen.name} is used; set ACCELZ_DEVICE to the one that is meant",
            stacklevel=4,
        )


def _advice(name: str | None, environ: Mapping[str, str]) -> str:
    rows = discovery.list_backends(environ)
    installed = ", ".join(f"{r.name} ({r.status.value})" for r in rows) or "none"
    available = ", ".join(r.name for r in rows if r.status is Status.AVAILABLE)
    listing = f"Installed: {installed}. Available: {available or 'none'}"
    if name:
        return f"{listing}. {discovery.how_to_have(name)}; `accelz list` shows the reasons"
    if available:
        return f"{listing}; `accelz list` shows the reasons"
    return f"{listing}. To add the CPU: pip install accelz-cpu; `accelz list` shows the reasons"
