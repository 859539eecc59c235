"""Ranks that use several engines of a process in different orders: a typed error, never mixed values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw

WIDTH = 8


class Policy(nn.Sequential):
    """Two engines of one shape: nothing but their turns tells them apart."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def pair(**settings: Any) -> list[zero.Engine]:
    models = [Policy(seed) for seed in (1, 2)]
    return [zero.initialize(m, adamw(m), zero.Config(timeout=8, **settings)) for m in models]


def batch(engine: zero.Engine) -> Tensor:
    return torch.ones(2, WIDTH, device=device_of(engine.module))


def evaluate(engine: zero.Engine) -> None:
    with torch.no_grad():
        engine(batch(engine))


def train(engine: zero.Engine) -> None:
    train_on(engine, engine(batch(engine)).square().mean())


def read(engine: zero.Engine) -> None:
    engine.state_dict()


def show(engine: zero.Engine) -> None:
    with zero.gathered(engine.module):
        pass


USES = {"evaluate": evaluate, "train": train, "read": read, "show": show}


def said(use: Callable[[zero.Engine], None], engines: list[zero.Engine]) -> str:
    try:
        for engine in engines:
            use(engine)
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def swapped_body(context: Context, stage: int) -> dict[str, str]:
    """Each use in another order on rank 1, by engines made anew; in the same order, after all that."""
    found = {}
    for name, use in USES.items():
        engines = pair(stage=stage)
        found[name] = said(use, engines if context.rank == 0 else engines[::-1])
    found["in order"] = "; ".join(
        {said(use, engines) for engines in [pair(stage=stage)] for use in USES.values()}
    )
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_other_orders_on_other_ranks_are_told(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(swapped_body, stage=stage, limit=60):
        assert found.pop("in order") == "nothing raised"
        if stage == 2:
            del found["evaluate"], found["show"]  # every rank has whole values: nothing is exchanged
        for name, told in found.items():
            assert told.startswith("RankMismatchError: ranks issued different collectives: number "), (
                name,
                told,
            )
            assert "(Policy) on rank 0" in told, name
            assert "(Policy) on rank 1" in told, name
            assert "Engines must take the same turns on all ranks" in told, name


def skipped_body(context: Context) -> str:
    """A critic of another shape whose step one rank leaves out, as by a coin of its own."""
    policy, _ = pair()
    critic_model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1))
    critic = zero.initialize(critic_model, adamw(critic_model), zero.Config(timeout=8))
    return said(train, [policy, critic, policy] if context.rank == 0 else [policy, policy])


def test_an_engine_that_one_rank_skips_is_named(disposable: Callable[[int], Cluster]) -> None:
    for told in disposable(2).run(skipped_body, limit=60):
        assert told.startswith("RankMismatchError")
        assert re.search(r"of engine \d+ \(Sequential\) on rank 0", told), told
        assert re.search(r"of engine \d+ \(Policy\) on rank 1", told), told
