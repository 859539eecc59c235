"""Several copies of the model, each sharded over some of the ranks: `Config(shard_ranks=...)`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, Stack, features, fresh, language_loss
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.paths import decaying, straight
from tests.zero.helpers.training import (
    adamw,
    errors_of,
    relative_error,
    same_bits,
    train_reference,
    train_zero,
)

RANKS, EACH, STEPS = 4, 2, 4

Settings = dict[str, Any]


def config(**settings: Any) -> zero.Config:
    return zero.Config(**{"shard_ranks": EACH, "timeout": 20, **settings})


def shards_of(engine: zero.Engine) -> list[Tensor]:
    groups = [group for unit in engine.units for group in unit.groups]
    return [group.shard.to(torch.device("cpu")).detach() for group in groups]


def is_equal_on_all_copies(engine: zero.Engine) -> bool:
    """Whether the copies' weights are equal bit for bit, by what each rank has of them."""
    mine = [shard.flatten().view(torch.uint8).to(torch.int64) for shard in shards_of(engine)]
    digest = [int((s * torch.arange(1, s.numel() + 1)).sum()) for s in mine]
    every, each = engine._communicator.all_gather_object(digest), engine.units[0].groups[0].mesh.shards.size
    return all(every[rank] == every[rank % each] for rank in range(len(every)))


SETTINGS: dict[str, tuple[Settings, int]] = {
    "stage 1": ({"stage": 1}, 1),
    "stage 2": ({"stage": 2}, 1),
    "stage 3": ({"stage": 3}, 1),
    "clipped": ({"clip_norm": 0.5}, 1),
    "accumulated": ({"gradient_accumulation_steps": 2, "clip_norm": 0.5}, 2),
    "accumulated at stage 2": ({"stage": 2, "gradient_accumulation_steps": 2}, 2),
    "accumulated locally": ({"gradient_accumulation_steps": 2, "accumulate": "local"}, 2),
    "state on the host": (
        {"gradient_accumulation_steps": 2, "offload": {"optimizer": "host", "params": "host"}},
        2,
    ),
    "stepped on the host": ({"offload": {"optimizer": "host"}, "clip_norm": 0.5}, 1),
    "persistent": ({"persistent_below": 40}, 1),
}


FEW = (
    "stage 1",
    "clipped",
    "accumulated at stage 2",
    "accumulated locally",
    "state on the host",
    "persistent",
)
"""What devices other than the host are trained with."""


def parity_body(context: Context, names: Sequence[str]) -> dict[str, float]:
    """Errors with an optimizer for which the magnitude of gradients matters."""
    errors = {}
    chosen = {name: SETTINGS[name] for name in names}
    references = {
        (steps, clip): train_reference(context, fresh(), language_loss, sgd, STEPS, steps, clip)
        for steps, clip in {(steps, more.get("clip_norm")) for more, steps in chosen.values()}
    }
    for name, (settings, steps) in chosen.items():
        run = train_zero(context, fresh(), language_loss, config(**settings), sgd, STEPS)
        errors[name] = errors_of(run, references[steps, settings.get("clip_norm")])
    return errors


def test_copies_train_as_one(cluster: Clusters, abilities: Abilities) -> None:
    names = FEW if abilities.apart else list(SETTINGS)
    for found in cluster(RANKS).run(parity_body, limit=120, names=names):
        assert max(found.values()) < 1e-5, found


def beside(model: nn.Module) -> list[Optimizer]:
    """Matrices are stepped whole, divided among the ranks of a copy, and the rest by a kernel."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]


def narrow_body(context: Context, folder: str, left_out: Sequence[str]) -> dict[str, tuple[float, bool]]:
    """Compare settings that round, or that have no unsharded counterpart, with the same with one copy."""
    ways: dict[str, tuple[Settings, Callable[[nn.Module], Any]]] = {
        "bf16": ({"precision": "bf16"}, adamw),
        "fp16": ({"precision": "fp16", "gradient_accumulation_steps": 2}, adamw),
        "reduced in bf16": ({"reduce_dtype": "bf16", "gradient_accumulation_steps": 2}, adamw),
        "8 bits": ({"precision": "bf16", "gather_dtype": "int8"}, adamw),
        "muon": ({"stage": 3}, beside),
        "disk": ({"precision": "bf16", "offload": {"optimizer": "disk", "path": folder}}, adamw),
        "gradients on disk": (
            {
                "gradient_accumulation_steps": 2,
                "offload": {"optimizer": "disk", "gradients": "disk", "params": "disk", "path": folder},
            },
            sgd,
        ),
        "gradients on the host": (
            {"gradient_accumulation_steps": 2, "offload": {"optimizer": "host", "gradients": "host"}},
            sgd,
        ),
        "auto": ({"precision": "bf16", "offload": "auto"}, adamw),
    }
    found = {}
    for name, (settings, optimizer) in ways.items():
        if name in left_out:
            continue
        one = train_zero(
            context, fresh(), language_loss, zero.Config(timeout=20, **settings), optimizer, STEPS
        )
        model = fresh()
        engine = zero.initialize(model, optimizer(model), config(**settings))
        losses = []
        for step in range(STEPS):
            value = language_loss(model, step, context.rank)
            train_on(engine, value)
            losses.append(value.item())
        found[name] = relative_error(losses, one.losses), is_equal_on_all_copies(engine)
    return found


BOUNDS = {
    "8 bits": 5e-2,  # shards are cut elsewhere, so blocks begin elsewhere
    "gradients on disk": 1e-5,
    "gradients on the host": 1e-5,
    "muon": 1e-3,
}


def test_what_rounds_and_what_is_elsewhere(cluster: Clusters, abilities: Abilities, tmp_path: Path) -> None:
    alike = ("bf16", "reduced in bf16", "disk") if abilities.apart else ()  # like others of these on devices
    for found in cluster(RANKS).run(narrow_body, limit=180, folder=str(tmp_path), left_out=alike):
        for name, (error, equal) in found.items():
            assert error < BOUNDS.get(name, 2e-2), (name, error)
            assert equal, name


def one_block(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(features(step, rank, model), (0,)).loss
    return loss


def compiled_body(context: Context) -> bool:
    runs = []
    for compile in (zero.Compile(inner="aot_eager"), None):
        torch.manual_seed(2)
        settings = config(compile=compile, timeout=60, gradient_accumulation_steps=2)
        runs.append(train_zero(context, Stack(1), one_block, settings, decaying, 2))
    return same_bits(*runs)


@pytest.mark.host  # copies of compiled models differ in no other way than those of others
def test_compiled(cluster: Clusters) -> None:
    assert all(cluster(RANKS).run(compiled_body, limit=180))


def relieved_body(context: Context) -> dict[str, Any]:
    """With offload="auto", one rank alone moves state to the host between two micro-batches."""
    settings = config(gradient_accumulation_steps=2, offload="auto")
    one = zero.Config(gradient_accumulation_steps=2)
    runs, moved = [], 0
    for given in (one, settings):
        model = fresh()
        engine = zero.initialize(model, sgd(model), given)
        losses = []
        for step in range(6):
            loss = language_loss(model, step, context.rank)
            engine.backward(loss)
            if given is settings and step == 2 and context.rank == 2:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    moved = engine._placement.relieve(1 << 40)  # type: ignore[attr-defined]
            if step == 4:  # in the middle
                gradient = engine.full_gradient("head.weight")
                assert gradient is not None
                losses.append(float(gradient.norm()))
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
    return {"error": relative_error(runs[1], runs[0]), "moved": moved}


def test_a_rank_that_is_relieved_alone(cluster: Clusters, apart: None) -> None:
    results = cluster(RANKS).run(relieved_body)
    assert results[2]["moved"] > 0
    for found in results:
        assert found["error"] < 1e-5, found


class Sometimes(nn.Module):
    """A branch that only one rank takes in one step, and no rank in another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, taken: bool) -> Tensor:
        return self.branch(self.body(x)) if taken else self.body(x)


def sometimes_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    device = next(model.parameters()).device
    x = torch.full((2, 6), 0.1 * (rank + 1), device=device)
    return model(x, step != 1 and rank == 3).square().mean()


def sometimes(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return Sometimes()


def usage_body(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (2, 3):
        runs = [
            train_zero(context, sometimes(), sometimes_loss, zero.Config(stage=stage, **more), decaying, 4)
            for more in ({}, {"shard_ranks": EACH})
        ]
        found[f"stage {stage}"] = errors_of(runs[1], runs[0])
    return found


def test_a_branch_that_one_rank_of_one_copy_takes(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(usage_body):
        assert max(found.values()) < 1e-5, found


def overflow_body(context: Context) -> list[tuple[float, bool]]:
    """The loss of one rank, of the second copy, is infinite in the second step."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), config(precision="fp16"))
    found = []
    for step in range(3):
        before = [shard.clone() for shard in shards_of(engine)]
        loss = language_loss(model, step, context.rank)
        train_on(engine, loss * (float("inf") if step == 1 and context.rank == 3 else 1e-2))
        changed = any(not torch.equal(a, b) for a, b in zip(before, shards_of(engine), strict=True))
        assert engine.loss_scale is not None
        found.append((float(engine.loss_scale), changed))
    return found


def test_an_overflow_on_one_copy_skips_the_step_of_all(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(overflow_body):
        assert found == [(2.0**16, True), (2.0**15, False), (2.0**15, True)]


def whole_body(context: Context) -> dict[str, bool]:
    """Whole values: gradients in the middle of accumulation, and values that any rank writes."""
    found = {}
    gradients: dict[int | None, list[Tensor]] = {}
    for each in (None, EACH):
        model = fresh()
        engine = zero.initialize(
            model, adamw(model), zero.Config(shard_ranks=each, gradient_accumulation_steps=3)
        )
        name = next(n for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n)
        for step in range(3):
            engine.backward(language_loss(model, step, context.rank))
            value = engine.full_gradient(name)
            assert value is not None
            gradients.setdefault(each, []).append(value)
        engine.step()
    pairs = zip(gradients[None], gradients[EACH], strict=True)
    found["gradients"] = all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in pairs)
    weight = dict(model.named_parameters())[name]
    with torch.no_grad(), zero.gathered(weight, write_rank=3):
        if context.rank == 3:
            weight.fill_(3.0)
    found["written"] = bool((engine.full_master(name) == 3.0).all()) and is_equal_on_all_copies(engine)
    state = engine.state_dict()
    engine.load_state_dict({k: v + 1 if k == name else v for k, v in state.items()})
    found["loaded"] = bool((engine.full_master(name) == 4.0).all()) and is_equal_on_all_copies(engine)
    found["state"] = bool(engine.full_optimizer_state(name)["exp_avg"].abs().sum() > 0)
    return found


def test_whole_values(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(whole_body):
        assert all(found.values()), found


def steps_on(engine: zero.Engine, context: Context, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = language_loss(engine.module, step, context.rank)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


def checkpoint_body(context: Context, folder: str) -> dict[str, Any]:
    """Save with and without copies, load with and without, and compare with training on."""

    def made(each: int | None, seed: int) -> zero.Engine:
        torch.manual_seed(seed)
        model = LanguageModel()
        return zero.initialize(model, adamw(model), zero.Config(shard_ranks=each, clip_norm=0.5))

    found: dict[str, Any] = {}
    for saved in (None, EACH):
        engine = made(saved, 3)
        steps_on(engine, context, range(2))
        path = f"{folder}/{saved}"
        engine.save_checkpoint(path, rank_state={"rank": context.rank})
        expected = steps_on(engine, context, range(2, 4))
        for loaded in (None, EACH):
            again = made(loaded, 4)
            states = again.load_checkpoint(path).rank_states
            assert [state["rank"] for state in states] == list(range(context.size))
            found[f"{saved} -> {loaded}"] = (
                relative_error(steps_on(again, context, range(2, 4)), expected),
                is_equal_on_all_copies(again),
            )
    return found


def test_checkpoints(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(RANKS).run(checkpoint_body, folder=str(tmp_path), limit=120):
        for way, (error, equal) in found.items():
            assert error < 2e-6, (way, error)  # sums over other numbers of ranks
            assert equal, way
    written = []
    for file in sorted(tmp_path.glob(f"{EACH}/rank-*.safetensors")):
        with safe_open(file, "pt") as stored:
            written.append(any(key.startswith("model/") for key in stored.keys()))  # noqa: SIM118
    assert written == [True, True, False, False]  # one copy is saved


def traffic_body(context: Context, settings: Settings) -> dict[str, int]:
    model = Stack()
    engine = zero.initialize(model, adamw(model), config(**settings))
    per_step: dict[str, int] = {}
    for _ in range(3):
        engine.traffic.clear()
        for step in range(settings.get("gradient_accumulation_steps", 1)):
            engine.backward(straight(model, step, context.rank))
        engine.step()
        per_step = dict(engine.traffic.bytes)
    return {kind: nbytes for kind, nbytes in per_step.items() if kind not in ("broadcast", "barrier")}


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 1},
        {"stage": 2, "precision": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "precision": "bf16", "reduce_dtype": "bf16"},
        {"gradient_accumulation_steps": 2, "accumulate": "local", "reduce_dtype": "bf16"},
    ],
)
def test_only_slices_travel_between_copies_and_once_a_step(cluster: Clusters, settings: Settings) -> None:
    model = Stack()
    plan = zero.plan(model, adamw(model), config(**settings), ranks=RANKS)
    one = zero.plan(model, adamw(model), config(**settings), ranks=EACH)
    for found in cluster(RANKS).run(traffic_body, settings=settings):
        assert found == plan.traffic.collectives
    steps = settings.get("gradient_accumulation_steps", 1)
    item = 4 if steps > 1 or "precision" not in settings else 2
    trained = sum(g.shard_numel for unit in plan.units for g in unit.groups if g.trainable)
    assert plan.traffic.to_copies == trained * item  # twice, but half of it is there already
    assert plan.traffic.link - plan.traffic.to_copies == one.traffic.link
    assert plan.memory.rest == one.memory.rest
    assert "of which to other copies" in str(plan)


def test_as_many_ranks_as_there_are_have_one_copy() -> None:
    model = fresh()
    plans = [zero.plan(model, adamw(model), zero.Config(shard_ranks=n), ranks=4) for n in (None, 4, 8)]
    assert plans[0].traffic == plans[1].traffic == plans[2].traffic
    assert plans[0].memory == plans[1].memory == plans[2].memory


def refused_body(context: Context) -> dict[str, str]:
    messages = {}
    model = fresh()
    for name, each in {"odd": 3, "unequal": 2 if context.rank else 4}.items():
        try:
            zero.initialize(model, adamw(model), config(shard_ranks=each))
        except zero.ZeroError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    engine = zero.initialize(model, adamw(model), config())  # nothing was changed
    steps_on(engine, context, range(1))
    return messages


def test_what_does_not_fit_is_refused(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(refused_body):
        assert re.match("ConfigError: shard_ranks=3 does not divide the job's 4 ranks", found["odd"]), found
        assert re.match(
            "RankMismatchError: the ranks disagree about Config\\(shard_ranks", found["unequal"]
        ), found
    with pytest.raises(zero.ConfigError, match="at stage 0 every rank has the whole model"):
        zero.Config(stage=0, shard_ranks=2)
    with pytest.raises(zero.ConfigError, match="greater than or equal to 2"):
        zero.Config(shard_ranks=1)
    with pytest.raises(zero.ConfigError, match="shard_ranks=3 does not divide the job's 8 ranks"):
        zero.plan(fresh(), adamw(fresh()), zero.Config(shard_ranks=3), ranks=8)
