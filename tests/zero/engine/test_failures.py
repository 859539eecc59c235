"""Failures: exceptions in the middle of a step, on all ranks, and calls in the wrong order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel, Stack, features, tokens
from tests.zero.helpers.paths import STRAIGHT, decaying, fresh, straight
from tests.zero.helpers.training import adamw, same_bits, train_zero


class Trap(RuntimeError):
    pass


def trap(*_: Any) -> None:
    raise Trap("stop here")


def exception_body(context: Context, shard_ranks: int | None) -> dict[str, Any]:
    """Exceptions in forward and backward, on all ranks, then three steps as if nothing had happened."""
    config = zero.Config(timeout=10, shard_ranks=shard_ranks)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=3)
    result: dict[str, Any] = {}
    for where in ("forward", "backward", "own hook", "checkpointed forward", "gradient"):
        model = fresh()
        early = _set_trap(model, where) if where == "gradient" else None  # runs before the engine's hooks
        engine = zero.initialize(model, decaying(model), config)
        handle = early or _set_trap(model, where)
        recompute = "non-reentrant" if where.startswith("checkpointed") else ""
        try:
            loss = model(features(77, context.rank, model), STRAIGHT, recompute=recompute).loss
            engine.backward(loss)
            result[where] = "no exception"
        except Trap:
            result[where] = "trapped"
        handle.remove()
        idle = all(u.idle and not u.in_use for u in engine.units)
        losses = []
        for step in range(3):
            loss = straight(model, step, context.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        result[where] = (result[where], idle, losses == expected.losses)
    return result


def _set_trap(model: Stack, where: str) -> Any:
    if where == "backward":
        return model.blocks[1].down.register_full_backward_hook(trap)
    if where == "own hook":
        return model.blocks[2].register_forward_pre_hook(trap, prepend=True)
    if where == "gradient":
        return model.blocks[2].up.weight.register_post_accumulate_grad_hook(trap)
    return model.blocks[2].up.register_forward_hook(trap)


@pytest.mark.parametrize(
    ("size", "shard_ranks"),
    [pytest.param(1, None, marks=pytest.mark.host), (2, None), pytest.param(4, 2, marks=pytest.mark.host)],
)
def test_an_exception_leaves_the_engine_usable(cluster: Clusters, size: int, shard_ranks: int | None) -> None:
    for found in cluster(size).run(exception_body, shard_ranks=shard_ranks):
        for where, (outcome, idle, same) in found.items():
            assert outcome == "trapped", where
            assert idle, where
            assert same, where


def accumulating_exception_body(context: Context, shard_ranks: int | None) -> bool:
    """An exception drops the whole accumulation window, of which nothing reaches the next step."""
    config = zero.Config(gradient_accumulation_steps=2, timeout=10, shard_ranks=shard_ranks)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)
    model = fresh()
    engine = zero.initialize(model, decaying(model), config)
    engine.backward(straight(model, 50, context.rank))
    handle = _set_trap(model, "backward")
    with pytest.raises(Trap):
        engine.backward(straight(model, 51, context.rank))
    handle.remove()
    with pytest.raises(zero.UsageError, match="without backward"):
        engine.step()
    losses = []
    for step in range(4):
        loss = straight(model, step, context.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses == expected.losses


@pytest.mark.parametrize(("size", "shard_ranks"), [(2, None), (4, 2)])
def test_an_exception_drops_the_accumulation_window(
    cluster: Clusters, size: int, shard_ranks: int | None
) -> None:
    assert all(cluster(size).run(accumulating_exception_body, shard_ranks=shard_ranks))


def usage_body(context: Context) -> dict[str, str]:
    """Calls that make no sense; the engine works after each."""
    model = LanguageModel()
    config = zero.Config(timeout=10, gradient_accumulation_steps=1)
    engine = zero.initialize(model, adamw(model), config)
    batch = tokens(0, context.rank, model)
    messages = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            messages[name] = "nothing raised"
        except zero.UsageError as error:
            messages[name] = str(error)

    attempt("call engine.step() first", engine.step)
    attempt("not a tensor", lambda: engine.backward(3.0))  # type: ignore[arg-type]
    attempt("not a scalar", lambda: engine.backward(model(batch)["logits"]))
    attempt("no gradient", lambda: engine.backward(torch.zeros(())))
    attempt("plain backward", model(batch)["loss"].backward)
    engine.backward(model(batch)["loss"])
    attempt("backward twice", lambda: engine.backward(model(batch)["loss"]))
    engine.step()
    attempt("step twice", engine.step)
    attempt("optimizer.step", engine.optimizer.step)
    engine.backward(model(batch)["loss"])
    messages["still works"] = str(engine.step())
    return messages


@pytest.mark.parametrize("size", [1, 2])
def test_calls_in_the_wrong_order(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(usage_body):
        assert "call engine.backward(loss) first" in found["call engine.step() first"]
        assert "got float" in found["not a tensor"]
        assert "one element" in found["not a scalar"]
        assert "does not depend on any parameter" in found["no gradient"]
        assert "call engine.backward(loss) instead" in found["plain backward"]
        assert "call engine.step() first" in found["backward twice"]
        assert "call engine.backward(loss) first" in found["step twice"]
        assert "call engine.step() instead" in found["optimizer.step"]
        assert found["still works"] == "True"


def same_bits_after_evaluation_body(context: Context) -> bool:
    """Evaluation in eval mode, under no_grad, changes nothing of training."""
    config = zero.Config(timeout=10)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)

    def with_evaluation(model: nn.Module, step: int, rank: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(features(step + 9, rank, model), STRAIGHT)
        model.train()
        return straight(model, step, rank)

    return same_bits(train_zero(context, fresh(), with_evaluation, config, decaying, steps=4), expected)


def without_grad_mode_body(context: Context) -> bool:
    """Backward and step under no_grad, for losses that were computed outside of it."""
    config = zero.Config(gradient_accumulation_steps=2, timeout=10)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)
    model, losses = fresh(), []
    engine = zero.initialize(model, decaying(model), config)
    for step in range(4):
        loss = straight(model, step, context.rank)
        with torch.no_grad():
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses == expected.losses


def test_backward_does_not_need_grad_mode(cluster: Clusters) -> None:
    assert all(cluster(2).run(without_grad_mode_body))


def nothing_trained_body(context: Context) -> list[str]:
    """The errors if the loss does not depend on any parameter of the engine."""
    model = nn.Sequential(nn.Linear(4, 4))
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    x = torch.ones(2, 4, device=engine.accelerator.device)
    said = []
    for freeze in (False, True):
        if freeze:
            model.requires_grad_(False)
            x.requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(x).square().mean())
            engine.step()
        said.append(
            "; ".join(str(w.message) for w in caught if "this step changes nothing" in str(w.message))
        )
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_trains_nothing_is_told(cluster: Clusters, size: int) -> None:
    for rank, (before, after) in enumerate(cluster(size).run(nothing_trained_body)):
        assert before == ""
        assert ("are all of them frozen now" in after) == (rank == 0)


def test_evaluation_changes_nothing(cluster: Clusters) -> None:
    assert all(cluster(2).run(same_bits_after_evaluation_body))
