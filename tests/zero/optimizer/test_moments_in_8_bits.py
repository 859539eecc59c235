"""Moments in 8 bits: blocks of parameters' own values, the same at any stage, in any tier, on any ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from accelz.dynamic_map import BLOCK, SIGNED, UNSIGNED
from tests.zero.helpers.moments import NAMES, engine_of, same, trained, values_of, ways
from tests.zero.helpers.optimizers import lion
from tests.zero.helpers.training import adamw

STEPS = 2


def ways_body(context: Context, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in {"stage 3": {}, **ways(path)}.items():
        engine = engine_of(adamw, moments="8bit", **settings)
        found[name] = trained(engine, STEPS), values_of(engine)
    engine = engine_of(lion, moments="8bit")
    found["lion"] = trained(engine, STEPS), values_of(engine)
    found["wide"] = trained(engine_of(adamw), STEPS), {}
    return found


def test_bits_do_not_depend_on_ranks_stages_and_tiers(cluster: Clusters, device: str, tmp_path: Path) -> None:
    (alone,) = cluster(1).run(ways_body, path=str(tmp_path))
    both = cluster(2).run(ways_body, path=str(tmp_path))
    near = "stage 0", "stage 1"  # on a device too, its own kernels step them all
    for found in (alone, *both):
        wide, _ = found.pop("wide")
        for name, (losses, values) in found.items():
            assert same(values, alone[name][1]) or (device != "cpu" and name not in near), name
            assert losses == pytest.approx(wide, rel=0.1) or name == "lion"
            check_beside(values)
        for name in near:
            assert same(found[name][1], found["stage 3"][1]), name
        narrow = "16 bits", "16 bits, on disk"
        assert same(found[narrow[0]][1], found[narrow[1]][1]) or device != "cpu"
        for name in ways(str(tmp_path)).keys() - set(narrow):
            assert same(found[name][1], found["stage 3"][1]) or device != "cpu", name


def check_beside(values: dict[str, Tensor]) -> None:
    """Codes and scales stand beside the values that they are of."""
    moments = [key.removesuffix(".codes") for key in values if key.endswith(".codes")]
    assert len(moments) in (len(NAMES), 2 * len(NAMES))
    for key in moments:
        codes, scales = values[f"{key}.codes"], values[f"{key}.scales"]
        assert codes.dtype is torch.uint8
        assert scales.numel() == -(-codes.numel() // BLOCK)
        by = UNSIGNED if key.endswith("exp_avg_sq") else SIGNED
        row_major = codes.t() if "turned" in key else codes  # whose memory is in the other order
        decoded = by.decode(row_major.reshape(-1), scales)
        assert torch.equal(decoded, (values[key].t() if "turned" in key else values[key]).reshape(-1)), key


def saved_body(context: Context, path: str) -> dict[str, Tensor]:
    engine = engine_of(adamw, moments="8bit", offload=zero.Offload(optimizer="host", sub_group_size=256))
    trained(engine, STEPS)
    engine.save_checkpoint(f"{path}/narrow")
    wide = engine_of(adamw)
    trained(wide, STEPS)
    wide.save_checkpoint(f"{path}/wide")
    return values_of(engine) | {f"wide {name}": value for name, value in values_of(wide).items()}


def loaded_body(context: Context, path: str, most: int) -> dict[str, Any]:
    disk = zero.Offload(optimizer="disk", path=path, sub_group_size=64)
    found = {}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("again", "narrow", {"moments": "8bit", "offload": disk}),
        ("stage 0", "narrow", {"moments": "8bit", "stage": 0}),
        ("as fp32", "narrow", {}),
        ("as bf16", "narrow", {"moments": "bf16"}),
        ("from fp32", "wide", {"moments": "8bit"}),
    ]
    for name, source, settings in cases[:most]:
        engine = engine_of(adamw, **settings)
        engine.load_checkpoint(f"{path}/{source}")
        found[name] = values_of(engine)
    return found


def test_checkpoints_at_other_numbers_of_ranks_and_in_other_precisions(
    cluster: Clusters, tmp_path: Path
) -> None:
    saved, *_ = cluster(2).run(saved_body, path=str(tmp_path))
    narrow = {name: value for name, value in saved.items() if "wide" not in name}
    for found in cluster(3).run(loaded_body, path=str(tmp_path), most=2):
        assert same(found["again"], narrow)
        assert same(found["stage 0"], narrow)
    (loaded,) = cluster(1).run(loaded_body, path=str(tmp_path), most=5)
    assert same(loaded["again"], narrow)
    for way, dtype in {"as fp32": torch.float32, "as bf16": torch.bfloat16}.items():
        for name, value in loaded[way].items():
            assert torch.equal(value, narrow[name].to(dtype if "exp_avg" in name else value.dtype)), name
    check_beside(loaded["from fp32"])
    for name in (name for name in loaded["from fp32"] if name.endswith(("exp_avg", "exp_avg_sq"))):
        before = saved[f"wide {name}"]
        assert (loaded["from fp32"][name] - before).abs().max() <= before.abs().max() / 100, name


def state_body(context: Context) -> str:
    engine = engine_of(adamw, moments="8bit")
    state = next(iter(engine.optimizer.state.values()))
    with pytest.raises(zero.UsageError, match="8 bits cannot be pickled"):
        pickle.dumps(state["exp_avg"])
    moment = state["exp_avg"]
    moment.write(torch.linspace(-1, 1, moment.numel()))
    with pytest.raises(ValueError, match="from the beginning of a block"):
        moment[1:].write(torch.zeros(moment.numel() - 1))
    assert torch.equal(moment[3:].read(), moment.read()[3:])
    return str(moment.dtype)


def test_state_is_read_and_written_as_values(cluster: Clusters) -> None:
    assert cluster(1).run(state_body) == ["torch.float32"]


def test_the_plan_knows_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = zero.plan(model, optimizer, zero.Config(moments="8bit"), ranks=1)
    blocks = sum(-(-p.numel() // BLOCK) for p in model.parameters())
    assert plan.memory.rest["device"].optimizer == blocks * 2 * (BLOCK + 4)
