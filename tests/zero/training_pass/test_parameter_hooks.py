"""What hooks of the program's on accumulated gradients may do: look, and change the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw


def stepping_body(context: Context, stage: int) -> tuple[str, bool]:
    """Optimizers of one parameter each, which step as soon as it has its gradient."""
    model = fresh()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in trained}
    handles = [p.register_post_accumulate_grad_hook(lambda p: own[p].step()) for p in own]
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, stage=stage))
    with pytest.raises(zero.UsageError, match=r"zero\.initialize one optimizer") as raised:
        language_loss(model, 0, context.rank).backward()
    for handle in handles:
        handle.remove()
    engine.backward(language_loss(model, 1, context.rank))
    return str(raised.value), engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_stepping_in_a_backward_is_refused(cluster: Clusters, stage: int) -> None:
    for message, stepped in cluster(2).run(stepping_body, stage=stage):
        assert "a hook on parameter '" in message
        assert stepped


def hook_all(model: nn.Module, hook: Callable[[Tensor], None]) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)


def late_body(context: Context) -> list[str]:
    """Hooks from after zero.initialize, on parameters with and without one from before."""
    model = fresh()
    seen: list[bool] = []

    def see(parameter: Tensor) -> None:
        seen.append(parameter.grad is not None)

    hook_all(model, see)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    told = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(language_loss(model, step, context.rank))
        assert all(seen)
        told += [str(each.message) for each in caught]
        engine.step()
        if step == 0:
            assert not told
            engine = again = zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=20))
            hook_all(model, lambda parameter: None)
    assert again.steps == 2
    return told


def test_later_ones_are_told_that_the_gradient_is_gone(cluster: Clusters) -> None:
    first, second = cluster(2).run(late_body)
    assert ["p.grad = None" in each for each in first] == [True]
    assert not second
