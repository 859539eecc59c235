"""A device that captures no graphs refuses the setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accelz
import zero


@pytest.mark.parametrize(
    ("name", "config"),
    [("capture_step", {"capture_step": True}), ("graphs", {"compile": zero.Compile(graphs=True)})],
)
def test_a_device_without_graphs_is_named(name: str, config: dict[str, Any]) -> None:
    if accelz.current().capabilities.graph_capture:
        pytest.skip("this device captures graphs")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zero.ConfigError, match=rf"captures no graphs .* leave out {name}"):
        zero.initialize(model, optimizer, zero.Config(**config))
