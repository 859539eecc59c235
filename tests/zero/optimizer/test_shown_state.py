"""What a program may do with `optimizer.state`: read it, and write into it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import features, fresh, language_loss
from tests.zero.helpers.training import adamw


def drop_a_piece(optimizer: Optimizer) -> None:
    del optimizer.state[next(iter(optimizer.state))]


def replace_a_piece(optimizer: Optimizer) -> None:
    optimizer.state[next(iter(optimizer.state))] = {}


def replace_a_moment(optimizer: Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def pop_a_moment(optimizer: Optimizer) -> None:
    next(iter(optimizer.state.values())).pop("exp_avg")


REFUSED: list[Callable[[Optimizer], None]] = [
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: next(iter(optimizer.state.values())).clear(),
    drop_a_piece,
    replace_a_piece,
    replace_a_moment,
    pop_a_moment,
]


def replace_all(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def refused_body(context: Context, stage: int, folder: str) -> None:
    """Nothing that is refused changes anything, and moments may be written to in place."""
    model = fresh()
    engine = zero.initialize(model, optimizer := adamw(model), zero.Config(timeout=20, stage=stage))
    engine.backward(language_loss(model, 0, context.rank))
    engine.step()
    name, parameter = next(each for each in model.named_parameters() if each[1].requires_grad)
    before = engine.full_optimizer_state(name)
    for change in REFUSED:
        with pytest.raises(zero.UsageError, match=r"engine\.attach"):
            change(optimizer)
    state = next(iter(optimizer.state.values()))
    with pytest.raises(zero.UsageError, match=r"'slow' with it.*dictionary of your own"):
        state["slow"] = torch.zeros(1)
    assert state.pop("slow", None) is None
    with pytest.raises(zero.UsageError, match=r"engine\.full_optimizer_state"):
        optimizer.state[parameter]
    assert parameter not in optimizer.state
    for same in (optimizer.state.copy(), copy.copy(optimizer.state), copy.deepcopy(optimizer.state)):
        same.clear()
    for piece, state in optimizer.state.items():
        copy.deepcopy(state).clear()
        for key, value in state.items():
            state[key] = value.to(value.device)
        optimizer.state[piece] = {key: value.to(value.device) for key, value in state.items()}
    after = engine.full_optimizer_state(name)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    assert not engine.full_optimizer_state(name)["exp_avg"].any()
    engine.backward(language_loss(model, 1, context.rank))
    kept = optimizer.state
    replace_all(optimizer)
    with pytest.raises(zero.UsageError, match=r"optimizer\.state was replaced"):
        engine.step()
    optimizer.state = kept
    assert engine.step()
    engine.save_checkpoint(folder)
    replace_all(optimizer)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(zero.UsageError, match=r"optimizer\.state was replaced"):
            call(folder)
    with pytest.raises(zero.UsageError, match=r"optimizer\.state was replaced"):
        engine.full_optimizer_state(name)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_would_change_nothing_is_refused(cluster: Clusters, stage: int, tmp_path: Path) -> None:
    cluster(2).run(refused_body, stage=stage, folder=str(tmp_path))


def nothing_body(context: Context) -> None:
    """A kernel that keeps nothing shows nothing that could be lost."""
    model = fresh()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = zero.initialize(model, optimizer := torch.optim.SGD(trained, lr=0.1), zero.Config(timeout=20))
    engine.backward(language_loss(model, 0, context.rank))
    optimizer.state.clear()
    assert engine.step()


def test_state_that_is_empty_may_be_cleared(cluster: Clusters) -> None:
    cluster(2).run(nothing_body)


def one_parameters_body(context: Context) -> list[float]:
    """The differences from torch, where one parameter of those that a kernel steps begins anew."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).to(context.accelerator.device)
    model = copy.deepcopy(plain)
    steps = [torch.optim.AdamW(each.parameters(), lr=0.1, betas=(0.5, 0.9)) for each in (plain, model)]
    engine = zero.initialize(model, steps[1], zero.Config(timeout=20, stage=0))
    for step in range(4):
        for each, optimizer in zip((plain, model), steps, strict=True):
            if step == 2:
                for value in optimizer.state[optimizer.param_groups[0]["params"][0]].values():
                    value.zero_()
            each(features(step, 0, each, width=6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert engine.steps == 4
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return [float((expected - got).abs().max()) for expected, got in pairs]


def test_one_parameter_may_begin_anew(cluster: Clusters) -> None:
    (differences,) = cluster(1).run(one_parameters_body)
    assert max(differences) < 1e-6


def own_body(context: Context) -> int:
    """An optimizer that steps itself makes its state anew."""
    model = fresh()
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
    engine.backward(language_loss(model, 0, context.rank))
    engine.step()
    for state in optimizer.state.values():
        state["marked"] = True
    piece = next(iter(optimizer.state))
    optimizer.state[piece] = dict(optimizer.state.pop(piece))
    return sum(state["marked"] for state in optimizer.state.values())


def test_what_an_optimizer_keeps_itself_is_its_own(cluster: Clusters) -> None:
    assert all(cluster(2).run(own_body))


class Averaging(Optimizer):
    """Wraps another optimizer, with whose state its own is one object."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            for piece in group["params"]:
                state = self.state[piece]
                state["average"] = state.get("average", torch.zeros_like(piece)).lerp(piece, 0.1)


def wrapped_body(context: Context, folder: str) -> None:
    """What the wrapped optimizer keeps is seen and saved, and a program may give it new state."""
    model = fresh()
    trained = [p for p in model.parameters() if p.requires_grad]
    base = torch.optim.RAdam(trained, lr=0.01)
    engine = zero.initialize(model, optimizer := Averaging(base), zero.Config(timeout=20))

    def one_step() -> dict[str, torch.Tensor]:
        engine.backward(language_loss(model, 0, context.rank))
        engine.step()
        return engine.full_optimizer_state("gain")

    saved = [one_step(), one_step()][-1]
    assert saved.keys() == {"step", "exp_avg", "exp_avg_sq", "average"}
    engine.save_checkpoint(folder)
    optimizer.state = base.state = defaultdict(dict)
    assert one_step()["step"] == 1
    engine.load_checkpoint(folder)
    assert all(torch.equal(value, saved[key]) for key, value in engine.full_optimizer_state("gain").items())


def test_state_that_a_wrapper_shares_stays_shared(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(wrapped_body, folder=str(tmp_path))
