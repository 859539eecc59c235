"""State on the host and on disk: the values of training without, whatever lives where."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.late_stream import run_late
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import features, fresh, language_loss
from tests.zero.helpers.optimizers import adagrad, lion, momentum
from tests.zero.helpers.training import Run, adamw, same_bits, scaled_error, state_error, train_zero
from tests.zero.helpers.worlds import UP_TO_TWO
from zero.tiers.placement import Placement, PlacementRequest, Placer
from zero.tiers.tier import ON_DEVICE, ON_DISK, ON_HOST, Tier
from zero.tiers.values import Column

STEPS = 4
TWO = (Column(torch.float32), Column(torch.float32))  # moments


def two_kernels(model: nn.Module) -> Any:
    every = list(model.parameters())
    return [torch.optim.AdamW(every[::2], lr=1e-3), zero.Lion(every[1::2], lr=1e-3)]


def tiers(path: str) -> dict[str, zero.Offload]:
    """Every tier of every kind of state, alone and together. "split": with such masters."""
    return {
        "host": zero.Offload(optimizer="host"),
        "half": zero.Offload(optimizer="host", fraction=0.5),
        "disk": zero.Offload(optimizer="disk", path=path),
        "split": zero.Offload(),
        "split, params on host": zero.Offload(params="host"),
        "split, half": zero.Offload(optimizer="host", fraction=0.5, sub_group_size=64),
        "split, visits": zero.Offload(optimizer="host", step="device", sub_group_size=100),
        "split, all visits": zero.Offload(optimizer="host", params="disk", step="device", path=path),
        "split on disk": zero.Offload(optimizer="disk", path=path),
        "split, everything": zero.Offload(optimizer="disk", params="disk", gradients="disk", path=path),
        "cache": zero.Offload(optimizer="disk", path=path, host_budget=8000),
        "caches": zero.Offload(
            optimizer="disk",
            params="disk",
            gradients="disk",
            path=path,
            host_budget={"optimizer": 8000, "params": 2000, "gradients": "1kB"},
        ),
        "params": zero.Offload(params="host"),
        "params on disk": zero.Offload(params="disk", path=path),
        "gradients": zero.Offload(gradients="host"),
        "gradients stay": zero.Offload(optimizer="host", gradients="device"),
        "half of the params": zero.Offload(params="host", fraction={"params": 0.5}),
        "parts of everything": zero.Offload(
            optimizer="host",
            params="disk",
            gradients="host",
            path=path,
            fraction={"optimizer": 0.6, "params": 0.5, "gradients": 0.3},
        ),
        "all on host": zero.Offload(optimizer="host", params="host"),
        "small records on host": zero.Offload(optimizer="host", params="host", sub_group_size=64),
        "a part in small records": zero.Offload(optimizer="host", fraction=0.37, sub_group_size=64),
        "small records": zero.Offload(optimizer="disk", path=path, sub_group_size=64),
        "split, small records": zero.Offload(
            optimizer="disk", params="disk", gradients="disk", path=path, sub_group_size=64
        ),
        "small records everywhere": zero.Offload(
            optimizer="disk", path=path, host_budget=8000, fraction=0.7, sub_group_size=64
        ),
        "all on disk": zero.Offload(optimizer="disk", params="disk", gradients="disk", path=path),
    }


def masters(name: str) -> str:
    return "split" if name.startswith("split") else "fp32"


def run_of(
    context: Context,
    offload: zero.Offload | None,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = STEPS,
    **settings: Any,
) -> Run:
    config = zero.Config(offload=offload, timeout=20, **settings)
    return train_zero(context, fresh(), language_loss, config, optimizer, steps)


def compared(run: Run, reference: Run) -> tuple[bool, float]:
    """Whether two runs agree bit for bit, and the largest difference."""
    loss = scaled_error(run.losses, reference.losses)
    return same_bits(run, reference), max(loss, state_error(run.state, reference.state) if run.state else 0.0)


def check(found: dict[str, tuple[bool, float]], device: str, bound: float) -> None:
    """On the host the tiers share the device's kernels, so everything is equal; elsewhere it is rounding."""
    for name, (same, error) in found.items():
        assert same or device != "cpu", name
        assert error < bound, (name, error)


ALONE = ("half", "split, everything", "caches", "params", "parts of everything", "small records everywhere")
"""Tiers for one rank, which gathers and sums nothing."""
LATE = (
    *(
        "host",
        "disk",
        "split, params on host",
        "split, half",
        "split, everything",
        "caches",
        "params on disk",
        "gradients stay",
        "half of the params",
    ),
    *("parts of everything", "small records on host", "split, visits", "all on disk"),
)
"""Tiers for a late stream: every kind of state on the host and on disk, whole, in parts and split."""


@cache
def on_device(context: Context, optimizer: Any = adamw, **settings: Any) -> Run:
    """Training without tiers, the same in every test."""
    return run_of(context, None, optimizer, **settings)


def tiers_body(
    context: Context, path: str, precision: str, names: Sequence[str] | None
) -> dict[str, tuple[bool, float]]:
    """names: of tiers; None: all."""
    settings = {"precision": precision, "clip_norm": 0.5}
    found = {}
    for name, offload in tiers(path).items():
        kept = masters(name)
        if (precision == "bf16" or kept == "fp32") and (names is None or name in names):
            reference = on_device(context, **settings, masters=kept)
            found[name] = compared(run_of(context, offload, **settings, masters=kept), reference)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("size", "names"), [pytest.param(1, ALONE, marks=pytest.mark.host), (2, None)], ids=["1", "2"]
)
def test_every_tier_trains_alike(
    cluster: Clusters, tmp_path: Path, device: str, size: int, names: Any, precision: str
) -> None:
    arguments = {"path": str(tmp_path), "precision": precision, "names": names}
    for found in cluster(size).run(tiers_body, **arguments, limit=120):
        check(found, device, 1e-5 if precision == "fp32" else 3e-2)
    assert os.listdir(tmp_path) == []  # no name, so nothing to be left behind


def settings_body(context: Context, path: str, names: Sequence[str] | None) -> dict[str, tuple[bool, float]]:
    """names: of settings; None: all."""
    disk = zero.Offload(optimizer="disk", path=path)
    everything = zero.Offload(optimizer="disk", params="disk", gradients="disk", path=path)
    host = zero.Offload(optimizer="host", params="host")
    cases: dict[str, tuple[zero.Offload, dict[str, Any]]] = {
        "stage 1": (disk, {"stage": 1}),
        "stage 2": (disk, {"stage": 2, "gradient_accumulation_steps": 2}),
        "stage 2 host": (zero.Offload(optimizer="host"), {"stage": 2, "precision": "bf16"}),
        "accumulation": (host, {"gradient_accumulation_steps": 3, "steps": 6}),
        "accumulation on disk": (
            everything,
            {"gradient_accumulation_steps": 3, "precision": "bf16", "steps": 6},
        ),
        "local": (everything, {"gradient_accumulation_steps": 2, "accumulate": "local"}),
        "persistent": (host, {"persistent_below": 100}),
        "fp16": (disk, {"precision": "fp16", "clip_norm": 1.0}),
        "fp16 host": (host, {"precision": "fp16"}),
        "no prefetch": (everything, {"prefetch": 0}),
    }
    return {
        name: compared(run_of(context, offload, **settings), on_device(context, **settings))
        for name, (offload, settings) in cases.items()
        if names is None or name in names
    }


@pytest.mark.parametrize(
    ("size", "names"),
    [
        pytest.param(1, ("stage 2", "accumulation on disk", "local", "fp16 host"), marks=pytest.mark.host),
        (2, None),
    ],
    ids=["1", "2"],
)
def test_tiers_with_every_setting(
    cluster: Clusters, tmp_path: Path, device: str, size: int, names: Any
) -> None:
    for found in cluster(size).run(settings_body, path=str(tmp_path), names=names, limit=120):
        check(found, device, 3e-2)


def norms_body(context: Context, path: str) -> list[list[float]]:
    """The norms of a model with enough groups that the order of a sum would show."""

    def norms(offload: zero.Offload | None) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zero.initialize(model, optimizer, zero.Config(offload=offload, clip_norm=1e-3, timeout=20))
        found = []
        for step in range(4):
            train_on(engine, engine(features(step, context.rank, model, 8, 256)).square().mean())
            found.append(float(engine.grad_norm))
        return found

    half = {"gradients": 0.5}
    tiers = (
        zero.Offload(gradients="disk", path=path),
        zero.Offload(gradients="disk", path=path, fraction=half),
        zero.Offload(gradients="host"),
    )
    return [norms(None), *(norms(offload) for offload in tiers)]


def test_the_norm_does_not_depend_on_where_gradients_are(
    cluster: Clusters, tmp_path: Path, device: str
) -> None:
    for plain, *others in cluster(2).run(norms_body, path=str(tmp_path)):
        for found in others:
            assert found == plain or device != "cpu"
            assert scaled_error(found, plain) < 1e-5


def optimizers_body(context: Context, path: str) -> dict[str, tuple[bool, float]]:
    offloads = {
        "host": zero.Offload(optimizer="host", params="host"),
        "disk": zero.Offload(optimizer="disk", path=path),
        "both": zero.Offload(optimizer="disk", path=path, host_budget=1 << 14),
        "visits": zero.Offload(optimizer="host", step="device", sub_group_size=100),
    }
    tiers_of: dict[Any, Sequence[str]] = {
        lion: ("host", "disk"),
        momentum: ("host", "disk"),
        adagrad: ("host",),
        two_kernels: tuple(offloads),
    }
    found = {}
    for optimizer, names in tiers_of.items():
        reference = on_device(context, optimizer, precision="bf16", clip_norm=1.0)
        for name in names:
            run = run_of(context, offloads[name], optimizer, precision="bf16", clip_norm=1.0)
            found[f"{optimizer.__name__} {name}"] = compared(run, reference)
    return found


def test_tiers_with_every_optimizer(cluster: Clusters, tmp_path: Path, device: str) -> None:
    for found in cluster(2).run(optimizers_body, path=str(tmp_path), limit=120):
        check(found, device, 3e-2)


def placed(
    offload: zero.Offload, sizes: Sequence[int] = (6400,) * 20, item_bytes: int = 4, divisible: bool = True
) -> list[Placement]:
    """Of groups whose shards are of these sizes."""
    placer = Placer(offload, ON_HOST)
    return placer.place(
        [PlacementRequest(n, item_bytes, 2, True, False, moments=TWO, divisible=divisible) for n in sizes]
    )


def elements(placements: Sequence[Placement]) -> dict[Tier, int]:
    """Of optimizer state, by tier."""
    found: dict[Tier, int] = {}
    for numel, tier in (each for placement in placements for each in placement.optimizer):
        found[tier] = found.get(tier, 0) + numel
    return found


@pytest.mark.parametrize(("part", "groups"), [(0.29, 100), (0.58, 50)])
def test_records_are_the_group_whatever_the_rounding(part: float, groups: int) -> None:
    """0.29 × 100 is below 29 in floating point: nothing is left to leave then, and not less."""
    for placement in placed(zero.Offload(optimizer="host", fraction=part), (1024,) * groups):
        assert sum(n for n, _ in placement.optimizer) == 1024


def test_a_fraction_of_each_kind_leaves_the_device() -> None:
    fraction = {"optimizer": 0.5, "params": 0.25}
    offload = zero.Offload(optimizer="disk", params="host", gradients="host", path="/", fraction=fraction)
    there = placed(offload)
    assert [p.optimizer for p in there].count(((6400, ON_DISK),)) == 10
    assert [p.params for p in there].count(ON_HOST) == 5
    assert [p.gradients for p in there].count(ON_HOST) == 20
    assert len({p.optimizer for p in there[:2]}) == 2  # spread evenly, not the first ones all


@pytest.mark.parametrize("part", [0.01, 0.3, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("sizes", [(64_000,), (64_000, 640, 640), (640,) * 9 + (64_000,), (6400,) * 3])
def test_a_fraction_of_optimizer_state_is_met_whatever_groups_there_are(
    sizes: tuple[int, ...], part: float
) -> None:
    there = placed(zero.Offload(optimizer="host", fraction=part, sub_group_size=1000), sizes)
    for numel, placement in zip(sizes, there, strict=True):
        assert sum(n for n, _ in placement.optimizer) == numel
        assert all(n <= 1024 for n, tier in placement.optimizer if tier is ON_HOST)  # a multiple of 64
        assert [tier for _, tier in placement.optimizer].count(ON_DEVICE) <= 1  # what stays need not be cut
    assert 0 <= part * sum(sizes) - elements(there).get(ON_HOST, 0) <= 64
    assert sum(len({tier for _, tier in p.optimizer}) == 2 for p in there) <= 1  # gradients go one way


def test_what_no_kernel_steps_is_not_cut() -> None:
    offload = zero.Offload(optimizer="host", fraction=0.5, sub_group_size=64)
    there = placed(offload, (6400, 6400, 6400), divisible=False)
    assert {p.optimizer for p in there} == {((6400, ON_HOST),), ((6400, ON_DEVICE),)}


@pytest.mark.parametrize(("spare", "whole"), [(0, 2), (-1, 1)])
def test_what_one_rank_alone_keeps_counts_for_the_budget(spare: int, whole: int) -> None:
    """Two groups stepped whole by different ranks, then records that a kernel steps, for what is left."""
    own = [(4000, 0, 800), (0, 4000, 800)]
    mine = [PlacementRequest(1000, 2, 2, True, False, divisible=False, beside=each) for each in own]
    budget = 2 * 4000 + 4000 + spare
    offload = zero.Offload(optimizer="host", host_budget=budget)
    *wholes, last = Placer(offload, ON_HOST).place(
        [*mine, PlacementRequest(6400, 2, 2, True, False, moments=TWO)]
    )
    assert [p.optimizer for p in wholes].count(((1000, ON_HOST),)) == whole
    free = budget - 8000 if whole == 1 else 0
    assert elements([last]).get(ON_HOST, 0) == free // 12 // 64 * 64


def test_gradients_go_with_their_optimizer_state() -> None:
    there = placed(zero.Offload(optimizer="host", fraction=0.5))
    both = {(p.optimizer, p.gradients) for p in there}
    assert both == {(((6400, ON_HOST),), ON_HOST), (((6400, ON_DEVICE),), ON_DEVICE)}
    assert {p.params for p in there} == {ON_DEVICE}
    (mixed,) = placed(zero.Offload(optimizer="host", fraction=0.5), (6400,))
    assert mixed.optimizer == ((3200, ON_HOST), (3200, ON_DEVICE))
    assert mixed.gradients is ON_HOST  # what the host steps is not to wait on the device


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"params": "host", "fraction": 0.5}, "optimizer does not: set optimizer='host' or 'disk'"),
        ({"optimizer": "host", "fraction": {"params": 0.5}}, "params does not: set params='host' or 'disk'"),
        ({"optimizer": "host", "fraction": {"gradients": 0.5}}, "gradients does not: set gradients='host'"),
        ({"optimizer": "host", "fraction": 0.0}, "optimizer = 0.0: Input should be greater than 0"),
        (
            {"params": "host", "fraction": {"params": 1.5}},
            "params = 1.5: Input should be less than or equal to 1",
        ),
        (
            {"params": "host", "fraction": {"parameters": 0.5}},
            "unknown key 'parameters'; did you mean 'params'",
        ),
        ({"params": "host", "fraction": "half"}, "should be a valid number"),
    ],
)
def test_fractions_that_do_not_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(zero.ConfigError, match=told):
        zero.Offload(**settings)


@pytest.mark.parametrize(
    ("params", "item_bytes", "each"),
    [("device", 2, 12), ("host", 2, 12), ("device", 4, 12), ("host", 4, 12 - 4)],
)
def test_the_budget_bounds_records(params: Any, item_bytes: int, each: int) -> None:
    for spare, fits in ((0, 44_800), (-1, 44_736)):
        budget = 44_800 * each + spare
        offload = zero.Offload(optimizer="host", params=params, host_budget=budget)
        assert elements(placed(offload, item_bytes=item_bytes)) == {ON_HOST: fits, ON_DEVICE: 128_000 - fits}
        offload = zero.Offload(optimizer="disk", path="/", params=params, host_budget=budget, fraction=0.5)
        expected = {ON_HOST: fits, ON_DISK: 64_000 - fits, ON_DEVICE: 64_000}
        assert elements(placed(offload, item_bytes=item_bytes)) == expected
    whole = placed(offload, item_bytes=item_bytes, divisible=False)
    assert elements(whole)[ON_HOST] == 38_400  # six groups


def test_a_budget_for_each_kind() -> None:
    budgets = {"optimizer": 64 * 12, "params": "25.6kB", "gradients": 6400 * 2 * 3 + 1}
    tiers = {"optimizer": "disk", "params": "host", "gradients": "disk"}
    there = placed(zero.Offload(**tiers, path="/", host_budget=budgets), (6400,) * 4, item_bytes=2)
    assert elements(there) == {ON_HOST: 64, ON_DISK: 4 * 6400 - 64}
    assert [p.params for p in there] == [ON_HOST, ON_HOST, ON_DEVICE, ON_DEVICE]
    assert [p.gradients for p in there] == [ON_HOST, ON_HOST, ON_HOST, ON_DISK]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"params": "host", "host_budget": 5}, "optimizer does not: set optimizer='host' or 'disk'"),
        ({"optimizer": "host", "host_budget": {"params": 5}}, "params does not: set params='host'"),
        (
            {"optimizer": "host", "host_budget": {"parameters": 5}},
            "unknown key 'parameters'; did you mean 'params'",
        ),
        (
            {"optimizer": "host", "host_budget": -1},
            "optimizer = -1: Input should be greater than or equal to 0",
        ),
        (
            {"params": "host", "host_budget": {"params": 0.5}},
            "params = 0.5: Input should be a valid integer",
        ),
        ({"optimizer": "host", "host_budget": "much"}, "'much' is not a size"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(zero.ConfigError, match=told):
        zero.Offload(**settings)


def test_settings_are_hashed_and_do_not_change() -> None:
    half, named = (zero.Offload(optimizer="host", fraction=part) for part in (0.5, {"optimizer": 0.5}))
    assert half == named
    assert hash(half) == hash(named)
    assert half != zero.Offload(optimizer="host")
    assert len({zero.Config(offload=offload) for offload in (half, named, None)}) == 2
    with pytest.raises(ValidationError):
        half.fraction.optimizer = 1.0
    assert zero.Offload(optimizer="host", fraction=half.fraction) == half


def default_device_body(context: Context, path: str) -> dict[str, bool]:
    """With torch's default device set, as scripts do, training has the bits that it has without."""
    here = context.accelerator.device
    chosen = [None, *(tiers(path)[name] for name in ("host", "split, everything"))]
    found = {}
    for turn, offload in enumerate(chosen):
        runs = []
        for default in (None, here):
            torch.set_default_device(default)
            try:
                runs.append(_by_default(here, offload, f"{path}/{turn}"))
            finally:
                torch.set_default_device(None)
        found[str(offload)] = same_bits(*runs)
    return found


def _by_default(device: torch.device, offload: Any, path: str) -> Run:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * number)
    config = zero.Config(precision="bf16", clip_norm=1.0, offload=offload, masters="split", timeout=20)
    engine = zero.initialize(model, adamw(model), config)
    run = Run()
    for last in (4, 3, 4):  # once without the last layer
        x = torch.ones(4, 16, dtype=torch.bfloat16, device=device)
        loss = model[:last](x).float().square().mean()
        train_on(engine, loss)
        run.losses.append(loss.item())
        engine.save_checkpoint(path)
        engine.load_checkpoint(path)
    engine.load_state_dict(engine.state_dict())
    run.state = {name: value.cpu() for name, value in engine.state_dict(master=True).items()}
    return run


@pytest.mark.parametrize("size", UP_TO_TWO)
def test_the_default_device_does_not_matter(cluster: Clusters, tmp_path: Path, size: int) -> None:
    for found in cluster(size).run(default_device_body, path=str(tmp_path), limit=60):
        assert all(found.values()), found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("simulated")
def test_every_tier_on_a_late_stream(cluster: Clusters, tmp_path: Path, device: str, precision: str) -> None:
    arguments = {"path": str(tmp_path), "precision": precision, "names": LATE}
    for found in run_late(cluster, 2, tiers_body, **arguments):
        check(found, device, 1e-5 if precision == "fp32" else 3e-2)


@pytest.mark.usefixtures("simulated")
def test_settings_on_a_late_stream(cluster: Clusters, tmp_path: Path, device: str) -> None:
    names = ("stage 1", "stage 2 host", "accumulation on disk", "local", "persistent", "fp16", "fp16 host")
    for found in run_late(cluster, 2, settings_body, path=str(tmp_path), names=names):
        check(found, device, 3e-2)
