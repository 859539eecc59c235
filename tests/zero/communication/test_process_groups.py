"""Engines of some of the ranks: side by side, crossing each other, while others do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import Run, adamw, same_bits, train_zero

STEPS = 4


def whole_job_body(context: Context, settings: dict[str, Any]) -> Run:
    """What a job of so many ranks trains."""
    return train_zero(context, fresh(), language_loss, zero.Config(timeout=20, **settings), steps=STEPS)


def halves_body(context: Context, settings: dict[str, Any]) -> Run:
    """Each half of the job trains a model of its own. All ranks make all groups, as torch wants it."""
    each = context.size // 2
    halves = [dist.new_group(list(range(first, first + each))) for first in (0, each)]
    config = zero.Config(timeout=20, **settings)
    own = halves[context.rank // each]
    return train_zero(context, fresh(), language_loss, config, steps=STEPS, process_group=own)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        (4, {"precision": "bf16", "clip_norm": 0.1}),
        (4, {"stage": 1, "offload": zero.Offload(optimizer="host")}),
        (4, {"stage": 2, "accumulate": "local", "gradient_accumulation_steps": 2}),
        (8, {"shard_ranks": 2}),
    ],
    ids=str,
)
def test_halves_of_a_job_train_as_jobs_of_their_own(
    cluster: Clusters, size: int, settings: dict[str, Any]
) -> None:
    expected = cluster(size // 2).run(whole_job_body, settings=settings)
    for rank, run in enumerate(cluster(size).run(halves_body, settings=settings)):
        assert same_bits(run, expected[rank % (size // 2)])


def crossing_body(context: Context, path: str) -> dict[str, list[float]]:
    """Every rank trains a model with its row of the ranks and another one with its column, in turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    config = zero.Config(timeout=20, clip_norm=0.1)
    engines = {}
    for name in ("rows", "columns"):
        model = fresh()
        engines[name] = zero.initialize(model, adamw(model), config, process_group=mesh.get_group(name))
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(STEPS):
        for name, engine in engines.items():
            loss = language_loss(engine.module, step, engine.rank)
            train_on(engine, loss)
            losses[name].append(loss.item())
            if step == 1:
                place = Path(path, f"{name} of {min(dist.get_process_group_ranks(mesh.get_group(name)))}")
                engine.save_checkpoint(place / "one")
                engine.load_checkpoint(place)
    return losses


def test_engines_whose_groups_cross(cluster: Clusters, tmp_path: Path) -> None:
    expected = cluster(2).run(whole_job_body, settings={"clip_norm": 0.1})
    for rank, losses in enumerate(cluster(4).run(crossing_body, path=str(tmp_path))):
        assert losses == {"rows": expected[rank // 2].losses, "columns": expected[rank % 2].losses}


def some_body(context: Context) -> Run | str:
    """Some ranks train, one of which is in more groups than the other; the rest call nothing."""
    dist.new_group([1, 2])
    group = dist.new_group([1, 3])
    if context.rank in (1, 3):
        return train_zero(
            context, fresh(), language_loss, zero.Config(timeout=20), steps=STEPS, process_group=group
        )
    with pytest.raises(zero.ConfigError) as refused:
        zero.initialize(fresh(), adamw(fresh()), process_group=group)
    return str(refused.value)


def test_ranks_outside_a_group_make_no_calls(cluster: Clusters) -> None:
    expected = cluster(2).run(whole_job_body, settings={})
    one, first, two, second = cluster(4).run(some_body)
    assert one == two
    assert one == "this rank is not in the process_group: only the group's ranks call zero.initialize with it"
    assert same_bits(first, expected[0])
    assert same_bits(second, expected[1])


def all_body(context: Context) -> tuple[list[int], str]:
    """The default group is the whole job, with the engines that were made without any."""
    numbers = []
    for group in (None, dist.group.WORLD):
        model = fresh()
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20), process_group=group)
        numbers.append(engine._communicator.ledger.line.engine)
    mesh: Any = init_device_mesh("cpu", (context.size,))
    with pytest.raises(zero.ConfigError) as refused:
        zero.initialize(model, adamw(model), process_group=mesh)
    return numbers, str(refused.value)


def test_the_default_group_is_the_job_and_a_mesh_is_no_group(cluster: Clusters) -> None:
    for (first, second), refused in cluster(2).run(all_body):
        assert second == first + 1
        assert refused.startswith("process_group must be a group of torch.distributed, got DeviceMesh; ")


def unusual_body(context: Context) -> tuple[str, str, bool]:
    """Groups in another order, groups that are gone, and names of groups that were used before."""
    model = fresh()
    said = []
    upside_down = dist.new_group([1, 0], sort_ranks=False)
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.destroy_process_group(other)
    for group in (upside_down, other):
        with pytest.raises(zero.ConfigError) as refused:
            zero.initialize(model, adamw(model), zero.Config(timeout=20), process_group=group)
        said.append(str(refused.value))
    dist.destroy_process_group(upside_down)
    if context.rank > 1:
        return said[0], said[1], True
    stepped = []
    for timeout in (20, 21, 22):
        zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=timeout), process_group=pair)
        for extra in [dist.new_group([context.rank], use_local_synchronization=True) for _ in range(2)]:
            dist.destroy_process_group(extra)
        run = train_zero(
            context, fresh(), language_loss, zero.Config(timeout=timeout + 5), steps=1, process_group=pair
        )
        stepped.append(len(run.losses) == 1)
    return said[0], said[1], all(stepped)


def test_groups_in_another_order_and_groups_that_are_gone(cluster: Clusters) -> None:
    for turned, gone, trained in cluster(3).run(unusual_body)[:2]:
        assert turned.startswith("the process_group's ranks are [1, 0]: an engine numbers its ranks in asc")
        assert gone == "the process_group has been destroyed: make another one"
        assert trained


def late_body(context: Context) -> tuple[str, str]:
    """A rank of a group does not come, and later the ranks of another one differ."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = pairs[context.rank // 2]
    said = []
    for attempt in ("absent", "different"):
        model = fresh()
        try:
            if attempt == "different" or context.rank != 3:
                config = zero.Config(timeout=3, stage=3 if context.rank == 2 else 2)
                zero.initialize(model, adamw(model), config, process_group=group)
            said.append("")
        except zero.CommunicationError as error:
            said.append(f"{type(error).__name__}: {error}")
        context.accelerator.collectives.barrier(context.group)
    return said[0], said[1]


def test_errors_stay_in_their_group(cluster: Clusters) -> None:
    first, second, waited, absent = cluster(4).run(late_body)
    assert first == second == ("", "")
    assert waited[0].startswith("CommunicationError: not all ranks joined the job within 3 s")
    assert absent[0] == ""
    for _, said in (waited, absent):
        assert said.startswith("RankMismatchError: ")
        assert said.endswith("which must be the same on all ranks: 3 on rank 0 and 2 on rank 1")
