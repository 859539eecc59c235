"""Models that do not run the same straight line in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import LanguageModel, features, tokens
from tests.zero.helpers.paths import (
    STRAIGHT,
    decaying,
    error_of,
    fresh,
    straight,
)
from tests.zero.helpers.training import train_averaging, train_zero


def repeated(model: nn.Module, step: int, rank: int) -> Tensor:
    """One block is called three times, and another twice in a row."""
    return model(features(step, rank, model), (0, 1, 0, 2, 2, 3, 0)).loss


def changing_order(model: nn.Module, step: int, rank: int) -> Tensor:
    """Blocks run in another order in every step, the same on all ranks."""
    order = torch.randperm(4, generator=torch.Generator().manual_seed(step)).tolist()
    return model(features(step, rank, model), tuple(order)).loss


def some_unused(model: nn.Module, step: int, rank: int) -> Tensor:
    """Blocks that are left out in some steps, and one that is never used."""
    return model(features(step, rank, model), (0, 1, 2) if step % 3 else (0, 2)).loss


def two_forwards(model: nn.Module, step: int, rank: int) -> Tensor:
    """Two forwards, along different paths, before one backward."""
    first = model(features(step, rank, model), STRAIGHT).loss
    second = model(features(step + 100, rank, model), (3, 1)).loss
    return first + 0.5 * second


def checkpointed(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), STRAIGHT, recompute="non-reentrant").loss


def checkpointed_repeated(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(features(step, rank, model), (0, 1, 0, 3), recompute="non-reentrant").loss


def reentrant(model: nn.Module, step: int, rank: int) -> Tensor:
    x = features(step, rank, model).requires_grad_()  # reentrant checkpointing needs an input with a gradient
    return model(x, STRAIGHT, recompute="reentrant").loss


def evaluation_between(model: nn.Module, step: int, rank: int) -> Tensor:
    """Evaluation without gradients, and a forward whose loss is thrown away, before the real one."""
    with torch.no_grad():
        model(features(step + 50, rank, model), (2, 0))
    model(features(step + 60, rank, model), (1, 3))
    return straight(model, step, rank)


def inference_between(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.inference_mode():
        model(features(step + 50, rank, model), STRAIGHT)
    return straight(model, step, rank)


def one_parameter_unused(model: nn.Module, step: int, rank: int) -> Tensor:
    """Part of a unit gets no gradient in some steps: it must not be stepped or decayed."""
    block = model.blocks[0]
    x = features(step, rank, model)
    assert isinstance(block, nn.Module)
    return block(x).square().mean() if step % 2 else straight(model, step, rank)


def submodule_alone(model: nn.Module, step: int, rank: int) -> Tensor:
    """A unit is called on its own, outside the model's forward."""
    return model.blocks[2](features(step, rank, model)).square().mean() + straight(model, step, rank)


PATHS: tuple[Callable[[nn.Module, int, int], Tensor], ...] = (
    straight,
    repeated,
    changing_order,
    some_unused,
    two_forwards,
    checkpointed,
    checkpointed_repeated,
    reentrant,
    evaluation_between,
    inference_between,
    one_parameter_unused,
    submodule_alone,
)


STEPS = 4  # in which every path that changes from step to step has changed
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "prefetch 0": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
}
OFTEN = ("stage 3", "stage 2", "prefetch 0")
"""What the host trains every path with; other devices do so at stage 3 alone."""
FEW = (changing_order, two_forwards, reentrant, one_parameter_unused)
"""The paths of other settings and sizes."""


def paths_body(context: Context, every: Sequence[str], few: Sequence[str]) -> dict[str, float]:
    """The errors of all paths with the settings of some names, and of a few with those of others."""
    errors = {}
    for path in PATHS if every else FEW:
        reference = train_averaging(context, fresh(), path, decaying, STEPS)
        for name in (*every, *(few if path in FEW else ())):
            config = zero.Config(timeout=10, **SETTINGS[name])
            run = train_zero(context, fresh(), path, config, decaying, STEPS)
            errors[f"{path.__name__}, {name}"] = error_of(run, reference)
    return errors


def test_paths(cluster: Clusters, abilities: Abilities) -> None:
    every = OFTEN[:1] if abilities.apart else OFTEN
    few = [name for name in SETTINGS if name not in every]
    for found in cluster(2).run(paths_body, limit=150, every=every, few=few):
        assert max(found.values()) < 1e-5, found


@pytest.mark.host
@pytest.mark.parametrize("size", [1, 3])
def test_paths_of_other_sizes(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(paths_body, every=[], few=["stage 3"]):
        assert max(found.values()) < 1e-5, found


def parts_body(context: Context) -> bool:
    """Modules of the root unit are called on their own, outside the model's forward."""
    torch.manual_seed(3)
    model = LanguageModel()
    plain = copy.deepcopy(model)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    for module in (model, plain):
        batch = tokens(0, context.rank, module)
        loss = module.head(module.norm(module.blocks[0](module.embedding(batch)))).square().mean()
        if module is plain:
            loss.backward()
        else:
            engine.backward(loss)
    gradient = engine.full_gradient("embedding.weight")
    assert gradient is not None
    expected = plain.embedding.weight.grad
    torch.distributed.all_reduce(expected)
    idle = all(u.idle for u in engine.units)
    return idle and torch.allclose(gradient.cpu(), expected / context.size, rtol=1e-5, atol=1e-7)


def test_parts_of_the_root_unit_work_alone(cluster: Clusters) -> None:
    assert all(cluster(2).run(parts_body))


def lifetimes_body(context: Context) -> dict[str, Any]:
    """Which units are whole while each block runs, forward and backward."""
    model = fresh()
    engine = zero.initialize(model, decaying(model), zero.Config(prefetch=1))
    seen: list[tuple[str, ...]] = []

    def whole() -> tuple[str, ...]:
        return tuple(u.name for u in engine.units if not u.idle)

    for block in model.blocks:
        block.up.register_forward_hook(lambda m, a, o: seen.append(whole()))
        block.up.register_full_backward_hook(lambda m, a, o: seen.append(whole()))
    for step in range(3):
        seen.clear()
        engine.backward(straight(model, step, context.rank))
        between = whole()
        engine.step()
    return {"most": max(len(s) for s in seen), "calls": len(seen), "between": between, "after": whole()}


def test_units_are_released(cluster: Clusters) -> None:
    """At most the root, the unit in use, the prefetched one and the one just finished are whole."""
    for found in cluster(2).run(lifetimes_body):
        assert found["calls"] == 8
        assert found["most"] <= 4, found
        assert found["between"] == found["after"] == (), found
