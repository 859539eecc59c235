"""Masters of bf16 weights as 16 bits beside them: the same bits at any stage, in any tier, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.moments import NAMES, engine_of, same, trained, values_of
from tests.zero.helpers.optimizers import adagrad, lion, momentum
from tests.zero.helpers.training import adamw

SPLIT: dict[str, Any] = {"precision": "bf16", "masters": "split"}


def ways(path: str) -> dict[str, dict[str, Any]]:
    small = {"sub_group_size": 64}
    return {
        "stage 3": {},
        "stage 0": {"stage": 0},
        "stage 2": {"stage": 2},
        "in parts": {"offload": zero.Offload(optimizer="host", fraction=0.5, **small)},
        "visits": {"offload": zero.Offload(optimizer="host", params="host", step="device", **small)},
        "on disk": {"offload": zero.Offload(optimizer="disk", path=path, **small)},
    }


def ways_body(context: Context, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chosen = ways(path)
    if context.accelerator.capabilities.graph_capture:
        chosen["captured"] = {"capture_step": True}
    for name, settings in chosen.items():
        engine = engine_of(adamw, **SPLIT, **settings)
        found[name] = trained(engine), values_of(engine)
    for name, (optimizer, moments) in {
        "lion, 8bit": (lion, "8bit"),
        "momentum, bf16": (momentum, "bf16_stochastic"),
    }.items():
        engine = engine_of(optimizer, **SPLIT, moments=moments)
        found[name] = trained(engine), values_of(engine)
    engine = engine_of(adamw, precision="bf16")
    found["fp32"] = trained(engine), values_of(engine)
    return found


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """All ties apart, whose masters are one unit in the last place nearer to zero in each step."""
    return all(torch.allclose(first[n], second[n], rtol=1e-6, atol=1e-9) for n in NAMES)


def test_bits_do_not_depend_on_ranks_stages_and_tiers(cluster: Clusters, device: str, tmp_path: Path) -> None:
    (alone,) = cluster(1).run(ways_body, path=str(tmp_path))
    both = cluster(2).run(ways_body, path=str(tmp_path))
    for found in (alone, *both):
        for name, (losses, values) in found.items():
            assert losses == alone[name][0] or device != "cpu", name
            assert same(values, alone[name][1]) or device != "cpu", name
        for name in ways(str(tmp_path)):
            assert same(found[name][1], found["stage 3"][1]) or device != "cpu", name
        assert close(found["stage 3"][1], found["fp32"][1]) or device != "cpu"
        assert found["stage 3"][0] == pytest.approx(found["fp32"][0], rel=1e-3)


def is_of(weights: dict[str, Tensor], masters: dict[str, Tensor]) -> bool:
    """On the rank that has the weights."""
    return not weights or all(torch.equal(weights[name], masters[name].bfloat16()) for name in NAMES)


def changes_body(context: Context, path: str) -> dict[str, bool]:
    engine = engine_of(adamw, **SPLIT)
    model = engine.module
    trained(engine)
    before = values_of(engine)
    found = {"weights round masters": is_of(engine.state_dict(), before)}
    engine.offload_states()
    engine.reload_states()
    found["states are parked"] = same(values_of(engine), before)
    average = zero.EMA(engine, decay=0.5)
    average.update()
    with average.applied():
        found["the average rounds"] = is_of(engine.state_dict(), before)
    found["an average changes places"] = same(values_of(engine), before)
    engine.save_checkpoint(f"{path}/split")
    with zero.gathered(model.gain, write_rank=0), torch.no_grad():
        model.gain.fill_(0.1)
    found["gathered"] = bool((engine.full_master("gain") == torch.tensor(0.1).bfloat16().float()).all())
    engine.load_checkpoint(f"{path}/split")
    found["loaded"] = same(values_of(engine), before)
    wide = engine_of(adamw, precision="bf16")
    wide.load_checkpoint(f"{path}/split")
    found["loaded as fp32"] = same(values_of(wide), before)
    wide.save_checkpoint(f"{path}/wide")
    again = engine_of(adamw, **SPLIT, offload=zero.Offload(optimizer="disk", path=path))
    again.load_checkpoint(f"{path}/wide")
    found["loaded from fp32"] = same(values_of(again), before)
    state = engine.state_dict(master=True)
    engine.load_state_dict(state)
    found["a state dict"] = same(values_of(engine), before)
    return found


def test_whatever_reads_and_changes_masters(cluster: Clusters, tmp_path: Path) -> None:
    for size in (1, 2):
        for found in cluster(size).run(changes_body, path=str(tmp_path)):
            assert all(found.values()), found


def saved_body(context: Context, path: str) -> dict[str, Tensor]:
    engine = engine_of(adamw, **SPLIT, moments="bf16")
    trained(engine)
    engine.save_checkpoint(path)
    return values_of(engine)


def loaded_body(context: Context, path: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(adamw, **SPLIT, moments="bf16", offload=zero.Offload(optimizer="host"))
    engine.load_checkpoint(path)
    return values_of(engine), trained(engine)


def test_checkpoints_at_other_numbers_of_ranks(cluster: Clusters, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved, *_ = cluster(2).run(saved_body, path=path)
    runs = [found for size in (1, 3) for found in cluster(size).run(loaded_body, path=path)]
    assert all(same(values, saved) for values, _ in runs)
    assert all(losses == pytest.approx(runs[0][1], rel=5e-2) for _, losses in runs)


def test_the_optimizer_has_no_values_between_steps() -> None:
    engine = engine_of(adamw, **SPLIT)
    piece = engine.optimizer.param_groups[0]["params"][0]
    assert piece.is_meta
    with pytest.raises(zero.ShardedParameterError, match=r"(?s)keeps elsewhere.*zero\.gathered"):
        piece + 1
    assert engine.full_master("gain").dtype is torch.float32


def test_weights_that_are_changed_in_place_stay_so(recwarn: pytest.WarningsRecorder) -> None:
    """They are the masters' other halves: where fp32 masters undo the change, these have it."""
    engine = engine_of(adamw, **SPLIT, stage=0)
    trained(engine)
    gain = engine.module.gain
    with torch.no_grad():
        gain.zero_()
    engine.backward(language_loss(engine.module, 9, 0))
    engine.step()
    assert bool(gain.isfinite().all())
    assert gain.abs().max() < 0.01
    assert not [w for w in recwarn if "changed in place" in str(w.message)]


def test_what_cannot_be_split_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(zero.ConfigError, match="needs trainable bf16 parameters, but the model has none"):
        zero.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(masters="split"), ranks=1)
    narrow = fresh()
    with pytest.raises(zero.OptimizerError, match=r"Adagrad steps fp32 masters itself.*AdamW"):
        zero.plan(narrow, adagrad(narrow), zero.Config(**SPLIT), ranks=1)
    for precision in ("fp32", "fp16"):
        with pytest.raises(zero.ConfigError, match="masters of bf16 parameters; set precision='bf16'"):
            zero.Config(masters="split", precision=precision)
    with pytest.raises(zero.ConfigError, match=r"'compact'; write Config\(masters='split'\)"):
        zero.Offload(optimizer="disk", path="/", compact=True)  # type: ignore[call-arg]


def test_the_plan_knows_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    for masters, moments, each in (("fp32", "fp32", 12), ("split", "fp32", 10), ("split", "bf16", 6)):
        config = zero.Config(precision="bf16", masters=masters, moments=moments)  # type: ignore[arg-type]
        plan = zero.plan(model, optimizer, config, ranks=1)
        assert plan.memory.rest["device"].optimizer == each * numel


def test_memory_reports_count_them() -> None:
    engine = engine_of(adamw, **SPLIT)
    wide = engine_of(adamw, precision="bf16")
    elements = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    groups = [[group for unit in e.units for group in unit.groups] for e in (engine, wide)]
    found = [sum(group.held().optimizer for group in each) for each in groups]
    assert found[1] - found[0] >= 2 * elements
