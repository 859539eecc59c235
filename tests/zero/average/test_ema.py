"""The sharded average: its values, evaluation with it, and checkpoints at other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.errors import UsageError

DECAY = 0.75
SETTINGS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16"},
    {"stage": 0},
    {"stage": 2, "precision": "bf16", "offload": {"optimizer": "host"}},
    {"stage": 3, "precision": "bf16", "offload": {"optimizer": "disk", "params": "host"}},
]


def masters(engine: zero.Engine) -> dict[str, Tensor]:
    """The trained parameters' whole values."""
    named = engine.module.named_parameters()
    return {n: engine.full_master(n).cpu() for n, p in named if p.requires_grad}


def engine_of(folder: str, **settings: Any) -> zero.Engine:
    if "disk" in settings.get("offload", {}).values():
        settings["offload"] = settings["offload"] | {"path": folder}
    model = fresh()
    return zero.initialize(model, adamw(model), zero.Config(timeout=10, **settings))


def averaged_body(context: Context, folder: str) -> None:
    """The average of the masters, in every tier and stage; applied, saved, and resumed."""
    for number, settings in enumerate(SETTINGS):
        engine = engine_of(folder, **settings)
        ema, wanted = zero.EMA(engine, DECAY), masters(engine)
        for step in range(3):
            train_on(engine, language_loss(engine.module, step, context.rank))
            ema.update()
            after = masters(engine)
            wanted = {name: torch.lerp(wanted[name], after[name], 1 - DECAY) for name in wanted}
        engine.zero_grad()
        loss = language_loss(engine.module, 9, context.rank).detach()
        with ema.applied():
            assert same(masters(engine), wanted)
            assert not torch.equal(language_loss(engine.module, 9, context.rank), loss)
            engine.save_pretrained(f"{folder}/weights-{number}", dtype=torch.float32)
            if number == 0:
                refused_inside(engine, ema, context.rank, folder)
        assert same(masters(engine), after)
        assert torch.equal(language_loss(engine.module, 9, context.rank), loss)
        saved = load_file(f"{folder}/weights-{number}/model.safetensors")
        assert same({name: saved[name] for name in wanted}, wanted)
        engine.save_checkpoint(f"{folder}/saved-{number}", {"ema": ema}, async_=number == 0)
        engine.wait_for_checkpoint()
        if context.rank == 0:
            torch.save(wanted, f"{folder}/wanted-{number}")
        stepped = [stepped_after_a_look(engine, ema, context, folder, look) for look in (False, True)]
        assert same(*stepped)
        if number == 1:
            gone_on(engine, ema, context.rank, folder)


def refused_inside(engine: zero.Engine, ema: zero.EMA, rank: int, folder: str) -> None:
    """What would train, save or replace the averages in the weights' place."""
    other = adamw(engine.module)
    for call in (
        lambda: engine.save_checkpoint(f"{folder}/refused", {"ema": ema}),
        lambda: engine.save_checkpoint(f"{folder}/refused"),
        lambda: engine.load_checkpoint(f"{folder}/refused"),
        lambda: engine.load_state_dict({}),
        lambda: engine.attach(other),
        lambda: language_loss(engine.module, 9, rank).backward(),
        lambda: engine.backward(language_loss(engine.module, 9, rank)),
        ema.update,
        lambda: zero.EMA(engine),
    ):
        with pytest.raises(UsageError, match="inside ema"):
            call()


def stepped_after_a_look(
    engine: zero.Engine, ema: zero.EMA, context: Context, folder: str, look: bool
) -> dict[str, Tensor]:
    """Masters after two micro-batches, with or without looks at the average between them and before the
    step."""
    path = f"{folder}/before-look"
    if look:
        engine.load_checkpoint(path, restore={"ema": ema})
    else:
        engine.save_checkpoint(path, {"ema": ema})
    for batch in (5, 6):
        engine.backward(language_loss(engine.module, batch, context.rank))
        if look:
            with ema.applied(), torch.no_grad():
                language_loss(engine.module, 7, context.rank)
                with pytest.raises(UsageError, match="inside ema"):
                    engine.optimizer.step()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return masters(engine)


def gone_on(engine: zero.Engine, ema: zero.EMA, rank: int, folder: str) -> None:
    """Two averages; one of another engine; one that is adopted; and none after another optimizer has made the
    shards anew."""
    stranger = engine_of(folder)
    for call in (
        lambda: stranger.save_checkpoint(f"{folder}/strange", {"ema": ema}),
        lambda: stranger.load_checkpoint(f"{folder}/before-look", restore={"ema": ema}),
    ):
        with pytest.raises(UsageError, match="average of another"):
            call()
    second, before = zero.EMA(engine, 0.5), masters(engine)
    with ema.applied():
        average = masters(engine)
        with pytest.raises(UsageError, match="inside ema"):
            second.swap()
    ema.adopt()
    assert not same(average, before)
    assert same(masters(engine), average)
    engine.attach(adamw(engine.module))
    with pytest.raises(UsageError, match="average anew"), ema.applied():
        pass
    for call in (
        ema.update,
        ema.swap,
        lambda: engine.save_checkpoint(f"{folder}/stale", {"ema": ema}),
        lambda: engine.load_checkpoint(f"{folder}/before-look", restore={"ema": ema}),
    ):
        with pytest.raises(UsageError, match="average anew"):
            call()
    with zero.EMA(engine).applied():
        assert same(masters(engine), average)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def resumed_body(context: Context, folder: str) -> None:
    """Each checkpoint, with the settings of another."""
    for number in range(len(SETTINGS)):
        engine = engine_of(folder, **SETTINGS[number - 1])
        ema = zero.EMA(engine, 0.5)
        engine.load_checkpoint(f"{folder}/saved-{number}", restore={"ema": ema})
        assert (ema.decay, ema.updates) == (DECAY, 3)
        with ema.applied():
            assert same(masters(engine), torch.load(f"{folder}/wanted-{number}"))
    engine.save_checkpoint(f"{folder}/without")
    with pytest.raises(zero.StateError, match="state has no"):
        engine.load_checkpoint(f"{folder}/without", restore={"ema": ema})
    engine.save_checkpoint(f"{folder}/other", {"ema": {"decay": 1.0}})
    with pytest.raises(zero.StateError, match="no average of"):
        engine.load_checkpoint(f"{folder}/other", restore={"ema": ema})
    with pytest.raises(UsageError, match="from 0 to 1"):
        zero.EMA(engine, 2.0)


def test_averages(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(averaged_body, folder=str(tmp_path), limit=120)
    cluster(1).run(resumed_body, folder=str(tmp_path), limit=120)


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def divided_body(context: Context, folder: str) -> None:
    """Of DTensors: saved in blocks by two ranks, restored whole by one."""
    model = network()
    if context.size == 2:
        mesh = mesh_of(("dp", 1), ("tp", 2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20), mesh=mesh, data_dims="dp")
        ema = zero.EMA(engine, DECAY)
        train_on(engine, model(torch.ones(3, 6)).square().mean())
        ema.update()
        engine.save_checkpoint(f"{folder}/blocks", {"ema": ema})
        with ema.applied():
            blocks: dict[str, Any] = {name: engine.full_master(name) for name, _ in model.named_parameters()}
            found = {name: block.full_tensor() for name, block in blocks.items()}
        torch.save(found, f"{folder}/wanted-{context.rank}")
        return
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    ema = zero.EMA(engine)
    engine.load_checkpoint(f"{folder}/blocks", restore={"ema": ema})
    with ema.applied():
        assert same(masters(engine), torch.load(f"{folder}/wanted-0"))


@pytest.mark.host  # meshes of gloo's
def test_averages_of_blocks(cluster: Clusters, tmp_path: Path) -> None:
    for size in (2, 1):
        cluster(size).run(divided_body, folder=str(tmp_path))
