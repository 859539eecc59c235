"""Guards the kit's own folder: without a device there is nothing to test."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("accelz_device", None):
        raise pytest.UsageError(
            "the conformance kit needs a backend: --accelz-device NAME (see `accelz list`)"
        )
