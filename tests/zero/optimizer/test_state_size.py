"""What a host budget has to know: how much state every optimizer keeps."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.training import collected
from zero.optimizer.joint import joint
from zero.optimizer.state_size import first_states, moments_of

Make = Callable[[Any], Optimizer]

KEPT: dict[str, tuple[Make, int]] = {
    "AdamW": (torch.optim.AdamW, 3),
    "Lion": (zero.Lion, 2),
    "SGD": (torch.optim.SGD, 1),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, momentum=0.9), 2),
    "SGD with dampening": (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), 2),
    "AdamW amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), 4),
    "Adam fused": (lambda p: torch.optim.Adam(p, amsgrad=True, fused=True), 4),
    "Adam with a tensor's rate": (lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)), 3),
    "Adam to be captured": (lambda p: torch.optim.Adam(p, amsgrad=True, capturable=True), 4),
    "Adam differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), 3),
    "Adagrad": (torch.optim.Adagrad, 2),
    "Adadelta": (torch.optim.Adadelta, 3),
    "Adamax": (torch.optim.Adamax, 3),
    "ASGD": (torch.optim.ASGD, 2),
    "NAdam": (torch.optim.NAdam, 3),
    "RAdam": (torch.optim.RAdam, 3),
    "RMSprop": (torch.optim.RMSprop, 2),
    "RMSprop centered": (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5), 4),
    "Rprop": (torch.optim.Rprop, 3),
}


def values_per_element(optimizer: Optimizer) -> int:
    """The master among them; the most of any parameter."""
    return 1 + math.ceil(max(moments_of(optimizer).values()))


@pytest.mark.parametrize("name", KEPT)
def test_state_is_counted_and_nothing_is_touched(name: str) -> None:
    make, expected = KEPT[name]
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    optimizer = make(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hook ran"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, random = repr(dict(optimizer.state)), torch.get_rng_state()
    assert values_per_element(optimizer) == expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(dict(optimizer.state)) == state
    assert torch.equal(torch.get_rng_state(), random)


def test_the_most_of_any_param_group_counts() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "amsgrad": True}]
    assert values_per_element(torch.optim.AdamW(groups)) == 4


def test_each_of_several_optimizers_is_counted() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    both = joint([torch.optim.Muon([first.weight]), torch.optim.AdamW([first.bias, *second.parameters()])])
    assert list(moments_of(both).values()) == [1, 2, 2, 2]


class Shapes(Optimizer):
    """Keeps state of every shape, some of it in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            rows, columns = parameter.shape
            left, right = parameter.new_zeros(rows, rows), parameter.new_zeros(columns, columns)
            self.state[parameter] = {
                "sides": [left, right],
                "row": parameter.new_zeros(rows, 1),
                "flat": parameter.new_zeros(rows * columns),
                "three": parameter.new_zeros(3),
                "half": parameter.to(torch.bfloat16),
                "mean": parameter.mean(),
            }


def test_state_of_any_shape_is_counted_as_it_grows() -> None:
    for rows, columns in ((1024, 16), (16, 1024), (7, 5), (35, 0)):
        weight = nn.Parameter(torch.zeros(rows, columns))
        numel = rows * columns
        elements = rows * rows + columns * columns + rows + numel + 3 + numel / 2 if numel else 0
        (found,) = moments_of(Shapes([weight])).values()
        assert found * numel == pytest.approx(elements)
    factored = torch.optim.Adafactor([nn.Parameter(torch.zeros(40, 60))])
    assert [round(n * 2400) for n in moments_of(factored).values()] == [40 + 60]


class Blocks(Optimizer):
    """Keeps codes with a scale for each of 256 elements, of what is large and divisible enough."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            numel, state = parameter.numel(), self.state[parameter]
            if numel < 4096 or numel % 256:
                state["wide"] = torch.zeros_like(parameter)
            else:
                state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state["scales"], state["map"] = torch.zeros(numel // 256), torch.zeros(16)


def test_state_in_blocks_is_counted_as_it_grows() -> None:
    packed = [(64, 64), (1024, 512), (256, 300), (1 << 20,)]
    wide = [(64, 63), (1001, 511), (1000, 1001), (0, 3), ()]
    parameters = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in (*packed, *wide)]
    found = moments_of(Blocks(parameters))
    for parameter in parameters[: len(packed)]:
        numel = parameter.numel()
        assert 4 * found[parameter] * numel == pytest.approx(numel + 4 * numel // 256 + 4 * 16)
    assert [found[parameter] for parameter in parameters[len(packed) :]] == [1, 1, 1, 0, 1]


class Early(Optimizer):
    """Has state before its first step, and then a square of the shorter side and a history."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.new_zeros(parameter.shape[0])

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            short = min(parameter.shape)
            self.state[parameter]["short"] = parameter.new_zeros(short, short)
            self.state[parameter]["history"] = parameter.new_zeros(100)


@pytest.mark.parametrize("shape", [(1000, 16), (16, 1000), (1, 1000), (50000, 512)])
def test_state_that_does_not_grow_is_counted_as_it_is(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    (found,) = moments_of(Early([weight])).values()
    assert found * weight.numel() == pytest.approx(shape[0] + min(shape) ** 2 + 100)


class Matrices(Optimizer):
    """Binds its state anew in every step, to a plain dict without the other parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        matrices = (p for p in self.param_groups[0]["params"] if p.dim() > 1)
        self.state = {p: {"average": torch.zeros_like(p)} for p in matrices}  # type: ignore[assignment]


def test_parameters_may_have_no_state() -> None:
    optimizer = Matrices(nn.Linear(5, 7).parameters())
    assert list(moments_of(optimizer).values()) == [1, 0]
    assert [list(state) for *_, state in first_states(optimizer)] == [["average"], []]


class Halves(Optimizer):
    """Keeps 16-bit state, a number that is not elementwise, and a list of its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.mine:
            self.state[parameter]["half"] = parameter.to(torch.bfloat16)
            self.state[parameter]["mean"] = parameter.mean()
            parameter.add_(1)


class Broken(Halves):
    def step(self, closure: Any = None) -> None:
        raise NotImplementedError("only with a closure")


def test_an_optimizer_of_ones_own_is_counted_by_its_bytes() -> None:
    weight = nn.Parameter(torch.zeros(100))
    assert values_per_element(Halves([weight])) == 2  # half a value, rounded up
    assert not weight.any()


def test_what_cannot_be_counted_is_told() -> None:
    with pytest.raises(zero.OptimizerError, match=r"Broken.*only with a closure.*nor held to a host_budget"):
        values_per_element(Broken([nn.Parameter(torch.zeros(2))]))


WIDTH, LAYERS = 128, 8


@collected()
def within_body(context: Context, dtype: torch.dtype) -> dict[str, tuple[int, int, int]]:
    """Budget for four of eight layers; bytes on the host after a step, by optimizer."""
    found = {}
    for name in ("AdamW", "AdamW amsgrad", "Adagrad", "RMSprop centered"):
        make, values = KEPT[name]
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))
        width = max(4, dtype.itemsize)
        budget = 4 * values * width * WIDTH * WIDTH // context.size
        offload = zero.Offload(optimizer="host", host_budget=budget)
        optimizer = make(model.parameters())
        engine = zero.initialize(
            model, optimizer, zero.Config(offload=offload, units=("Linear",), timeout=20)
        )
        x = torch.ones(4, WIDTH, device=engine.accelerator.device, dtype=dtype)
        engine.backward(engine(x).square().mean())
        engine.step()
        tiers = [s.record.tier.name for u in engine.units for g in u.groups for s in g.subs]
        found[name] = budget, sum(map(_nbytes, _on_host(optimizer))), tiers.count("host")
        gc.collect()
    return found


def _on_host(optimizer: Optimizer) -> list[Tensor]:
    """Masters and their state."""
    masters = [p for g in optimizer.param_groups for p in g["params"] if p.device.type == "cpu"]
    state = [v for p in masters for k, v in optimizer.state[p].items() if k != "step" and v.dim()]
    return [*masters, *state]


def _nbytes(value: Tensor) -> int:
    return value.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("apart")
def test_a_host_budget_holds_for_any_optimizer(cluster: Clusters, dtype: torch.dtype) -> None:
    for found in cluster(2).run(within_body, dtype=dtype, limit=60):
        for name, (budget, held, groups) in found.items():
            assert held <= budget, name
            assert groups == 4, name


def whole_body(context: Context, budget: int) -> tuple[int, list[int]]:
    """Bytes on the host after a step, of a Muon for weights and an AdamW for biases; and those of each group,
    of this rank, that stays on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    offload = zero.Offload(optimizer="host", host_budget=budget)
    optimizers = [torch.optim.Muon(weights), torch.optim.AdamW(biases)]
    config = zero.Config(precision="bf16", offload=offload, units=("Linear",), timeout=20)
    engine = zero.initialize(model, optimizers, config)
    engine.backward(engine(torch.ones(4, WIDTH, device=engine.accelerator.device)).float().square().mean())
    engine.step()
    held, rest = 0, []
    for owned in engine._boundary.optimizer.subs:
        state = [engine.optimizer.state[p.parameter] for p in owned.pieces]
        own = [v for s in state for k, v in s.items() if k != "step"]
        where = {v.device.type for v in own}
        assert where <= {owned.sub.record.opened().master.device.type}
        nbytes = 4 * owned.sub.numel + sum(map(_nbytes, own))
        if owned.sub.record.tier.name == "host":
            held += nbytes
        else:
            rest.append(nbytes)
    return held, rest


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("apart")
def test_a_host_budget_holds_for_whole_parameters(cluster: Clusters, size: int) -> None:
    """Five matrices on two ranks, or three: one has the state of more of them than another."""
    matrix = 4 * WIDTH * WIDTH
    for budget in (matrix, 3 * matrix, 4 * matrix, 6 * matrix):
        found = cluster(size).run(whole_body, budget=budget, limit=60)
        assert max(held for held, _ in found) <= budget
        for index in range(len(found[0][1])):  # whatever stays, some rank would have no room for it
            assert any(held + rest[index] > budget for held, rest in found)
    assert not found[0][1]


class One(nn.Module):
    """One unit: a group of matrices, and one of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def coarse_body(context: Context) -> dict[str, list[str]]:
    """What is told of fractions of one unit, and of eight."""
    told = {}
    for name, tiers, make in (
        ("kernels", ("optimizer", "params", "gradients"), torch.optim.AdamW),
        ("its own", ("optimizer",), torch.optim.Adagrad),
    ):
        offload = zero.Offload(**dict.fromkeys(tiers, "host"), fraction=dict.fromkeys(tiers, 0.9))
        for model in (One(), nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = zero.Config(offload=offload, units="auto" if isinstance(model, One) else ("Linear",))
                zero.initialize(model, make(model.parameters()), config)
            found = [str(w.message) for w in caught if "fraction" in str(w.message)]
            told[f"{name}, {type(model).__name__}"] = found
            assert all(w.filename == __file__ for w in caught if "fraction" in str(w.message))
    return told


@pytest.mark.usefixtures("apart")
def test_a_fraction_that_rounds_to_nothing_is_told(cluster: Clusters) -> None:
    told, nothing = cluster(2).run(coarse_body)
    (message,) = told["kernels, One"]
    for kind in ("params", "gradients"):
        assert f"{kind}: asked for 90%, 3% leaves; the largest group has 97%" in message
    assert "optimizer:" not in message  # a kernel steps any part of it
    assert "Make units smaller" in message
    (message,) = told["its own, One"]
    assert "optimizer: asked for 90%, 3% leaves" in message
    assert told["its own, Sequential"] == []
    assert not any(nothing.values())


def test_options_without_effect_are_refused(tmp_path: Any) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(
        zero.ConfigError, match=r"bf16 parameters, but the model has none: .*precision='bf16'"
    ):
        zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(masters="split"))
    with pytest.raises(zero.ConfigError, match=r"path = '': path is empty.*path='\.' for the current"):
        zero.Offload(optimizer="disk", path="")
    assert type(model.weight) is nn.Parameter


def auto_body(context: Context) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(4, 4)
        zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(offload="auto"))
    return [str(w.message) for w in caught if "auto" in str(w.message)]


def test_auto_says_where_it_has_nothing_to_do(cluster: Clusters, device: str) -> None:
    first, second = cluster(2).run(auto_body)
    assert ["nothing to move" in message for message in first] == ([True] if device == "cpu" else [])
    assert second == []
