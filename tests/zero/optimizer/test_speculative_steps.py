"""Steps made while backward goes on: they happen then, and nobody can tell from any value."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import AdamWUpdate
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.courses import HOST, STEPS, course, same
from tests.zero.helpers.freed import freed_body
from tests.zero.helpers.late_stream import run_late
from tests.zero.helpers.models import Stack, features, fresh, language_loss
from tests.zero.helpers.optimizers import adagrad, lion, momentum, plain_sgd
from tests.zero.helpers.training import adamw
from zero.optimizer.shadow_record import ShadowRecord
from zero.tiers.carrier import Carrier


def compare(context: Context, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[bool, int, int]]:
    """Of each case: whether it is the same ahead as not, and the groups' steps taken and wasted."""
    found = {}
    for name, case in cases.items():
        ahead = course(context, True, **case)
        found[name] = same(ahead, course(context, False, **case)), ahead.taken, ahead.wasted
    return found


def check(found: dict[str, tuple[bool, int, int]], wasted: bool) -> None:
    """wasted: whether some of each case has to be in vain; else nothing may be."""
    for name, (equal, taken, vain) in found.items():
        assert equal, name
        assert taken, name
        assert bool(vain) == wasted, (name, taken, vain)


@pytest.fixture
def side_device(device: str) -> str:
    """A device that has memory of its own."""
    if device == "cpu":
        pytest.skip("where the device is the host, nothing is on its way there and nothing is stepped ahead")
    return device


# -- every setting -------------------------------------------------------------------------------------


def settings_body(context: Context, path: str) -> dict[str, tuple[bool, int, int]]:
    host = {"optimizer": "host", "params": "host"}
    return compare(
        context,
        {
            "bf16": {"precision": "bf16"},
            "fp32": {},
            "one master and shard": {"offload": host},
            "bf16 params on the host": {"offload": host, "precision": "bf16"},
            "params on disk": {"offload": {**HOST, "params": "disk", "path": path}, "precision": "bf16"},
            "half": {"offload": {**HOST, "fraction": 0.5}, "precision": "bf16"},
            "beside the disk": {"offload": {"optimizer": "disk", "path": path, "host_budget": 19_000}},
            "small records": {"offload": {**HOST, "sub_group_size": 64}, "precision": "bf16"},
            "small records, one master and shard": {"offload": {**host, "sub_group_size": 64}},
            "stage 0": {"stage": 0, "precision": "bf16"},
            "stage 1": {"stage": 1},
            "stage 2": {"stage": 2, "precision": "bf16"},
            "accumulation": {"precision": "bf16", "gradient_accumulation_steps": 2},
            "accumulation of slices": {"gradient_accumulation_steps": 3, "stage": 2},
            "local": {"precision": "bf16", "gradient_accumulation_steps": 2, "accumulate": "local"},
            "persistent": {"persistent_below": 100, "precision": "bf16"},
            "fp16": {"precision": "fp16", "loss_scale": 128.0},
            "clipped never": {"clip_norm": 1e6, "precision": "bf16"},
            "lion": {"optimizer": lion, "precision": "bf16"},
            "momentum": {"optimizer": momentum, "precision": "bf16"},
            "sgd": {"optimizer": plain_sgd, "clip_norm": 1e6},
        },
    )


@pytest.mark.parametrize("size", [1, 2])
def test_every_setting_trains_alike(cluster: Clusters, tmp_path: Path, side_device: str, size: int) -> None:
    for found in cluster(size).run(settings_body, path=str(tmp_path), limit=180):
        check(found, wasted=False)


# -- steps that turn out otherwise ---------------------------------------------------------------------


def bursts(model: nn.Module, step: int, rank: int, factor: float = 1e6) -> Tensor:
    """Two of the steps have gradients far larger than the others."""
    return language_loss(model, step, rank) * (factor if step in (2, 3) else 1.0)


def clipped_body(context: Context) -> dict[str, tuple[bool, int, int]]:
    return compare(
        context,
        {
            "overflow": {"precision": "fp16", "loss": bursts, "loss_scale": 64.0},
            "overflow, dynamic": {"precision": "fp16", "loss": bursts},
            "clipped": {"clip_norm": 50.0, "loss": bursts, "precision": "bf16"},
            "clipped fp32": {"clip_norm": 50.0, "loss": bursts},
            "not a number": {"clip_norm": 50.0, "loss": partial(bursts, factor=float("nan"))},
            "always": {"clip_norm": 1e-3, "precision": "bf16"},
        },
    )


@pytest.mark.parametrize("size", [1, 2])
def test_clipped_and_overflowing_steps_are_exact(cluster: Clusters, side_device: str, size: int) -> None:
    for found in cluster(size).run(clipped_body, limit=120):
        always = found.pop("always")
        assert always[:2] == (True, 0)
        check(found, wasted=True)


def confidence_body(context: Context) -> list[int]:
    """Groups' steps begun so far, step by step, where the third and fourth are clipped."""
    offload = zero.Offload(optimizer="host", overlap=True)
    config = zero.Config(offload=offload, clip_norm=50.0, timeout=20)
    engine = zero.initialize(model := fresh(), adamw(model), config)
    ahead, begun = engine._sharded_optimizer._speculative, []
    for step in range(STEPS):
        engine.backward(bursts(model, step, context.rank))
        engine.step()
        begun.append(ahead.committed + ahead.wasted)
    return begun


def test_nothing_is_begun_after_a_clipped_step_until_one_is_not(cluster: Clusters, side_device: str) -> None:
    for begun in cluster(2).run(confidence_body):
        groups = begun[0]
        assert groups
        assert begun == [groups * n for n in (1, 2, 3, 3, 3, 4)]


def set_lr(engine: zero.Engine, step: int) -> None:
    if step % 2:
        engine.optimizer.param_groups[step % 3 % 2]["lr"] *= 0.5


def drop(engine: zero.Engine, step: int) -> None:
    if step == 2:
        engine.zero_grad()
        engine.backward(language_loss(engine.module, 70, engine.rank))


def write(engine: zero.Engine, step: int) -> None:
    if step == 2:
        with zero.gathered(engine.module, write_rank=0), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)


def edit(engine: zero.Engine, step: int) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def edit_master(engine: zero.Engine, step: int) -> None:
    for group in engine.optimizer.param_groups:
        for piece in group["params"]:
            with torch.no_grad():
                piece.mul_(0.5)


class Onlooker:
    """Values are the old ones until the step, also when all that is stepped ahead has been."""

    name = "blocks.0.up.weight"

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def _values(self, engine: zero.Engine) -> list[Tensor]:
        weights = engine.state_dict()
        seen = [engine.full_master(self.name), *([weights[self.name]] if weights else [])]
        return [value.clone() for value in seen]

    def before(self, engine: zero.Engine, step: int) -> None:
        ahead = engine._sharded_optimizer._speculative
        if ahead is not None:
            assert not wait([attempt.done for attempt in ahead._attempts.values()], 10).not_done
        if step:
            assert all(
                torch.equal(now, then) for now, then in zip(self._values(engine), self._last, strict=True)
            )
        assert engine.full_gradient(self.name) is not None

    def after(self, engine: zero.Engine, step: int) -> None:
        self._last = self._values(engine)


def load(engine: zero.Engine, step: int) -> None:
    if step == 3:
        state = engine.state_dict(master=True)
        engine.load_state_dict({name: value * 0.5 for name, value in state.items()})  # drops gradients
        engine.backward(language_loss(engine.module, 70, engine.rank))


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """Its learning rate is set by a hook at the step itself, every second time."""
    optimizer = adamw(model)
    count = iter(range(100))

    def halve(*_: Any) -> None:
        if next(count) % 2:
            optimizer.param_groups[0]["lr"] *= 0.5

    optimizer.register_step_pre_hook(halve)
    return optimizer


def straight() -> nn.Module:
    """Without the block that is used twice, so that backward comes to the first block last."""
    model = fresh()
    model.repeat = False
    return model


class Interrupted(Exception):
    """Raised in a backward."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise Interrupted


def interrupted(model: nn.Module, step: int, rank: int) -> Tensor:
    """The backward of step 2 fails in the first block, when those behind it have been stepped."""
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: (_Raise.apply(args[0]),))
    if step != 2:
        hook.remove()
    loss = language_loss(model, step, rank)
    hook.remove()
    return loss


def changes_body(context: Context) -> dict[str, tuple[bool, int, int]]:
    bf16, onlooker = {"precision": "bf16"}, Onlooker()
    return compare(
        context,
        {
            "learning rate": {"between": set_lr},
            "in a hook": {"optimizer": hooked, **bf16},
            "zero_grad": {"between": drop, **bf16},
            "written to": {"between": write, **bf16},
            "moments edited": {"between": edit, **bf16},
            "masters edited": {"between": edit_master},
            "looked at": {"between": onlooker.before, "after": onlooker.after, **bf16},
            "loaded": {"between": load, **bf16},
            "exception": {"model": straight, "loss": interrupted, "raises": (2, Interrupted), **bf16},
        },
    )


@pytest.mark.parametrize("size", [1, 2])
def test_what_changes_after_backward_is_heeded(cluster: Clusters, side_device: str, size: int) -> None:
    never = {"moments edited", "masters edited"}
    for found in cluster(size).run(changes_body, limit=120):
        for name in never:
            equal, taken, wasted = found.pop(name)
            assert (equal, taken) == (True, 0), name
            assert wasted
        check({"looked at": found.pop("looked at")}, wasted=False)
        check(found, wasted=True)


def resumed_body(context: Context, path: str) -> bool:
    """Saved between steps that were made ahead, and gone on with in another engine, and in the same."""
    settings: dict[str, Any] = {"precision": "bf16", "clip_norm": 1e6, "timeout": 20}
    plain = course(context, False, precision="bf16", clip_norm=1e6)
    offload, losses = zero.Offload(optimizer="host", overlap=True), []
    for part in range(2):
        engine = zero.initialize(model := fresh(), adamw(model), zero.Config(offload=offload, **settings))
        if part:
            engine.load_checkpoint(path)
        for step in range(3 * part, 3 * part + 3):
            loss = language_loss(model, step, context.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine._sharded_optimizer._speculative.committed
        engine.save_checkpoint(Path(path, f"part-{part}"), async_=True)
        engine.offload_states()
        engine.reload_states()
        engine.wait_for_checkpoint()
    return losses == plain.losses


def test_checkpoints_of_what_was_stepped_ahead(cluster: Clusters, tmp_path: Path, side_device: str) -> None:
    assert all(cluster(2).run(resumed_body, path=str(tmp_path)))


# -- parameters that are not used ----------------------------------------------------------------------

PATHS = (
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1), (0, 2)),  # by one rank only, and one by none
    ((3, 0), (3, 0)),
    ((1, 1, 2), (2,)),
    ((0, 1, 2, 3), (3, 2, 1, 0)),
    ((2,), (2,)),
)


def branching(model: nn.Module, step: int, rank: int) -> Tensor:
    output = model(features(step, rank, model), PATHS[step % len(PATHS)][rank])
    loss: Tensor = output.loss
    return loss


def stack() -> nn.Module:
    torch.manual_seed(5)
    return Stack(frozen=3)


def unused_body(context: Context) -> dict[str, tuple[bool, int, int]]:
    case: dict[str, Any] = {"model": stack, "loss": branching}
    return compare(
        context,
        {
            "stage 2": {**case, "stage": 2},
            "bf16": {**case, "stage": 1, "precision": "bf16"},
        },
    )


def test_parameters_that_some_or_no_ranks_use(cluster: Clusters, side_device: str) -> None:
    """Those that only others use are not known in time: their groups wait for the step."""
    for found in cluster(2).run(unused_body, limit=60):
        check(found, wasted=True)


# -- when it happens -----------------------------------------------------------------------------------


def during_body(context: Context) -> dict[str, Any]:
    """The backward of the first block waits until steps of the blocks behind it have been made."""
    offload = zero.Offload(optimizer="host", overlap=True)
    config = zero.Config(offload=offload, precision="bf16", clip_norm=1e6, timeout=20)
    engine = zero.initialize(model := straight(), adamw(model), config)
    kernels = engine._sharded_optimizer._stores.kernels(torch.device("cpu"))
    seen, made = [], threading.Event()
    sound = kernels.adamw

    def adamw_watched(update: AdamWUpdate) -> None:
        sound(update)
        seen.append((threading.current_thread().name, engine._model_hooks.phase.in_backward))
        made.set()

    waited = []
    kernels.adamw = adamw_watched  # type: ignore[method-assign]
    try:
        before = engine.full_master("blocks.2.up.weight")
        model.blocks[0].up.register_full_backward_pre_hook(lambda *_: waited.append(made.wait(10)))
        engine.backward(language_loss(model, 0, context.rank))
        unchanged = torch.equal(before, engine.full_master("blocks.2.up.weight"))
        in_backward = len(seen)
        engine.step()
    finally:
        del kernels.adamw
    changed = not torch.equal(before, engine.full_master("blocks.2.up.weight"))
    threads = {name.rpartition("_")[0] for name, _ in seen}
    return {
        "waited": waited, "seen": seen, "before the step": in_backward, "threads": threads,
        "unchanged": unchanged, "changed": changed,
    }  # fmt: skip


def test_steps_are_made_during_backward(cluster: Clusters, side_device: str) -> None:
    for found in cluster(2).run(during_body):
        assert all(found["waited"]), found
        assert any(in_backward for _, in_backward in found["seen"])
        assert found["threads"] == {"zero-step"}  # all of them, and none again at the step
        assert found["unchanged"]
        assert found["changed"]


# -- what goes wrong -----------------------------------------------------------------------------------


def failing_body(context: Context) -> dict[str, Any]:
    """Steps ahead that fail, on one rank only: those groups are stepped at the step, as if never begun."""
    sound, turns = ShadowRecord.step, iter(range(1000))

    def fail(*arguments: Any) -> None:
        sound(*arguments)
        if context.rank == context.group.size - 1 and next(turns) % 4 == 2:
            raise RuntimeError("a kernel that fails")

    plain = course(context, False, clip_norm=1e6)
    ShadowRecord.step = fail  # type: ignore[method-assign]
    try:
        ahead = course(context, True, clip_norm=1e6)
    finally:
        ShadowRecord.step = sound  # type: ignore[method-assign]
    return {"same": same(ahead, plain), "taken": ahead.taken, "wasted": ahead.wasted}


@pytest.mark.parametrize("size", [1, 2])
def test_an_attempt_that_fails_is_not_taken(cluster: Clusters, side_device: str, size: int) -> None:
    results = cluster(size).run(failing_body)
    for rank, found in enumerate(results):
        assert found["same"]
        assert found["taken"]
        assert bool(found["wasted"]) == (rank == size - 1), found


def broken_body(context: Context) -> dict[str, Any]:
    """A kernel that fails for one group, in the thread and again at the step."""
    offload = zero.Offload(optimizer="host", overlap=True)
    engine = zero.initialize(model := fresh(), adamw(model), zero.Config(offload=offload, timeout=20))
    kernels, joined = engine._stores.kernels(torch.device("cpu")), []
    sound, join, broken = kernels.adamw, engine._stores.join, engine._reducer.all[0].group.layout.shard_numel

    def adamw_broken(update: AdamWUpdate) -> None:
        if update.master.untyped_storage().nbytes() >= 4 * broken:
            raise RuntimeError("a kernel that fails")
        sound(update)

    kernels.adamw = adamw_broken  # type: ignore[method-assign]
    engine._stores.join = lambda: joined.append(join())  # type: ignore[method-assign, func-returns-value]
    try:
        engine.backward(language_loss(model, 0, context.rank))
        with pytest.raises(RuntimeError, match="a kernel that fails"):
            engine.step()
    finally:
        del kernels.adamw
    with pytest.raises(zero.UsageError, match="interrupted"):
        engine.backward(language_loss(model, 1, context.rank))
    return {"joined": len(joined)}


def test_an_error_that_is_real_is_told_at_the_step(cluster: Clusters) -> None:
    for found in cluster(1).run(broken_body):
        assert found["joined"] == 1  # weights of groups before it were under way


def landings_body(context: Context) -> list[int]:
    """How many landings make the next one wait: gradients do, single numbers do not."""
    carrier, device = Carrier(context.accelerator), context.accelerator.device
    counts = []
    for shape in [(1000,), (), (), (1000,)]:
        carrier.to_host(torch.zeros(shape, device=device))
        counts.append(len(carrier._flying))
    return counts


def test_factors_do_not_make_gradients_wait(cluster: Clusters, side_device: str) -> None:
    for counts in cluster(1).run(landings_body):
        assert counts == [1, 1, 1, 2]


def test_an_engine_with_steps_ahead_is_freed(cluster: Clusters) -> None:
    offload = zero.Offload(optimizer="host", overlap=True)
    for gone, nbytes in cluster(2).run(freed_body, offload=offload):
        assert gone
        assert nbytes == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "device"}, "overlap applies to optimizer state on the host"),
        ({"optimizer": "disk", "path": "/tmp"}, "or a host_budget above 0"),
        ({"optimizer": "disk", "path": "/tmp", "host_budget": 0}, "or a host_budget above 0"),
        ({"optimizer": "host", "host_budget": 0}, "or a host_budget above 0"),
        ({"optimizer": "host", "gradients": "device"}, "overlap steps from gradients on the host"),
    ],
)
def test_overlap_of_what_is_not_on_the_host_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(zero.ConfigError, match=told):
        zero.Offload(**settings, overlap=True)


def refused_body(context: Context) -> str:
    model = fresh()
    with pytest.raises(zero.ConfigError) as raised:
        zero.initialize(
            model, adagrad(model), zero.Config(offload=zero.Offload(optimizer="host", overlap=True))
        )
    gc.collect()
    return str(raised.value)


def test_overlap_needs_an_optimizer_that_a_kernel_serves(cluster: Clusters) -> None:
    for told in cluster(1).run(refused_body):
        assert (
            "overlap=True) serves optimizers that kernels step: Adam, AdamW, SGD, Lion. This Adagrad"
        ) in told


def test_steps_ahead_on_a_late_stream(cluster: Clusters, tmp_path: Path, device: str) -> None:
    for found in run_late(cluster, device, 2, settings_body, path=str(tmp_path)):
        check(found, wasted=False)
