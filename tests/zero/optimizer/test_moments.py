"""Moments in bf16 beside fp32 masters: the same bits at any stage, in any tier, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.moments import engine_of, same, trained, values_of, ways
from tests.zero.helpers.optimizers import lion, momentum
from tests.zero.helpers.training import adamw


def ways_body(context: Context, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in {"stage 3": {}, **ways(path)}.items():
        engine = engine_of(adamw, moments="bf16_stochastic", **settings)
        found[name] = trained(engine), values_of(engine)
    for name, optimizer in {"lion": lion, "momentum": momentum}.items():
        engine = engine_of(optimizer, moments="bf16_stochastic")
        found[name] = trained(engine), values_of(engine)
    engine = engine_of(adamw, moments="bf16")
    found["nearest"] = trained(engine), values_of(engine)
    return found


def test_bits_do_not_depend_on_ranks_stages_and_tiers(cluster: Clusters, device: str, tmp_path: Path) -> None:
    (alone,) = cluster(1).run(ways_body, path=str(tmp_path))
    both = cluster(2).run(ways_body, path=str(tmp_path))
    for found in (alone, *both):
        for name, (losses, values) in found.items():
            dtypes = {v.dtype for k, v in values.items() if "exp_avg" in k or "momentum" in k}
            assert dtypes == {torch.bfloat16}, name
            assert losses == alone[name][0] or device != "cpu", name
            assert same(values, alone[name][1]) or device != "cpu", name
            assert losses == pytest.approx(alone["nearest"][0], rel=0.1) or name in ("lion", "momentum")
        narrow = "16 bits", "16 bits, on disk"
        assert same(found[narrow[0]][1], found[narrow[1]][1]) or device != "cpu"
        for name in ways(str(tmp_path)).keys() - set(narrow):
            assert same(found[name][1], found["stage 3"][1]) or device != "cpu", name
        assert not same(found["nearest"][1], found["stage 3"][1])


def saved_body(context: Context, path: str) -> dict[str, Tensor]:
    engine = engine_of(adamw, moments="bf16_stochastic")
    trained(engine)
    engine.save_checkpoint(f"{path}/narrow")
    values = values_of(engine)
    wide = engine_of(adamw)
    trained(wide)
    wide.save_checkpoint(f"{path}/wide")
    return values | {f"wide {name}": value for name, value in values_of(wide).items()}


def loaded_body(context: Context, path: str) -> dict[str, Any]:
    again = engine_of(adamw, moments="bf16_stochastic", offload=zero.Offload(optimizer="disk", path=path))
    again.load_checkpoint(f"{path}/narrow")
    found: dict[str, Any] = {"same": values_of(again), "losses": trained(again)}
    for name, settings in {"narrow": {}, "wide": {"moments": "bf16"}}.items():
        other = engine_of(adamw, **settings)
        other.load_checkpoint(f"{path}/{name}")
        found[f"from {name}"] = values_of(other)
    return found


def test_checkpoints_at_other_numbers_of_ranks_and_in_other_precisions(
    cluster: Clusters, tmp_path: Path
) -> None:
    saved, *_ = cluster(2).run(saved_body, path=str(tmp_path))
    (loaded,) = cluster(1).run(loaded_body, path=str(tmp_path))
    assert same(loaded["same"], {k: v for k, v in saved.items() if "wide" not in k})
    for name, value in loaded["from narrow"].items():
        assert value.dtype is torch.float32
        assert torch.equal(value, saved[name].float()), name
    for name, value in loaded["from wide"].items():
        before = saved[f"wide {name}"]
        assert torch.equal(value, before.bfloat16() if "exp_avg" in name else before), name


def test_only_kernels_keep_moments_so() -> None:
    model = nn.Linear(2, 2)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adagrad(model.parameters())):
        with pytest.raises(zero.OptimizerError, match=f"{type(optimizer).__name__} has no moments"):
            zero.plan(model, optimizer, zero.Config(moments="bf16"), ranks=1)
    with pytest.raises(zero.ConfigError, match="moments"):
        zero.Config(moments="fp16")  # type: ignore[arg-type]


def test_the_plan_knows_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    plans = [zero.plan(model, optimizer, zero.Config(moments=m), ranks=1) for m in ("fp32", "bf16")]
    wide, narrow = (plan.memory.rest["device"].optimizer for plan in plans)
    assert wide == 2 * narrow == 2 * 4 * sum(p.numel() for p in model.parameters())
