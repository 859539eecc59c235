"""Refuses to run the kit's tests without a device to test."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("accelz_device", None):
        raise pytest.UsageError(
            "the conformance kit needs a backend: --accelz-device NAME (see `accelz list`)"
        )
