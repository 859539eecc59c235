"""One large unit, whose optimizer state is in many records: little is on its way, and tiers are met."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import capacity
from tests.zero.helpers.fingerprint import fingerprint
from tests.zero.helpers.training import adamw, collected
from zero.config.offload import MeasuredOffload
from zero.optimizer.record_streamer import StreamedRecord
from zero.tiers.swap_file import PAGE

VOCABULARY, WIDTH = 512, 64
SUB = 2048  # elements of a record
BATCH = 64


class Large(nn.Module):
    """One unit, most of it one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens)).float().square().mean()


def build(offload: zero.Offload | str | None, **settings: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = Large()
    config = zero.Config(offload=offload, timeout=20, **settings)
    return zero.initialize(model, adamw(model), config)


def one_step(engine: zero.Engine, step: int, batch: int = BATCH) -> float:
    generator = torch.Generator().manual_seed(10 * step + engine.rank)
    tokens = torch.randint(VOCABULARY, (batch,), generator=generator).to(engine.accelerator.device)
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
    return loss.item()


# -- checkpoints ---------------------------------------------------------------------------------------


def saved_body(context: Context, path: str, offload: dict[str, Any], later: bool) -> dict[str, int]:
    engine = build(zero.Offload(**offload) if offload else None, precision="bf16")
    for step in range(2):
        one_step(engine, step)
    found = fingerprint(engine)
    engine.save_checkpoint(path, async_=later)
    one_step(engine, 2)  # a save in the background has what was there before
    engine.wait_for_checkpoint()
    return found


def loaded_body(context: Context, path: str, offload: dict[str, Any]) -> dict[str, int]:
    engine = build(zero.Offload(**offload) if offload else None, precision="bf16")
    one_step(engine, 5)
    engine.load_checkpoint(path)
    found = fingerprint(engine)
    one_step(engine, 2)
    return found


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1), (1, 2)])
def test_checkpoints_know_nothing_of_sub_groups(
    cluster: Clusters, tmp_path: Path, saved: int, loaded: int, later: bool
) -> None:
    folder, path = {"path": str(tmp_path)}, str(tmp_path / "checkpoint")
    first = {"optimizer": "disk", "fraction": 0.8, "host_budget": 20_000, "sub_group_size": SUB, **folder}
    others: tuple[dict[str, Any], ...] = (
        {"optimizer": "disk", "sub_group_size": 640, **folder},
        {"optimizer": "host", "fraction": 0.3, "sub_group_size": SUB},
        {},
    )
    before = cluster(saved).run(saved_body, path=path, offload=first, later=later)[0]
    for offload in others:
        for after in cluster(loaded).run(loaded_body, path=path, offload=offload):
            assert after == before


# -- memory --------------------------------------------------------------------------------------------


def buffers_body(context: Context, path: str) -> list[int]:
    engine = build(zero.Offload(optimizer="disk", path=path, sub_group_size=SUB), precision="bf16")
    for step in range(2):
        one_step(engine, step)
    return [buffer.nbytes for buffer in engine._boundary.stores.pipeline._buffers]


def test_buffers_hold_a_record_not_a_unit(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(buffers_body, path=str(tmp_path)):
        assert len(found) == 3
        assert all(nbytes == 3 * 4 * SUB and nbytes % PAGE == 0 for nbytes in found)


@collected()
def visits_body(context: Context) -> tuple[float, float, int]:
    """Losses with state on the device and streamed to it; what the step of the second takes more."""
    memory, found, peaks = context.accelerator.memory, [], []
    for offload in (None, zero.Offload(optimizer="host", step="device", sub_group_size=SUB)):
        gc.collect()
        engine = build(offload, precision="bf16")
        found.append([one_step(engine, step) for step in range(3)])
        before = memory.stats().allocated
        tokens = torch.arange(BATCH, device=context.accelerator.device)
        engine.backward(engine(tokens))
        before = memory.stats().allocated
        memory.reset_peak()
        engine.step()
        peaks.append(memory.stats().peak - before)
        del engine
    return found[0], found[1], peaks[1] - peaks[0]


@pytest.mark.usefixtures("exact")
def test_three_records_visit_the_device(cluster: Clusters) -> None:
    for stays, visits, more in cluster(2).run(visits_body):
        assert visits == stays
        assert more <= 3 * 3 * 4 * SUB


# -- a record is on its own ----------------------------------------------------------------------------


def journeys_body(context: Context, params: str) -> tuple[int, int]:
    """Records that are streamed to the device, and how often one has come in a step."""
    offload = zero.Offload(optimizer="host", params=params, step="device", sub_group_size=SUB)
    engine = build(offload)
    with patch.object(StreamedRecord, "prefetch", autospec=True, side_effect=StreamedRecord.prefetch) as come:
        one_step(engine, 0)
    return len(engine._boundary.optimizer.subs), come.call_count


@pytest.mark.parametrize("params", ["device", "host"])
@pytest.mark.usefixtures("apart")
def test_a_record_comes_once_in_a_step(cluster: Clusters, params: str) -> None:
    """Also where its master is a part of the shard, another part of which is stepped meanwhile."""
    for records, journeys in cluster(2).run(journeys_body, params=params):
        assert journeys == records > 3


def misfit_body(context: Context, path: str) -> str:
    """What is told of a checkpoint that has less optimizer state."""
    config = zero.Config(offload=zero.Offload(optimizer="host", sub_group_size=SUB), timeout=20)
    saved = Large()
    engine = zero.initialize(saved, torch.optim.SGD(saved.head.parameters(), lr=0.1, momentum=0.9), config)
    engine.save_checkpoint(path)
    model = Large()
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), config)
    with pytest.raises(zero.StateError) as told:
        engine.load_checkpoint(path)
    return str(told.value)


@pytest.mark.usefixtures("apart")
def test_a_parameter_in_several_pieces_is_named_once(cluster: Clusters, tmp_path: Path) -> None:
    for told in cluster(1).run(misfit_body, path=str(tmp_path / "checkpoint")):
        assert told.count("embedding.weight") == 1, told


# -- placement by measurement --------------------------------------------------------------------------


def course(context: Context, offload: Any) -> dict[str, Any]:
    gc.collect()
    engine = build(offload, precision="bf16")
    losses, peaks = [], []
    for step in range(6):
        context.accelerator.memory.reset_peak()
        losses.append(one_step(engine, step))
        peaks.append(context.accelerator.memory.stats().peak)
    predicted = engine._placement.predicted_peak
    tiers_now = [sub.record.tier.name for unit in engine.units for group in unit.groups for sub in group.subs]
    return {"losses": losses, "peaks": peaks, "tiers": tiers_now, "predicted": predicted}


@collected()
def auto_body(context: Context) -> dict[str, Any]:
    """Room for half of the optimizer state of the only unit."""
    plain = course(context, None)
    roomy = course(context, MeasuredOffload(sub_group_size=SUB))
    gc.collect()
    state = 3 * 4 * VOCABULARY * WIDTH // context.size
    enough = int((roomy["peaks"][-1] - state // 2) / 0.98)
    with capacity(context.accelerator, enough):
        auto = course(context, MeasuredOffload(sub_group_size=SUB))
    return {"plain": plain, "roomy": roomy, "auto": auto, "capacity": enough}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("exact", "simulated")
def test_auto_places_parts_of_a_unit(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(auto_body, limit=120):
        auto = found["auto"]
        assert auto["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-3)
        assert found["roomy"]["peaks"][-1] == pytest.approx(found["roomy"]["predicted"], rel=0.03)
        assert set(found["roomy"]["tiers"]) == {"device"}
        assert max(auto["peaks"]) <= found["capacity"]
        assert auto["peaks"][-1] == pytest.approx(auto["predicted"], rel=0.03)
        near = auto["tiers"].count("device") / len(auto["tiers"])
        assert 0.3 < near < 0.6, auto["tiers"]


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "host", "sub_group_size": 0}, "greater than or equal to 1"),
        ({"params": "host", "sub_group_size": 64}, "sub_group_size applies to offloaded optimizer state"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(zero.ConfigError, match=told):
        zero.Offload(**settings)
