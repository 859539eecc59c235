"""What a training step must not do: wait for the device, keep wide gradients, leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.freed import freed_body
from tests.zero.helpers.models import Stack, device_of, language_loss
from tests.zero.helpers.models import fresh as language_model
from tests.zero.helpers.observing import WaitWatcher
from tests.zero.helpers.paths import Optionals, decaying, optional_loss, straight
from tests.zero.helpers.training import adamw, collected, exchanges_of, living, own_work_seen


def waiting_body(context: Context, **settings: Any) -> list[str]:
    model = language_model()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10, **settings))
    for step in range(10):  # of skipped steps the host learns every few steps
        loss = language_loss(model, step, context.rank)
        with own_work_seen(), WaitWatcher() as watcher:
            engine.backward(loss)
            engine.step()
        if watcher.seen:
            return watcher.seen
    return []


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 3, "clip_norm": 1.0},
        {"stage": 3, "precision": "bf16", "clip_norm": 1.0},
        {"stage": 2, "precision": "fp16"},
        {"stage": 0, "precision": "fp16", "clip_norm": 1.0},
    ],
)
def test_a_step_never_waits_for_the_device(cluster: Clusters, settings: dict[str, Any]) -> None:
    for seen in cluster(2).run(waiting_body, **settings):
        assert seen == []


ONE_PASS = {
    "adamw": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "lion": lambda model: zero.Lion(model.parameters()),
}


def wide_gradient_body(context: Context, optimizer: str) -> list[tuple[str, int]]:
    """Sizes of fp32 tensors made during the step of a bf16 model, beyond the kernels' scratch."""
    kernels = context.accelerator.kernels
    if kernels.origin(optimizer) == "torch reference" and kernels.chunk > 1 << 18:
        return []  # the scratch of these is as large
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    engine = zero.initialize(model, ONE_PASS[optimizer](model), zero.Config(precision="bf16", timeout=10))
    loss = model(torch.ones(1, 1024, device=device_of(model))).float().square().mean()
    made: list[tuple[str, int]] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            aliases = any(r.alias_info is not None for r in func._schema.returns)
            if isinstance(out, Tensor) and out.dtype is torch.float32 and not aliases:
                made.append((func.overloadpacket.__name__, out.numel()))
            return out

    with own_work_seen(), Sizes():
        engine.backward(loss)
        engine.step()
    return [(name, numel) for name, numel in made if numel >= 1024 * 1024 // 2]


@pytest.mark.parametrize("optimizer", ONE_PASS)
def test_no_fp32_copy_of_a_gradient_is_kept(cluster: Clusters, optimizer: str) -> None:
    """Kernels read 16-bit gradients piece by piece, so no fp32 tensor of a shard's size is ever made."""
    for made in cluster(2).run(wide_gradient_body, optimizer=optimizer):
        assert made == []


@collected()
def leak_body(context: Context) -> tuple[int, int, int, int]:
    model = language_model()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))

    def live() -> tuple[int, int]:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        hooks = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
        return living(Tensor), hooks

    def steps(first: int, count: int) -> None:
        for step in range(first, first + count):
            engine.backward(language_loss(model, step, context.rank))
            engine.step()

    steps(0, 5)
    before = live()
    steps(5, 25)
    return (*before, *live())


@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"offload": zero.Offload(optimizer="host")}])
def test_an_engine_that_nobody_holds_is_freed(cluster: Clusters, settings: dict[str, Any]) -> None:
    for gone, nbytes in cluster(2).run(freed_body, **settings):
        assert gone
        assert nbytes == 0


def told_body(context: Context) -> list[int]:
    """The number of keys in the job's store after each of several engines that read and load state."""
    counts = []
    for times in (1, 2, 4):
        model = language_model()
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
        for _ in range(times):
            engine.load_state_dict(engine.state_dict())
            engine.full_optimizer_state(next(name for name, _ in model.named_parameters()))
        context.accelerator.collectives.barrier(context.group)
        counts.append(context.group.store.num_keys())
        context.accelerator.collectives.barrier(context.group)
    return counts


def test_what_ranks_have_told_each_other_does_not_pile_up(cluster: Clusters) -> None:
    """An engine leaves only each rank's last message, whatever the numbers of messages and units."""
    for first, second, third in cluster(2).run(told_body):
        assert third - second == second - first == 2


def test_nothing_grows_over_steps(cluster: Clusters) -> None:
    """Over 25 steps. gloo's threads may hold the last exchanges' tensors for a moment, before or after."""
    for tensors, hooks, tensors_later, hooks_later in cluster(2).run(leak_body):
        assert tensors_later < tensors + 20
        assert hooks_later == hooks


def kept_norms_body(context: Context) -> tuple[list[float], list[float]]:
    """Gradient norms read right at their step, and read some steps later from the kept tensors."""
    model = language_model()
    engine = zero.initialize(model, adamw(model), zero.Config(clip_norm=1.0, timeout=10))
    read, kept = [], []
    for step in range(3):
        engine.backward(language_loss(model, step, context.rank))
        engine.step()
        norm = engine.grad_norm
        assert norm is not None
        read.append(norm.item())
        kept.append(norm)
    return read, [norm.item() for norm in kept]


def test_norms_that_a_user_keeps_stay(cluster: Clusters) -> None:
    """The engine overwrites its own number at every step."""
    for read, kept in cluster(2).run(kept_norms_body):
        assert len(set(read)) == len(read)
        assert kept == read


def gradient_bytes_body(context: Context) -> dict[str, int]:
    """Whole gradient buffers alive at once during backward, and what is left after it."""
    torch.manual_seed(5)
    model = Stack(layers=8)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        under_way = [reduction.gradients for reduction in engine._reducer._reductions]
        units = {g.unit for g in engine._reducer.all if g.whole is not None or g in under_way}
        most = max(most, len(units))

    for block in model.blocks:
        block.register_full_backward_hook(count)
    for step in range(2):
        engine.backward(straight(model, step, context.rank))
        left = sum(1 for g in engine._reducer.all if g.whole is not None)
        shards = len({g.unit for g in engine._reducer.all if g.slice.present})
        engine.step()
    return {"most": most, "left": left, "shards": shards}


def test_whole_gradients_live_briefly(cluster: Clusters) -> None:
    """Only the unit in backward, units being reduced, and the root have them, not the whole model."""
    for found in cluster(2).run(gradient_bytes_body):
        assert found["most"] <= 4
        assert found["left"] == 0
        assert found["shards"] == 9


def gradients_of(engine: zero.Engine, names: list[str]) -> list[Tensor | None]:
    values = [engine.full_gradient(name) for name in names]
    return [None if value is None else value.cpu() for value in values]


def exchanges_body(context: Context, micro_batches: int, look: bool) -> dict[str, Any]:
    """Exchanges over host memory in the third step of a model of which ranks use different parts, and its
    gradients as they are read between micro-batches, if `look`, and after the last one."""
    torch.manual_seed(2)
    model = Optionals("in a row")
    config = zero.Config(stage=2, timeout=10, gradient_accumulation_steps=micro_batches)
    engine = zero.initialize(model, decaying(model), config)
    names = [name for name, _ in model.named_parameters()]
    counted = exchanges_of(engine)
    for step in range(3):
        counted.clear()
        for micro_batch in range(micro_batches):
            engine.backward(optional_loss(model, step + micro_batch, context.rank))
            if look and not engine.is_boundary:
                between = gradients_of(engine, names)
        found = len(counted)
        gradients = gradients_of(engine, names)
        engine.step()
    return {"exchanges": found, "gradients": gradients, "between": between if look else None}


def test_micro_batches_before_the_last_exchange_nothing(cluster: Clusters) -> None:
    """Also not where ranks use different parameters; whoever asks for gradients then gets all of them."""
    once, often, looking = (
        cluster(2).run(exchanges_body, micro_batches=count, look=look)
        for count, look in ((1, False), (3, False), (3, True))
    )
    for first, second, third in zip(once, often, looking, strict=True):
        assert 1 <= second["exchanges"] <= first["exchanges"] <= 2
        for value, other in zip(second["gradients"], third["gradients"], strict=True):
            assert (value is None) == (other is None)
            assert value is None or torch.equal(value, other)
        assert any(value is not None and value.any() for value in third["between"])
    for one, other in zip(*(found["between"] for found in looking), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
