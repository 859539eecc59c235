"""World sizes of tests that take long."""

from __future__ import annotations

import pytest

UP_TO_TWO = [pytest.param(1, marks=pytest.mark.host), 2]
"""One rank alone only on the host: other devices train so in shorter tests."""
