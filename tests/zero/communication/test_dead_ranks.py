"""Ranks that die, raise, wait or come late: named within the timeout, by those that waited for them."""

from __future__ import annotations

import os
import re
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from accelz import CollectiveError, Handle
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.failing import TIMEOUT, Ended, Job, Ranks, Reordered, ended_jobs
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import Stage, mesh_of, tokens
from tests.zero.helpers.models import features
from tests.zero.helpers.paths import STRAIGHT, decaying, fresh, straight
from tests.zero.helpers.told import Heard
from tests.zero.helpers.training import adamw

LONG = 40.0  # seconds


def dying_body(context: Context, when: str, shard_ranks: int | None = None) -> tuple[str, str, float]:
    model = fresh()
    config = zero.Config(timeout=TIMEOUT, shard_ranks=shard_ranks)
    engine = zero.initialize(model, decaying(model), config)
    train_on(engine, straight(model, 0, context.rank))
    if context.rank == 1 and when == "forward":
        model.blocks[2].register_forward_pre_hook(lambda *_: os._exit(7))
    if context.rank == (1 if shard_ranks is None else 2) and when == "backward":
        model.blocks[1].register_full_backward_pre_hook(lambda *_: os._exit(7))
    if context.rank == 1 and when == "asleep":
        context.group.store.wait(["noticed/0", "noticed/2"], timedelta(seconds=4 * TIMEOUT))
        return "", "", 0.0
    start = time.monotonic()
    try:
        train_on(engine, straight(model, 1, context.rank))
    except zero.CommunicationError as error:
        seconds = time.monotonic() - start
        context.group.store.set(f"noticed/{context.rank}", "")
        return type(error).__name__, str(error), seconds
    return "", "", 0.0


def stop(*_: object) -> None:
    raise ArithmeticError("stop here")


def raising_body(context: Context) -> str:
    """Only rank 1 raises; the other one gets an error that names it, within the timeout."""
    model = fresh()
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    if context.rank == 1:
        model.blocks[1].down.register_full_backward_hook(stop)
    try:
        engine.backward(straight(model, 0, context.rank))
    except (ArithmeticError, zero.CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def dead(cluster: Clusters, abilities: Abilities) -> Ended:
    """How the jobs end in which a rank does not go on."""
    jobs = {when: Job(3, dying_body, {"when": when}) for when in ("forward", "backward", "asleep")}
    jobs["copies"] = Job(4, dying_body, {"when": "backward", "shard_ranks": 2})
    jobs["raises"] = Job(2, raising_body)
    return ended_jobs(cluster, jobs, abilities.capabilities.shared_device)


@pytest.mark.parametrize("when", ["forward", "backward", "asleep"])
def test_a_dead_or_silent_rank_is_named(dead: Ended, when: str) -> None:
    """It is named within the timeout (and the exchange of reports), with the unit that was waited for."""
    outcomes = dead[when]
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.status == "returned", survivor
        kind, message, seconds = survivor.value
        assert kind == "CommunicationError"
        assert re.search(r"rank\(s\) .*\b1\b.* did not answer", message), message
        assert re.search("(all_gather|reduce_scatter) of unit '(<root>|blocks.[0-3])'", message), message
        assert seconds < 4 * TIMEOUT


def test_one_rank_raises(dead: Ended) -> None:
    first, second = (outcome.value for outcome in dead["raises"])
    assert second == "ArithmeticError: stop here"
    assert first.startswith("CommunicationError")
    assert "did not answer" in first
    assert "1" in first


def test_a_dead_rank_of_another_copy_is_named(dead: Ended) -> None:
    """Ranks 2 and 3 share a copy of the model, so errors in their group count its ranks from 0."""
    outcomes = dead["copies"]
    for rank in (0, 1, 3):
        assert outcomes[rank].status == "returned", outcomes[rank]
        kind, message, seconds = outcomes[rank].value
        assert kind == "CommunicationError"
        assert re.search(r"rank\(s\) .*\b2\b.* did not answer", message), message
        assert seconds < 4 * TIMEOUT
    assert "(ranks 0 to 1 of this group are ranks 2, 3 of the job)" in outcomes[3].value[1]


def stages_body(context: Context) -> tuple[str, float]:
    """A rank of the second stage ends before a step."""
    mesh = mesh_of(("pp", 2), ("dp", 2))
    model = Stage(mesh.get_local_rank("pp"))
    config = zero.Config(timeout=LONG, clip_norm=1.0, local_modules={"*": "pp"})
    engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims="dp")
    engine.backward(model(tokens(0, engine.rank).to(engine.device)))
    if context.rank == 3:
        os._exit(7)
    start = time.monotonic()
    with pytest.raises(zero.CommunicationError) as caught:
        engine.step()
    seconds = time.monotonic() - start
    context.group.store.set(f"noticed/{context.rank}", "")
    context.group.store.wait([f"noticed/{rank}" for rank in range(3)], timedelta(seconds=LONG))
    return str(caught.value), seconds


@pytest.mark.host  # whose ranks look at each other while they wait
def test_other_stages_learn_of_a_death_at_once(disposable: Ranks) -> None:
    """By its coordinates, long before the timeout."""
    *survivors, _ = disposable(4).outcomes(stages_body, limit=60)
    for survivor in survivors:
        assert survivor.status == "returned", survivor
        message, seconds = survivor.value
        assert "rank(s) 3 (pp 1, dp 1) did not answer" in message
        assert seconds < LONG / 2


def long_wait_body(context: Context, path: tuple[int, ...]) -> tuple[list[str], str, float]:
    """Rank 1 takes another path, or comes late."""
    heard, model, error = Heard(), fresh(None), ""
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=2 * TIMEOUT))
    mine = path if context.rank == 1 else STRAIGHT
    if context.rank == 1 and path == STRAIGHT:
        time.sleep(1.3 * TIMEOUT)
    start = time.monotonic()
    try:
        train_on(engine, model(features(0, context.rank, model), mine).loss)
    except zero.ZeroError as raised:
        error = str(raised)
    return heard.texts, error, time.monotonic() - start


def uneven_batches_body(context: Context, path: str) -> tuple[list[str], str, str]:
    """Rank 1 is out of batches first, and saves."""
    heard, model = Heard(), fresh(None)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    if context.rank == 0:
        with pytest.raises(zero.CommunicationError) as caught:
            engine.backward(straight(model, 0, 0))
        context.group.store.set("failed", "")
    else:
        with pytest.raises(zero.CommunicationError) as caught:
            engine.save_checkpoint(path)
        context.group.store.wait(["failed"], timedelta(seconds=4 * TIMEOUT))
    return heard.texts, str(caught.value), f"wait in save_checkpoint('{path}')"


@pytest.fixture(scope="module")
def waited(cluster: Clusters, abilities: Abilities, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What the ranks say that wait for each other."""
    path = str(tmp_path_factory.mktemp("waited") / "c")
    jobs = {
        "differ": Job(2, long_wait_body, {"path": (3,)}),
        "late": Job(2, long_wait_body, {"path": STRAIGHT}),
        "saves": Job(2, uneven_batches_body, {"path": path}),
    }
    return ended_jobs(cluster, jobs, abilities.capabilities.shared_device)


def test_a_long_wait_of_ranks_that_differ_is_explained_before_it_fails(waited: Ended) -> None:
    for texts, error, seconds in waited.values_of("differ"):
        assert "ranks issued different collectives" in error
        found = [text for text in texts if "ranks issued different collectives: number" in text]
        assert len(found) == 1 or seconds < TIMEOUT, texts  # shared memory notices at once


def test_a_long_wait_for_a_rank_is_logged_once(waited: Ended) -> None:
    (first, error, _), (second, _, _) = waited.values_of("late")
    assert error == ""
    assert len(first) == 1, first
    assert "rank 0 has waited" in first[0]
    assert "rank(s) 1 are not there yet" in first[0]
    assert second == []


def test_a_rank_that_waits_in_a_save_is_told_to_those_that_train(waited: Ended) -> None:
    (training, failed, place), (saving, missed, _) = waited.values_of("saves")
    assert f"rank(s) 1 {place}: every rank must make the same calls" in failed
    assert "from rank(s) 0: rank(s) 0 wait in collective" in missed
    assert "all_gather of unit" in missed
    assert "every rank must call save_checkpoint" in missed
    for texts in (training, saving):  # whoever is later may hear after this that the other has failed
        assert 1 <= len(texts) <= 2, texts
    assert f"rank(s) 1 {place}. It will fail after {TIMEOUT:.0f} s" in training[0]
    assert f"s in {place.removeprefix('wait in ')}: rank(s) 0 wait in collective" in saving[0]


def failed_gather_body(context: Context) -> list[str]:
    model = Reordered([0, 1, 2])
    engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))

    def failing(*_: object) -> None:
        raise zero.CommunicationError("as the test wants")

    engine._communicator.all_gather = failing  # type: ignore[assignment,method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(zero.CommunicationError, match="as the test wants"):
            engine(torch.ones(2, 8, device=context.accelerator.device))
    return [str(w.message) for w in caught]


def test_a_gather_that_fails_is_the_only_error(cluster: Clusters) -> None:
    assert cluster(2).run(failed_gather_body) == [[], []]


class _Fails(Handle):
    def wait(self) -> None:
        raise CollectiveError("as the test wants")


def failed_reduction_body(context: Context) -> list[bool]:
    """Whether buffers are there that transfers under way read from or write to, once another has failed."""
    model = Reordered([0, 1, 2])
    config = zero.Config(stage=1, units=("Linear",), timeout=TIMEOUT)
    engine = zero.initialize(model, adamw(model), config)
    collectives, begun = context.accelerator.collectives, list[tuple[Tensor, Tensor]]()

    def begin(output: Tensor, full: Tensor, *others: Any, **named: Any) -> Handle:
        handle = type(collectives).reduce_scatter(collectives, output, full, *others, **named)
        begun.append((output, full))
        return _Fails() if len(begun) == 1 else handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "reduce_scatter", begin)
        with pytest.raises(zero.CommunicationError, match="as the test wants"):
            engine.backward(model(torch.ones(2, 8, device=context.accelerator.device)).sum())
    return [each.untyped_storage().nbytes() > 0 for pair in begun[1:] for each in pair]


def test_what_may_be_written_to_stays_after_a_failure(disposable: Ranks) -> None:
    assert disposable(2).run(failed_reduction_body) == [[True, True]] * 2
