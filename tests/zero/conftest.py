"""What tests of the engine need of a device, as fixtures: they ask for abilities and name no device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest
import torch

from accelz import HOST, Capabilities
from accelz.conformance.cluster import Clusters, Context
from accelz.conformance.operators import TOLERANCE
from tests.simulated import is_simulated

LACKING: dict[str, tuple[str, Callable[[Capabilities], bool]]] = {
    "(its backend declares compile='none')": (
        "that torch.compile does something for",
        lambda has: has.compile == "none",
    ),
    "does not support torch.float64 (it has": ("with float64", lambda has: torch.float64 not in has.dtypes),
}
"""What zero says of a device that does not declare what many tests also ask for; what they need then, and
whether that is so of the device under test: elsewhere the error is a failure."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, None, None]:
    try:
        return (yield)
    except Exception as error:
        for said, (needed, lacks) in LACKING.items():
            cluster = item.funcargs.get("cluster")
            if said in str(error) and cluster and lacks(cluster(1).run(asked)[0].capabilities):
                pytest.skip(f"needs a device {needed}")
        raise


@dataclass(frozen=True)
class Abilities:
    """What the device under test can do. simulated: its backend has `tests.simulated.faults_of`."""

    device_type: str
    capabilities: Capabilities
    simulated: bool

    @property
    def apart(self) -> bool:
        """Whether the memory is not the host's."""
        return self.device_type != HOST.type

    @property
    def close(self) -> float:
        """What losses and weights may differ by, relatively: the kit's tolerance, and less on the host, where
        both ways use the same kernels."""
        return TOLERANCE[torch.float32] if self.apart else 1e-5

    @property
    def exact(self) -> bool:
        """Whether the memory is the device's own, and every byte of it is counted."""
        return self.apart and self.capabilities.counts_every_byte


def asked(context: Context) -> Abilities:
    accelerator = context.accelerator
    return Abilities(accelerator.device.type, accelerator.capabilities, is_simulated(accelerator.name))


@pytest.fixture(scope="session")
def abilities(cluster: Clusters) -> Abilities:
    (found,) = cluster(1).run(asked)
    assert isinstance(found, Abilities)
    return found


@pytest.fixture
def apart(abilities: Abilities) -> None:
    if not abilities.apart:
        pytest.skip("needs a device with memory of its own")


@pytest.fixture
def exact(abilities: Abilities) -> None:
    if not abilities.exact:
        pytest.skip("needs a device with memory of its own that counts every byte")


@pytest.fixture
def simulated(abilities: Abilities) -> None:
    if not abilities.simulated:
        pytest.skip("needs a simulated device: one whose capacity, faults and late streams tests can set")


@pytest.fixture
def generates_code(abilities: Abilities) -> None:
    if not abilities.capabilities.compiles("inductor"):
        pytest.skip("needs a device that Inductor generates code for")
