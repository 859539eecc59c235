"""What a device's backend says of torch.compile is asked before anything is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context


def test_a_device_without_inductor_is_told_what_it_can_do(cluster: Clusters) -> None:
    (said,) = cluster(1).run(refused_body)
    assert said["aot_eager"].endswith('use Config(compile=zero.Compile(inner="aot_eager"))')
    assert said["none"] == "has no inductor (its backend declares compile='none'); leave out compile"


def refused_body(context: Context) -> dict[str, str]:
    accelerator, said = context.accelerator, {}
    declared = accelerator.capabilities
    model: Any = nn.Linear(3, 3)
    for have in ("aot_eager", "none"):
        accelerator.capabilities = replace(declared, compile=have)
        with pytest.raises(zero.ConfigError) as error:
            zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(compile=True))
        said[have] = str(error.value).partition(f"{accelerator.name!r} ")[2]
    accelerator.capabilities = declared
    assert model.weight.device.type == "cpu"
    return said
