"""What every test shares: the backend under test and reused worker ranks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from accelz.conformance.cluster import Cluster, Clusters, preload

BODIES_IMPORT = ("torch._dynamo", "torch.nn.parallel.distributed", "zero.engine")
"""Where a rank trains: optimizers import dynamo, which takes longer than most bodies."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the accelz backend that the tests run on")
    parser.addoption("--max-ranks", type=int, default=8, help="skip distributed tests with more ranks")
    parser.addoption("--kills", type=int, default=12, help="how often a job that saves is killed")
    parser.addoption("--runs", type=int, default=16, help="how many runs are drawn at random")
    parser.addoption("--mutations", type=int, default=500, help="how many changed files are read")


def pytest_configure() -> None:
    preload(*BODIES_IMPORT)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device than the host, leave out what does not touch it: the tests on the host have it."""
    if config.getoption("--device") == "cpu":
        return
    touching = [item for item in items if {"device", "cluster"} & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in touching])
    items[:] = touching


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
