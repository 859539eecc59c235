"""What every test shares: the backend under test and reused worker ranks on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelz.conformance.cluster import Clusters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the accelz backend that the tests run on")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Name of the backend under test."""
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def cluster(device: str) -> Iterator[Clusters]:
    """`cluster(size)` gives a `Cluster` of that many ranks; its workers serve the whole session."""
    clusters = Clusters(device)
    yield clusters
    clusters.stop()
