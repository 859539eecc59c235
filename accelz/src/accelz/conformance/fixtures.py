"""The kit's fixtures, and the rules by which declared capabilities make failures, warnings and skips."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accelz import selection
from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.conformance.cluster import Cluster, ClusterError, Clusters, prepare
from accelz.conformance.contract import ContractBroken, UndeclaredCapabilityWarning, checked, rank_in_order
from accelz.conformance.marks import declares, names
from accelz.errors import AccelzError

UNDECLARED = pytest.StashKey[str]()
"""Set on a test that passed: the capability that it found to work although it is not declared."""


@pytest.fixture(scope="session")
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    """The accelerator under test, bound to this process's device, behind the guard of `checked`."""
    name = request.config.getoption("accelz_device")
    try:
        found = selection.use(name)
    except AccelzError as error:
        raise ContractBroken("BackendDescriptor.load", "must return an Accelerator", str(error)) from None
    guarded = checked(found)
    guarded.bind(own_local_rank(guarded))
    gc.collect()
    gc.freeze()  # garbage collections in tests then look at the tests' own objects only
    return guarded


@pytest.fixture(scope="session")
def capabilities(accelerator: Accelerator) -> Capabilities:
    """What the backend declares."""
    return accelerator.capabilities


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, accelerator: Accelerator) -> Iterator[Callable[[int], Cluster]]:
    """`cluster(size)` gives that many ranks: one pool of workers per size for the whole session.

    Skips if ranks cannot share a device and there are too few. A size whose ranks cannot join is tried once.
    """
    clusters = Clusters(request.config.getoption("accelz_device"))
    failed: dict[int, ClusterError] = {}

    def sized(size: int) -> Cluster:
        if size > devices_for_ranks(accelerator) and not accelerator.capabilities.shared_device:
            pytest.skip(f"shared_device is not declared, and {size} ranks need a device each")
        if size in failed:
            raise failed[size]
        try:
            clusters(size).start()
        except ClusterError as error:
            failed[size] = error
            raise
        return clusters(size)

    yield sized
    clusters.stop()


def own_local_rank(accelerator: Accelerator) -> int:
    """The local rank of this process's device: the last one, if the others must be left to the ranks."""
    return 0 if accelerator.capabilities.shared_device else accelerator.device_count() - 1


def takes_one_device(accelerator: Accelerator) -> bool:
    """Whether this process must not bind a second device."""
    return accelerator.capabilities.one_device_per_process or not accelerator.capabilities.shared_device


@contextmanager
def last_device(accelerator: Accelerator) -> Iterator[None]:
    """Bind the last device inside the with block; skips if this process may use no other than its own."""
    last, own = accelerator.device_count() - 1, own_local_rank(accelerator)
    if last == own or takes_one_device(accelerator):
        pytest.skip("this process has no second device")
    accelerator.bind(last)
    try:
        yield
    finally:
        accelerator.bind(own)


def devices_for_ranks(accelerator: Accelerator) -> int:
    """The number of devices that ranks can use, because this process does not occupy them."""
    return accelerator.device_count() - (0 if accelerator.capabilities.shared_device else 1)


@pytest.fixture(autouse=True)
def _skip_without_capability(request: pytest.FixtureRequest) -> None:
    needed = names(request.node, "accelz_needs")
    if not needed:
        return
    declared = request.getfixturevalue("accelerator").capabilities
    missing = [name for name in needed if not declares(declared, name)]
    if missing:
        pytest.skip(f"not declared: {', '.join(missing)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by ORDER. Tests with ranks come last: the server they are forked from starts meanwhile."""
    items.sort(key=lambda item: rank_in_order(next(iter(names(item, "accelz_about")), "")))


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
    if attempted:
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
