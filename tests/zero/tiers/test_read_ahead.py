"""Parameters on disk: read before their gather wants them, within bounds, and never old values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.disks import broken_disk
from tests.zero.helpers.loops import train_on
from zero.tiers.read_ahead import ReadAhead
from zero.tiers.swap_file import Section, SwapFile

WIDTH, LAYERS = 64, 8
LAYER = 2 * WIDTH * WIDTH  # bytes


def layers(path: str, prefetch: int = 1, **tiers: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    tiers = {"params": "disk", "optimizer": "disk", **tiers}
    offload = zero.Offload(**tiers, path=path)
    config = zero.Config(precision="bf16", offload=offload, units=("Linear",), prefetch=prefetch, timeout=20)
    return zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def one_step(engine: zero.Engine, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + engine.rank)
    x = torch.randn(4, WIDTH, generator=generator).to(engine.accelerator.device)
    loss = engine(x).float().square().mean()
    train_on(engine, loss)
    return loss.item()


def in_time_body(context: Context, path: str, prefetch: int, room: int) -> dict[str, Any]:
    """Reads begun in time and late in the third step, and the most that waited at one time.

    room: shards that may wait.
    """
    engine = layers(path, prefetch=prefetch)
    reads = engine._boundary.stores.read_ahead
    shard = LAYER // engine.world_size
    reads.limit = room * shard
    waited, sound = [], reads.begin

    def begin(section: Section) -> bool:
        begun = sound(section)
        waited.append(reads.waiting_bytes // shard)
        return begun

    reads.begin = begin  # type: ignore[method-assign]
    for step in range(2):
        one_step(engine, step)
    reads.in_time = reads.late = 0
    one_step(engine, 2)
    del reads.begin
    return {
        "in time": reads.in_time,
        "late": reads.late,
        "most": max(waited),
        "left": reads.waiting_bytes,
        "kept": sum(buffer.numel() for buffer, _ in reads._free) // shard,
    }


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("room", [1, 3])
def test_shards_are_read_before_they_are_wanted(
    cluster: Clusters, tmp_path: Path, prefetch: int, room: int
) -> None:
    for found in cluster(2).run(in_time_body, path=str(tmp_path), prefetch=prefetch, room=room):
        assert found["in time"] + found["late"] == 2 * LAYERS - 1  # the last layer's backward comes at once
        assert found["late"] <= 1 + prefetch  # the first ones: nothing comes before them
        assert found["most"] == room
        assert found["left"] == 0
        assert found["kept"] <= room


def alike_body(context: Context, path: str, room: int) -> bool:
    plain = [one_step(engine, step) for engine in [layers(path, params="host")] for step in range(4)]
    engine = layers(path, optimizer="disk", gradients="disk")
    engine._boundary.stores.read_ahead.limit = room
    return plain == [one_step(engine, step) for step in range(4)]


@pytest.mark.parametrize("room", [0, 3000, 1 << 30])
def test_values_are_the_same_whatever_is_read_ahead(cluster: Clusters, tmp_path: Path, room: int) -> None:
    """With gradients and records in the same file, where they are written meanwhile."""
    assert all(cluster(2).run(alike_body, path=str(tmp_path), room=room))


def error_body(context: Context, path: str, after: int) -> dict[str, Any]:
    """A disk that fails while it is read ahead, in a forward: told by the gather, and nothing is lost."""
    plain = [one_step(engine, step) for engine in [layers(path)] for step in range(4)]
    engine = layers(path)
    losses = [one_step(engine, step) for step in range(2)]
    with broken_disk(after=after), pytest.raises(zero.OffloadError) as failed:
        one_step(engine, 2)
    engine.zero_grad()
    losses += [one_step(engine, step) for step in (2, 3)]
    return {
        "told": str(failed.value),
        "same": losses == plain,
        "left": engine._boundary.stores.read_ahead.waiting_bytes,
    }


@pytest.mark.parametrize("after", [0, 3, LAYERS + 3])
def test_a_read_error_ahead_is_told_at_the_gather(cluster: Clusters, tmp_path: Path, after: int) -> None:
    """In the first gather, in the forward, and in the backward."""
    for found in cluster(1).run(error_body, path=str(tmp_path), after=after):
        assert "could not be read from the disk" in found["told"]
        assert found["same"]
        assert found["left"] == 0


def written_body(context: Context, path: str) -> None:
    file, reads = SwapFile(Path(path)), ReadAhead(context.accelerator)
    first, second = (Section(file, file.allocate(4 * 100), 100, torch.float32) for _ in range(2))
    for value, written in ((8.0, first), (7.0, first[10:20])):
        assert reads.begin(first)
        assert reads.begin(second)
        written.write(torch.full((written.numel(),), value))
        with reads.use(first) as values:
            assert bool((values[10:20] == value).all())
        with reads.use(second) as values:
            assert not values.any()
    assert (reads.in_time, reads.late) == (2, 2)
    assert reads.begin(second)
    reads.clear()
    assert reads.waiting_bytes == 0


def test_values_written_meanwhile_are_read_again(cluster: Clusters, tmp_path: Path) -> None:
    cluster(1).run(written_body, path=str(tmp_path))
