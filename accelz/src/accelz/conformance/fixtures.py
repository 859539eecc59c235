"""The kit's fixtures, and the rules by which declared capabilities make failures, warnings and skips."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from accelz import selection
from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.conformance import progress
from accelz.conformance.cluster import Cluster, ClusterError, Clusters, prepare
from accelz.conformance.contract import (
    ContractBroken,
    UndeclaredCapabilityWarning,
    checked,
    stack_of,
)
from accelz.conformance.marks import WITH_DUTIES, declares, names
from accelz.conformance.results import rank_in_order
from accelz.errors import AccelzError

BIND = "Accelerator.bind"
NOTHING_BINDS = "no process can be bound to a device: every other test would fail for this reason"

UNDECLARED = pytest.StashKey[str]()
"""Set on a test that passed: the capability that it found to work although it is not declared."""


@pytest.fixture(scope="session")
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    """The accelerator under test, behind the guard of `checked`, and bound to this process's device.

    If ranks cannot share devices, it is not bound in tests with ranks, which then have all devices.
    """
    try:
        found = _selected(request.config.getoption("accelz_device"))
    except AccelzError as error:
        if error.__cause__ is None:
            raise ContractBroken("BackendDescriptor.load", "must return an Accelerator", str(error)) from None
        came = f"{type(error.__cause__).__name__}: {error.__cause__}\n{stack_of(error.__cause__)}"
        raise ContractBroken("BackendDescriptor.load", "must not raise", came) from None
    return checked(found)


@pytest.fixture(scope="session")
def capabilities(accelerator: Accelerator) -> Capabilities:
    """What the backend declares."""
    return accelerator.capabilities


@pytest.fixture(scope="session")
def _clusters(request: pytest.FixtureRequest) -> Iterator[Clusters]:
    clusters = Clusters(request.config.getoption("accelz_device"))
    yield clusters
    clusters.stop()


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, accelerator: Accelerator, _clusters: Clusters
) -> Callable[[int], Cluster]:
    """`cluster(size)` gives that many ranks: one pool of workers per size, which serves many tests.

    Skips if ranks cannot share a device and there are too few. A size whose ranks cannot join is tried once.
    If none of them can be bound, nothing else is tested.
    """
    failed: dict[int, ClusterError] = {}

    def sized(size: int) -> Cluster:
        require_devices(accelerator, size)
        if size in failed:
            raise failed[size]
        if not accelerator.capabilities.shared_device:
            _clusters.stop(but=size)  # the ranks of another size hold devices
        try:
            _clusters(size).start()
        except ClusterError as error:
            failed[size] = error
            if error.method == BIND and error.everywhere:
                request.session.shouldfail = NOTHING_BINDS
            raise
        return _clusters(size)

    return sized


@pytest.fixture
def devices_left(accelerator: Accelerator, _clusters: Clusters) -> None:
    """For a test that starts processes of its own on devices: if those cannot be shared, all are free."""
    if not accelerator.capabilities.shared_device:
        _clusters.stop()


@pytest.fixture(scope="session")
def _own_device(request: pytest.FixtureRequest, accelerator: Accelerator, _clusters: Clusters) -> None:
    """Bind this process to its device, which no rank holds if devices cannot be shared. If that fails,
    nothing else is tested."""
    if not accelerator.capabilities.shared_device:
        _clusters.stop()
    try:
        accelerator.bind(0)
    except ContractBroken:
        request.session.shouldfail = NOTHING_BINDS
        raise
    gc.collect()
    gc.freeze()  # garbage collections in tests then look at the tests' own objects only


@pytest.fixture(autouse=True)
def _prepared(request: pytest.FixtureRequest) -> None:
    """Skip a test for a capability that is not declared; bind this process for one that uses its device."""
    if needed := names(request.node, "accelz_needs"):
        declared = request.getfixturevalue("accelerator").capabilities
        missing = [name for name in needed if not declares(declared, name)]
        if missing:
            pytest.skip(f"not declared: {', '.join(missing)}")
    if "accelerator" in request.fixturenames:
        accelerator = request.getfixturevalue("accelerator")
        if accelerator.capabilities.shared_device or not _has_ranks(request.node):
            request.getfixturevalue("_own_device")


@contextmanager
def last_device(accelerator: Accelerator) -> Iterator[None]:
    """Bind the last device inside the with block; skips if this process may use no other than its own."""
    last = accelerator.device_count() - 1
    if not last or accelerator.capabilities.one_device_per_process:
        pytest.skip("this process has no second device")
    accelerator.bind(last)
    try:
        yield
    finally:
        accelerator.bind(0)


def room_for_ranks(accelerator: Accelerator) -> int:
    """How many ranks there can be: one for each device, any number if they share devices."""
    return sys.maxsize if accelerator.capabilities.shared_device else accelerator.device_count()


def require_devices(accelerator: Accelerator, ranks: int) -> None:
    """Skip a test if there are too few devices for so many ranks."""
    room = room_for_ranks(accelerator)
    if ranks > room:
        pytest.skip(f"{ranks} devices, because shared_device is not declared; this machine has {room}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by ORDER. Tests with ranks come last: the server they are forked from starts meanwhile.

    If ranks cannot share devices, tests with ranks come first instead, one size after the other, because from
    then on this process holds a device.
    """
    exclusive = _exclusive(config.getoption("accelz_device"))

    def turn(item: pytest.Item) -> tuple[bool, int, int]:
        first = exclusive and _has_ranks(item)
        order = rank_in_order(next(iter(names(item, "accelz_about")), ""))
        return not first, number_of_ranks(item) if first else 0, order

    items.sort(key=turn)
    if config.getoption("accelz_quick"):
        left_out = [item for item in items if item.get_closest_marker("accelz_thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@cache
def _selected(name: str) -> Accelerator:
    return selection.use(name)  # a second call would refuse an accelerator that has another name


def _exclusive(name: str) -> bool:
    """Whether ranks of the backend need a device each."""
    try:
        with progress.running("BackendDescriptor.load"):
            return not _selected(name).capabilities.shared_device
    except Exception:
        return False  # the backend is broken, as the tests report


def _has_ranks(item: pytest.Item) -> bool:
    return not {"cluster", "devices_left"}.isdisjoint(getattr(item, "fixturenames", ()))


def number_of_ranks(item: pytest.Item) -> int:
    """The number of ranks that a test is parametrised with, or 0."""
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get("size", 0)) if callspec else 0


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("cluster" in getattr(item, "fixturenames", ()) for item in session.items):
        prepare()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run a test for an undeclared capability as an attempt: on success it warns, on failure it skips."""
    attempted = _undeclared(pyfuncitem)
    try:
        result = yield
    except Exception:
        if attempted:
            pytest.skip(f"not declared, and does not work here: {attempted}")
        raise
    if attempted and attempted not in WITH_DUTIES:
        pyfuncitem.stash[UNDECLARED] = attempted
        warnings.warn(f"{attempted} works but is not declared", UndeclaredCapabilityWarning, stacklevel=1)
    return result


def _undeclared(item: pytest.Function) -> str | None:
    mark = item.get_closest_marker("accelz_proves")
    if mark is None:
        return None
    name: str = mark.args[0]
    accelerator: Any = item.funcargs["accelerator"]
    return None if declares(accelerator.capabilities, name) else name
