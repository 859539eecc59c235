"""Ranks that do not do the same: told what differs, before wrong values are used."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.failing import TIMEOUT, Ended, Job, Ranks, Reordered, ended_jobs
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import Stack, features
from tests.zero.helpers.own_bytes import bytes_of_its_own
from tests.zero.helpers.paths import STRAIGHT, decaying, fresh, straight
from tests.zero.helpers.training import adamw


def diverging_body(context: Context, path: tuple[int, ...]) -> tuple[str, str, float]:
    model = fresh(None)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    mine = path if context.rank == 1 else STRAIGHT
    start = time.monotonic()
    try:
        train_on(engine, model(features(0, context.rank, model), mine).loss)
    except zero.ZeroError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


def unequal_body(context: Context) -> list[str]:
    """Models, settings and optimizers that differ; nothing of any model may have been touched."""
    rank, found = context.rank, []

    def refused(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(zero.RankMismatchError) as caught:
            zero.initialize(model, optimizer, zero.Config(**{"timeout": TIMEOUT, **settings}))
        assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
        found.append(str(caught.value))

    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    refused(wider, decaying(wider))
    deeper = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))
    refused(deeper, decaying(deeper))
    same = nn.Sequential(nn.Linear(4, 4))
    refused(same, decaying(same), prefetch=1 + rank)
    refused(same, decaying(same), compile=zero.Compile(inner="aot_eager", prefetch_budget=1000 * rank))
    refused(same, (torch.optim.SGD if rank else torch.optim.AdamW)(same.parameters(), lr=0.1))
    refused(same, decaying(same), timeout=TIMEOUT + rank)
    return found


def test_ranks_that_disagree_are_told_where(cluster: Clusters) -> None:
    for wider, deeper, setting, compiling, optimizer, timeout in cluster(2).run(unequal_body, limit=60):
        assert "1.weight (4, 4) torch.float32" in wider
        assert "1.weight (5, 4) torch.float32" in wider
        assert re.search(r"2\.weight .* on rank 1, which rank 0 does not have$", deeper)
        assert "Config(prefetch=...), which" in setting
        assert "1 on rank 0 and 2 on rank 1" in setting
        assert '"prefetch_budget":1000' in compiling
        assert "AdamW" in optimizer
        assert timeout.startswith("Config(timeout=...) must be the same on all ranks; it is ")


def other_writer_body(context: Context) -> tuple[str, float]:
    model = fresh(None)
    zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    start = time.monotonic()
    try:
        with zero.gathered(model.blocks[0].up.weight, write_rank=context.rank), torch.no_grad():
            model.blocks[0].up.weight.zero_()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


@pytest.fixture(scope="module")
def diverged(cluster: Clusters, abilities: Abilities) -> Ended:
    """What ranks are told that go on differently."""
    jobs = {
        "reversed": Job(2, diverging_body, {"path": (0, 2, 1, 3)}),
        "left out": Job(2, diverging_body, {"path": (0, 1, 3)}),
        "only one": Job(2, diverging_body, {"path": (3,)}),
        "all write": Job(2, other_writer_body),
    }
    return ended_jobs(cluster, jobs, abilities.capabilities.shared_device)


@pytest.mark.parametrize("path", ["reversed", "left out", "only one"])
def test_ranks_that_gather_other_units_are_told_so(diverged: Ended, path: str) -> None:
    """Blocks of equal size would silently exchange wrong values; this is caught before any step."""
    for kind, message, seconds in diverged.values_of(path):
        assert kind == "RankMismatchError", (kind, message)
        assert re.search("(number|call) [0-9]", message), message
        assert "blocks." in message
        assert "on rank 0" in message
        assert "on rank 1" in message
        assert seconds < 4 * TIMEOUT


def test_ranks_that_all_want_to_write(diverged: Ended) -> None:
    """`write_rank=rank` is passed instead of a number that all ranks agree on."""
    for message, seconds in diverged.values_of("all write"):
        assert message.startswith("RankMismatchError"), message
        for rank in range(2):  # a process may have had engines before, which are then told apart
            assert re.search(rf"from rank {rank}( of engine \d+ \(\w+\))? on rank {rank}", message), message
        assert seconds < 4 * TIMEOUT


def other_model_body(context: Context) -> str:
    torch.manual_seed(0)
    model = Stack(layers=4 + context.rank)
    try:
        zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    except zero.RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_with_different_models(disposable: Ranks) -> None:
    for message in disposable(2).run(other_model_body, limit=40):
        assert "disagree about the model" in message


def other_settings_body(context: Context) -> list[str]:
    told, ours = [], {"timeout": TIMEOUT, "offload": zero.Offload(optimizer="host")}
    for name, mine, others in (("clip_norm", 1.0, None), ("prefetch", 0, 2), ("loss_scale", 2.0, 4.0)):
        model = Stack(layers=2)
        config = zero.Config(**ours, **{name: others if context.rank else mine})
        with pytest.raises(zero.RankMismatchError) as caught:
            zero.initialize(model, decaying(model), config)
        told.append(str(caught.value))
    return told


def test_ranks_with_different_settings(cluster: Clusters) -> None:
    """Some differences would let ranks wait for collectives that never come, others be silently wrong."""
    for told in cluster(2).run(other_settings_body):
        for name, message in zip(("clip_norm", "prefetch", "loss_scale"), told, strict=True):
            assert f"disagree about Config({name}=...), which must be the same" in message


def other_rates_body(context: Context) -> tuple[str, bool, bool]:
    """A scheduler that follows each rank's own loss."""
    model = fresh(None)
    optimizer = decaying(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=TIMEOUT))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    before = engine.full_master("blocks.0.up.weight").flatten().tolist()
    for loss in (1.0, 2.0 if context.rank else 0.5):
        scheduler.step(loss)
    with pytest.raises(zero.RankMismatchError) as caught:
        engine.backward(model(features(0, context.rank, model), STRAIGHT).loss)
    unchanged = engine.full_master("blocks.0.up.weight").flatten().tolist() == before
    optimizer.param_groups[0]["lr"] = 1e-3
    engine.backward(model(features(0, context.rank, model), STRAIGHT).loss)
    return str(caught.value), unchanged, engine.step()


def test_ranks_with_different_learning_rates(cluster: Clusters) -> None:
    """Each slice of the model would be stepped with its rank's rate. With equal rates, training continues."""
    for message, unchanged, stepped in cluster(2).run(other_rates_body):
        assert "param_groups[0]['lr'] is 0.01 on rank 0 and 0.001 on rank 1" in message
        assert "ReduceLROnPlateau" in message
        assert unchanged
        assert stepped


class ManyBetas(torch.optim.SGD):
    """An optimizer with an array of numbers in a group."""

    def __init__(self, model: nn.Module, betas: Tensor) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0]["betas"] = betas


def arrays_body(context: Context) -> tuple[bool, str]:
    model = fresh(None)
    optimizer = ManyBetas(model, torch.tensor([0.9, 0.5]))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=TIMEOUT, whole_parameters=True))
    engine.backward(straight(model, 0, context.rank))
    stepped = engine.step()
    optimizer.param_groups[0]["betas"][1] += 0.25 * context.rank
    with pytest.raises(zero.RankMismatchError) as caught:
        engine.backward(straight(model, 0, context.rank))
    return stepped, str(caught.value)


def test_ranks_with_different_arrays_of_numbers(cluster: Clusters) -> None:
    for stepped, message in cluster(2).run(arrays_body):
        assert stepped
        assert "param_groups[0]['betas'] is" in message
        assert "0.5] on rank 0" in message
        assert "0.75] on rank 1" in message


def evaluated_order_body(context: Context) -> str:
    """Whole values come of gathers in one order; in another, each rank would compute with others' weights."""
    with bytes_of_its_own(context.accelerator):
        model = Reordered([0, 1, 2])
        engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))
        x = torch.ones(2, 8, device=context.accelerator.device)
        with torch.no_grad():
            engine(x)
            model.order = [2, 1, 0] if context.rank else [0, 1, 2]
            with pytest.raises(zero.RankMismatchError) as told:
                engine(x)
    return str(told.value)


def test_an_evaluation_in_another_order_is_told(cluster: Clusters) -> None:
    for told in cluster(2).run(evaluated_order_body):
        assert "blocks.0" in told
        assert "blocks.2" in told
    cluster(2).stop()  # whose groups are of no use any more


def uneven_evaluation_body(context: Context) -> None:
    """Inside `zero.gathered` nothing is gathered, and ranks may evaluate differently often."""
    model = Reordered([0, 1, 2])
    engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))
    x = torch.ones(2, 8, device=context.accelerator.device)
    with torch.no_grad(), zero.gathered(model):
        for _ in range(1 + 2 * context.rank):
            engine(x)
    train_on(engine, engine(x).sum())


def test_ranks_may_evaluate_differently_often_inside_gathered(cluster: Clusters) -> None:
    cluster(2).run(uneven_evaluation_body)
