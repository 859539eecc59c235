"""What every test shares: the backend under test, reused worker ranks on it, and what `make quick` runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

gc.disable()  # until tests begin: collections take a third of the time of the imports
import torch  # noqa: E402

from accelz.conformance.cluster import Cluster, Clusters, preload  # noqa: E402

BODIES_IMPORT = (
    "torch._functorch.aot_autograd",
    "torch.nn.parallel.distributed",
    "zero.engine",
    "zero.setup.initialization",
)
"""Where a rank trains: optimizers import dynamo, and compiled models the first of these as well, which takes
longer than most bodies."""
RANKS = {"cluster", "clusters", "disposable", "several", "sim"}
"""Fixtures that start other processes."""
MARKERS = (
    "host: of files, processes, what comes before anything is on a device, or what other tests have on one",
    "quick: of ranks or not, part of `make quick`",
    "slow: takes more than two seconds of processor time, so it is no part of `make quick`; slow files begin "
    "first",
)
OTHER_OUTPUT = ("FORCE_COLOR", "GITHUB_ACTIONS", "PYTHONUNBUFFERED")
"""Variables with which commands print other bytes: two have them colour what is no terminal; with the last a
printed line is two writes, and ranks' lines mix."""
QUICK_SECONDS = 2.0
"""What a test of `--quick` may take of the processor, however busy the machine is."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the accelz backend that the tests run on")
    parser.addoption(
        "--loop", default="engine", choices=("engine", "plain"), help="the loop that most tests train in"
    )
    parser.addoption(
        "--quick", action="store_true", help="what one process tests at once, and tests marked quick"
    )
    parser.addoption("--max-ranks", type=int, default=8, help="skip distributed tests with more ranks")
    parser.addoption("--kills", type=int, default=8, help="how often a job that saves is killed")
    parser.addoption("--runs", type=int, default=0, help="how many runs are drawn at random, if not few")
    parser.addoption("--mutations", type=int, default=250, help="how many changed files are read")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnraisableExceptionWarning")
    # Tests run side by side, and threads of torch that wait for each other spin on what others need.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    for name in OTHER_OUTPUT:
        os.environ.pop(name, None)
    os.environ["ZERO_TEST_LOOP"] = config.getoption("--loop")  # for tests.zero.helpers.loops
    preload(*BODIES_IMPORT)
    if config.getoption("--quick"):
        for name in BODIES_IMPORT:  # now: no single test takes the time
            import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device than the host, leave out what does not touch it: the tests on the host have it.

    Slow files come first, so that at the end no worker is left alone with one.
    """
    if config.getoption("--quick"):
        _keep(config, items, _is_quick)
    if config.getoption("--device") != "cpu":
        _keep(config, items, _touches_the_device)
    items.sort(key=lambda item: item.parent is None or item.parent.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Garbage collections in tests then look at the tests' own objects, not at torch's modules each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _keep(config: pytest.Config, items: list[pytest.Item], kept: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not kept(item)])
    items[:] = [item for item in items if kept(item)]


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick"):
        return True
    return not item.get_closest_marker("slow") and not RANKS & _fixtures(item)


def _touches_the_device(item: pytest.Item) -> bool:
    return bool({"device", "cluster"} & _fixtures(item)) and not item.get_closest_marker("host")


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _quick(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _quick(item):
        return (yield)


@contextmanager
def _quick(item: pytest.Item) -> Iterator[None]:
    """Under `--quick`, fail what takes long, so that the whole stays quick by itself."""
    before = _busy()
    yield
    spent = _busy() - before
    if item.config.getoption("--quick") and spent > QUICK_SECONDS:
        pytest.fail(f"{spent:.1f} s of processor time are no quick test: mark it with pytest.mark.slow")


def _busy() -> float:
    """Seconds that processors have worked for this process, and for those it has started and seen end."""
    return sum(os.times()[:4])


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, device: str) -> Iterator[Clusters]:
    """`cluster(size)` gives a `Cluster` of that many ranks; its workers serve the whole session."""
    clusters = LimitedClusters(device)
    clusters.limit = request.config.getoption("--max-ranks")
    yield clusters
    clusters.stop()


@pytest.fixture
def disposable(cluster: Clusters) -> Iterator[Callable[[int], Cluster]]:
    """Ranks that later tests cannot use, since a failed collective ends a job."""
    used: list[Cluster] = []

    def take(size: int) -> Cluster:
        used.append(cluster(size))
        return used[-1]

    yield take
    for ranks in used:
        ranks.stop()


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest) -> int:
    """How many runs to draw at random."""
    return int(request.config.getoption("--runs"))


class LimitedClusters(Clusters):
    """Skips tests that need more ranks than a small machine can hold."""

    limit: int

    def __call__(self, size: int) -> Cluster:
        if size > self.limit:
            pytest.skip(f"{size} ranks are more than --max-ranks {self.limit}")
        return super().__call__(size)
