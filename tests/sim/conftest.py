"""Ranks on the simulated device. Its package is a vendor's: without it, these tests do not run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelz.conformance.cluster import Clusters
from accelz.discovery import installed


@pytest.fixture(scope="session", autouse=True)
def _is_installed() -> None:
    if not installed("sim"):
        pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")


@pytest.fixture(scope="session")
def sim(_is_installed: None) -> Iterator[Clusters]:
    """`sim(size)` gives that many ranks on sim. This process itself stays on the device that it has."""
    clusters = Clusters("sim", timeout=3.0)
    yield clusters
    clusters.stop()
