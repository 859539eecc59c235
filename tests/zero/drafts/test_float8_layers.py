"""Layers that multiply in 8 bits are refused, before training, by a device that does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz import Capabilities
from accelz.conformance.cluster import Clusters, Context
from zero.drafts.float8_layers import check_float8_layers


def cast(granularity: str, kind: str = "dynamic") -> Any:
    return SimpleNamespace(
        scaling_granularity=SimpleNamespace(value=granularity), scaling_type=SimpleNamespace(value=kind)
    )


class Float8Layer(nn.Linear):
    """What zero looks at of torchao's `Float8Linear`; tests/frameworks has the real one."""

    def __init__(self, *casts: Any, emulate: bool = False) -> None:
        super().__init__(16, 16)
        self.linear_mm_config = object()
        named = {f"cast_config_{index}": each for index, each in enumerate(casts)}
        self.config = SimpleNamespace(emulate=emulate, **named)


class OtherConfig(nn.Linear):
    """A layer of somebody else's, whose `config` is nothing to look at."""

    @property
    def config(self) -> Any:
        raise RuntimeError("not set up yet")


TENSORWISE, ROWWISE = cast("tensorwise"), cast("axiswise")
DEVICES = ("none", "tensorwise", "rowwise")


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.Linear(16, 16), DEVICES),
        (OtherConfig(16, 16), DEVICES),
        (Float8Layer(ROWWISE, emulate=True), DEVICES),
        (Float8Layer(cast("axiswise", "disabled")), DEVICES),
        (Float8Layer(TENSORWISE, cast("axiswise", "disabled")), DEVICES[1:]),
        (Float8Layer(TENSORWISE, TENSORWISE), DEVICES[1:]),
        (Float8Layer(TENSORWISE, ROWWISE), DEVICES[2:]),
    ],
    ids=["plain", "other", "emulated", "disabled", "one disabled", "tensorwise", "rowwise"],
)
def test_a_device_is_asked_for_the_scales_of_a_layer(layer: nn.Module, taken: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), layer)
    for have in DEVICES:
        device: Any = SimpleNamespace(name="foo", capabilities=Capabilities(scaled_mm=have))
        if have in taken:
            check_float8_layers(model, device)
        else:
            with pytest.raises(
                zero.ModelError, match=rf"'1' .*'foo'.*scaled_mm='{have}'.*emulate=True"
            ) as error:
                check_float8_layers(model, device)
            assert ("from_recipe_name" in str(error.value)) == (have == "tensorwise")


def refused_body(context: Context) -> str:
    accelerator, model = context.accelerator, nn.Sequential(Float8Layer(TENSORWISE))
    declared = accelerator.capabilities
    accelerator.capabilities = replace(declared, scaled_mm="none")
    with pytest.raises(zero.ModelError) as error:
        zero.initialize(model, torch.optim.AdamW(model.parameters()))
    accelerator.capabilities = declared
    assert type(model[0].weight) is nn.Parameter, "nothing has changed"
    return str(error.value)


def test_initialize_refuses_such_a_layer_on_every_rank(cluster: Clusters) -> None:
    for said in cluster(2).run(refused_body):
        assert said.startswith(
            "layer '0' is a Float8Layer that multiplies in float8 with a scale for each matrix"
        )
