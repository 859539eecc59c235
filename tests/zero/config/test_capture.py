"""A device that captures no graphs refuses the setting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelz
import zero


def test_a_device_without_graphs_is_named() -> None:
    if accelz.current().capabilities.graph_capture:
        pytest.skip("this device captures graphs")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zero.ConfigError, match=r"captures no graphs .* leave out capture_step"):
        zero.initialize(model, optimizer, zero.Config(capture_step=True))
