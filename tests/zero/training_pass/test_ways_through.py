"""Ways through a model other than one output for each block, used once, in one backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.ways import WIDTH, Loss, Slotted, averaged, batch, chain, plain


class InPlace(nn.Module):
    """Changes its input and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change = self.linear(torch.relu(x))
        x += change
        return x


class Experts(nn.Module):
    """Writes each expert's result into a part of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, expert in enumerate(self.experts):
            x[number::2] = expert(x[number::2].clone())
        return x


class Positions(nn.Module):
    """Also returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.table[:4]


class Added(nn.Module):
    """Blocks that return pairs, the second parts of which are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Positions() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, table = block(x)
            total = total + table
        return x + total


class Wrapping(InPlace):
    def forward(self, x: Any) -> Any:
        x = x() if isinstance(x, Slotted) else x
        return Slotted(x + self.linear(torch.relu(x)))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient penalty of Gulrajani et al. (arXiv:1704.00028)."""
    x = x.requires_grad_()
    value = model(x)
    (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value.mean() + (gradient.norm(dim=1) - 1).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "in place": (lambda: chain(InPlace), plain),
    "experts": (lambda: chain(Experts), plain),
    "a view of a parameter": (Added, plain),
    "objects": (lambda: chain(Wrapping), plain),
    "gradient penalty": (Critic, penalised),
}


def gradients_body(context: Context, name: str, **settings: Any) -> float:
    """The largest difference between the engine's gradients and the plain model's, over two backwards."""
    make, loss = CASES[name]
    torch.manual_seed(3)
    model, device = make(), context.accelerator.device
    expected = averaged(copy.deepcopy(model).to(device), loss, context.size)
    engine = zero.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), zero.Config(timeout=20, **settings)
    )
    worst = 0.0
    for _ in range(2):
        engine.backward(loss(engine.module, batch(context.rank, device)))
        for parameter, value in expected.items():
            have = engine.full_gradient(parameter)
            assert have is not None, parameter
            worst = max(worst, float((have - value).abs().max()))
        engine.step()
        assert all(unit.idle or unit.resident for unit in engine.units)
    return worst


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_model(cluster: Clusters, name: str, stage: int) -> None:
    for worst in cluster(2).run(gradients_body, name=name, stage=stage):
        assert worst < 1e-6


class Keeping(nn.Module):
    """Keeps its intermediate result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.first(x))
        value: Tensor = self.second(self.kept)
        return value


def kept_body(context: Context, whole: bool) -> str:
    """A loss from what a block in the middle has kept, while its output is in no loss."""
    model, x = chain(Keeping), batch(context.rank, context.accelerator.device)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    with zero.gathered(model) if whole else nullcontext():
        engine(x)
        try:
            engine.backward(model[2].kept.square().mean())
        except zero.UsageError as error:
            engine.backward(engine(x).mean())
            return str(error)
    return ""


@pytest.mark.parametrize("whole", [False, True])
def test_a_unit_entered_by_another_way(cluster: Clusters, abilities: Abilities, whole: bool) -> None:
    """It is refused except where the values stay (those that ranks of a node share, and where no bytes can be
    dropped) or are shown: there it works."""
    dropped = abilities.apart and abilities.capabilities.storage_resize
    for message in cluster(2).run(kept_body, whole=whole):
        assert ("other than through its output" in message) == (not whole and dropped)


def fresh_weights_body(context: Context) -> float:
    """A differentiable gradient of the model is computed and kept, and then a step is done."""
    torch.manual_seed(6)
    model, x = Critic(), batch(context.rank, context.accelerator.device)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), zero.Config(timeout=20))
    engine.backward(plain(model, x))
    inputs = x.clone().requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    engine.step()
    after = engine(x).detach()
    twin = Critic().to(x.device)
    state = engine.state_dict()
    twin.load_state_dict(state) if context.rank == 0 else None
    return float((twin(x) - after).abs().max()) if context.rank == 0 else 0.0


def test_a_step_is_seen_whatever_was_kept(cluster: Clusters) -> None:
    assert max(cluster(2).run(fresh_weights_body)) < 1e-6


def functional_body(context: Context) -> bool:
    """torch.func over a model at stage 3, whose outputs are not ordinary tensors then."""
    model, x = Critic(), batch(context.rank, context.accelerator.device)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), zero.Config(timeout=20))
    with torch.no_grad():
        expected = engine(x)
        return torch.allclose(torch.func.vmap(engine.module)(x), expected, atol=1e-6)


def test_functional_transforms(cluster: Clusters) -> None:
    assert cluster(2).run(functional_body) == [True, True]


def adversary_body(context: Context, whole: bool) -> float:
    """A generator is trained through another engine's critic, which is frozen and recomputed."""
    torch.manual_seed(4)
    generator, critic, device = chain(InPlace), Critic(), context.accelerator.device
    frozen = critic.requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, judge: nn.Module = frozen) -> Tensor:
        made = model(x)
        if whole:
            return -checkpoint(judge, made, use_reentrant=False).mean()
        for block in judge.blocks:
            made = checkpoint(block, made, use_reentrant=False)
        return -judge.head(made).mean()

    twin = copy.deepcopy(critic).to(device)
    expected = averaged(
        copy.deepcopy(generator).to(device), lambda model, x: loss(model, x, twin), context.size
    )
    critic.requires_grad_(True)
    engines = [
        zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
        for model in (generator, critic)
    ]
    critic.requires_grad_(False)
    engines[0].backward(loss(generator, batch(context.rank, device)))
    return max(float((engines[0].full_gradient(n) - v).abs().max()) for n, v in expected.items())


@pytest.mark.parametrize("whole", [False, True])
def test_through_another_engines_model(cluster: Clusters, whole: bool) -> None:
    for worst in cluster(2).run(adversary_body, whole=whole):
        assert worst < 1e-6


class Towers(nn.Module):
    """Two towers on one input that needs no gradient; a layer of the first block may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(Pair() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        values = [x, x]
        for number in (1, 0):
            for place, block in enumerate(self.towers[number]):
                values[number] = block(values[number], both or place > 0 or number > 0)
        return (values[0] * values[1]).mean()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return x + self.second(x) if both else x


def order_body(context: Context, stage: int) -> list[str]:
    """The collectives of a step in which rank 1 leaves a layer out."""
    model = Towers()
    config = zero.Config(stage=stage, timeout=20)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    for step in range(3):
        before = engine._communicator.issued
        engine.backward(
            engine(batch(context.rank, context.accelerator.device), step < 2 or context.rank != 1)
        )
        issued = [each.text for each in engine._communicator.ledger.line.issued if each.number > before]
        engine.step()
    return issued


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_issue_collectives_in_one_order(cluster: Clusters, stage: int) -> None:
    """Even if one has no gradient for a parameter: libraries with one queue would hang otherwise."""
    first, second = cluster(2).run(order_body, stage=stage)
    assert first == second
    assert sum("reduce_scatter" in what for what in first) >= 4


def stale_body(context: Context) -> tuple[float, float]:
    """Gradients from before the engine, for example from a search for the learning rate."""
    torch.manual_seed(5)
    model = Critic()
    expected = averaged(copy.deepcopy(model), plain, context.size)
    (1000 * plain(model, batch(0, torch.device("cpu")))).backward()
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    engine.backward(plain(model, batch(context.rank, context.accelerator.device)))
    have = engine.full_gradient("head.weight")
    return float(have.abs().max()), float(expected["head.weight"].abs().max())


@pytest.mark.parametrize("size", [1, 2])
def test_old_gradients_do_not_count(cluster: Clusters, size: int) -> None:
    for have, expected in cluster(size).run(stale_body):
        assert have == pytest.approx(expected, rel=1e-5)


class Caching(nn.Module):
    """Appends to a list of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor], options: dict[str, Any]) -> Tensor:
        value: Tensor = self.linear(x)
        cache.append(value)
        options["seen"] = True
        return value


def caching_body(context: Context) -> tuple[int, bool, torch.dtype]:
    model = Caching()
    engine = zero.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(precision="bf16")
    )
    cache: list[Tensor] = []
    options: dict[str, Any] = {"seen": False}
    value = engine(batch(0, context.accelerator.device), cache, options)
    return len(cache), options["seen"], value.dtype


def test_a_callers_containers_are_handed_on(cluster: Clusters) -> None:
    assert cluster(1).run(caching_body) == [(1, True, torch.bfloat16)]


def first_inference_body(context: Context, **settings: Any) -> bool:
    """In inference mode an engine is made, validates before any training, and runs a backward."""
    model, device = Critic(), context.accelerator.device
    config = zero.Config(timeout=20, **settings)
    with torch.inference_mode():
        engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast(device.type, torch.bfloat16, enabled=not settings):
        with torch.inference_mode():
            engine(batch(0, device))
        loss = engine(batch(0, device)).float().mean()
    with torch.inference_mode():
        loss.backward()
    return engine.step()


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "gather_dtype": "int8"}])
def test_inference_comes_first(cluster: Clusters, settings: dict[str, Any]) -> None:
    assert cluster(2).run(first_inference_body, **settings) == [True, True]


def parts_body(context: Context) -> tuple[int, int]:
    """A model that is used only through its parts, whose order is known from the second step on."""
    model, device = Critic(), context.accelerator.device
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    schedule = engine._pass.schedule
    for _ in range(3):
        train_on(engine, model.head(model.blocks(batch(0, device))).mean())
    known = len(schedule._record)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero.training_pass.schedule._LONGEST", 50)
        for _ in range(100):
            model.blocks(batch(0, device))
    return known, len(schedule._current)


def test_models_that_are_used_through_their_parts(cluster: Clusters) -> None:
    for known, kept in cluster(2).run(parts_body, limit=60):
        assert known > 0
        assert kept <= 50
