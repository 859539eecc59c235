"""What only one rank runs into: too little memory, or a disk that fails. No rank is left waiting for it."""

from __future__ import annotations

import errno
import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import Accelerator
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import capacity
from tests.zero.helpers.disks import broken
from tests.zero.helpers.layers import BATCH, LAYERS, WIDTH, one_step
from tests.zero.helpers.training import collected
from zero.memory.oom_retry import OomRetry

SHORT_STEP = 4  # two steps measure, one has the records placed


class Hungry(nn.Module):
    """Wants more memory than is free for a moment, if told to, in forward or backward. Draws random numbers,
    and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.wants = ""
        self.watched: list[bool] = []  # whether operations passed through Python

    def forward(self, x: Tensor) -> Tensor:
        self.watched.append(torch._C._len_torch_dispatch_stack() > 0)
        x = self.drop(self.norm(self.linear(x)))
        if self.wants == "forward":
            too_much(x.device)
        if self.wants == "backward" and x.requires_grad:
            device = x.device  # a hook that holds its own tensor would keep it for good
            x.register_hook(lambda _: too_much(device))
        return torch.tanh(x)


def too_much(device: torch.device) -> None:
    import accelz

    torch.empty(accelz.current().memory.stats().free + 4096, dtype=torch.uint8, device=device)


def steps(
    context: Context, count: int, wants: str = "", offload: Any = None, more: int = 0
) -> dict[str, Any]:
    """Losses, peaks, and where records are behind each step. more: rows of one step's batch."""
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    layers[3] = Hungry()  # type: ignore[call-overload]
    model = nn.Sequential(*layers)
    context.accelerator.rng.seed(context.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.Config(precision="bf16", cast_buffers=True, offload=offload, timeout=20)
    engine = zero.initialize(model, optimizer, config)
    losses, peaks, near = [], [], []
    for step in range(count):
        layers[3].wants = wants if step == SHORT_STEP else ""  # type: ignore[assignment]
        context.accelerator.memory.reset_peak()
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        rows = BATCH + more * (step == SHORT_STEP)
        x = torch.randn(rows, WIDTH, generator=generator).to(context.accelerator.device)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        peaks.append(context.accelerator.memory.stats().peak)
        losses.append(loss.item())
        near.append([s.record.tier.name for u in engine.units for g in u.groups for s in g.subs])
    watched = layers[3].watched
    return {"losses": losses, "peaks": peaks, "near": near, "watched": watched}


@collected()
def shortage_body(context: Context, wants: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    more = BATCH // 4 if context.rank in ranks else 0
    gc.collect()
    before = context.accelerator.memory.stats().allocated  # what others have left
    plain = steps(context, SHORT_STEP + 3, more=more)
    gc.collect()
    mine = wants if context.rank in ranks else ""
    with (
        capacity(context.accelerator, before + int((max(plain["peaks"]) - before) * 0.95)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        short = steps(context, SHORT_STEP + 3, mine, offload="auto", more=more)
    told = sum("ran out of memory" in str(w.message) for w in caught)
    return {**short, "plain": plain["losses"], "told": told}


@pytest.mark.parametrize("wants", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.usefixtures("exact", "simulated")
def test_out_of_memory_on_some_ranks_is_repeated(
    cluster: Clusters, wants: str, ranks: tuple[int, ...]
) -> None:
    """Where no collective is: the others do not notice, and behind the step all have the same placement."""
    found = cluster(2).run(shortage_body, wants=wants, ranks=ranks, limit=120)
    for rank, mine in enumerate(found):
        assert mine["losses"] == pytest.approx(mine["plain"], rel=1e-3)
        assert mine["told"] == (rank in ranks)
        assert mine["watched"] == [step == SHORT_STEP and rank in ranks for step in range(SHORT_STEP + 3)]
        assert mine["near"] == found[0]["near"]
        assert "device" in mine["near"][SHORT_STEP - 1]
        assert mine["near"][SHORT_STEP].count("device") < mine["near"][SHORT_STEP - 1].count("device")
        assert "device" in mine["near"][SHORT_STEP]  # what has room comes back
        assert mine["near"][SHORT_STEP] == mine["near"][-1]


def random_body(context: Context) -> tuple[bool, bool]:
    """An operation that has drawn random numbers when it finds no room draws the same ones again."""
    accelerator: Accelerator = context.accelerator
    gc.collect()
    numel = 1 << 20
    x = torch.ones(numel, device=accelerator.device)
    accelerator.rng.seed(7)
    expected, _ = torch.native_dropout(x, 0.5, True)
    draws = torch.rand(4, device=accelerator.device)
    accelerator.rng.seed(7)
    ballast = [torch.empty(8 * numel, device=accelerator.device)]
    moved = []

    def make_room() -> int:
        moved.append(len(ballast))
        ballast.clear()
        return moved[-1]

    oom_retry = OomRetry(accelerator, make_room, lambda: len(ballast))
    with capacity(accelerator, accelerator.memory.stats().allocated + 3 * numel), oom_retry.on():
        found, _ = torch.native_dropout(x, 0.5, True)
    again = torch.rand(4, device=accelerator.device)
    return moved == [1], torch.equal(found, expected) and torch.equal(draws, again)


@pytest.mark.usefixtures("exact", "simulated")
def test_a_repeated_operation_draws_the_same_numbers(cluster: Clusters) -> None:
    assert cluster(1).run(random_body) == [(True, True)]


# -- disks ---------------------------------------------------------------------------------------------

EVERYTHING = {"optimizer": "disk", "params": "disk", "gradients": "disk"}


def disk_engine(path: str, **tiers: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zero.Offload(path=path, **(tiers or EVERYTHING))
    config = zero.Config(precision="bf16", clip_norm=1.0, timeout=20, offload=offload)
    return zero.initialize(model, optimizer, config)


def no_place_body(context: Context, path: str) -> list[str]:
    """Rank 1 has no directory, then no space: all are told, nothing has changed, and they may try again."""
    told = []
    mine = context.rank == 1
    with pytest.raises(zero.OffloadError) as failed:
        disk_engine(str(Path(path, "nothing")) if mine else path)
    told.append(str(failed.value))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    config = zero.Config(timeout=20, offload=zero.Offload(path=path, **EVERYTHING))
    with broken("posix_fallocate", errno.ENOSPC, mine=mine), pytest.raises(zero.OffloadError) as failed:
        zero.initialize(model, optimizer, config)
    told.append(str(failed.value))
    engine = zero.initialize(model, optimizer, config)
    with broken("posix_fallocate", errno.ENOSPC):  # all space is taken
        for step in range(2):
            one_step(engine, step)
    return told


def test_no_place_on_one_rank_is_told_to_all(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(no_place_body, path=str(tmp_path)):
        directory, space = found
        assert re.match("rank 1: Offload.path=.*nothing.*No such file", directory)
        assert re.match("rank 1: no space for .* bytes of state .*No space left", space)


def other_tiers_body(context: Context, path: str) -> str:
    with pytest.raises(zero.RankMismatchError) as failed:
        disk_engine(path, optimizer="disk", host_budget=context.rank)
    return str(failed.value)


def test_ranks_with_other_tiers_are_told(cluster: Clusters, tmp_path: Path) -> None:
    for told in cluster(2).run(other_tiers_body, path=str(tmp_path)):
        assert "disagree about Config(offload=...)" in told


class Breaks:
    """Where rank 1's disk breaks in a step: what is called in it, and which call fails."""

    def __init__(self, tiers: dict[str, str], where: str, call: str, after: int, healed: bool) -> None:
        self.tiers, self.where, self.call, self.after = tiers, where, call, after
        self.healed = healed  # without a checkpoint: weights have not been touched


BREAKS = {
    "record read": Breaks({"optimizer": "disk"}, "step", "preadv", 1, healed=False),
    "record written": Breaks({"optimizer": "disk"}, "step", "pwritev", 1, healed=False),
    "weights written": Breaks({"params": "disk"}, "step", "pwritev", 1, healed=False),
    "weights read forwards": Breaks({"params": "disk"}, "forward", "preadv", 1, healed=True),
    "weights read backwards": Breaks({"params": "disk"}, "backward", "preadv", 0, healed=True),
    "gradient written": Breaks({"gradients": "disk"}, "backward", "pwritev", 1, healed=True),
    "gradient read for the norm": Breaks({"gradients": "disk"}, "step", "preadv", 1, healed=True),
    "gradient read to be stepped": Breaks({"gradients": "disk"}, "step", "preadv", 5, healed=False),
}


def failing_disk_body(context: Context, path: str, name: str) -> dict[str, Any]:
    case = BREAKS[name]
    engine = disk_engine(path, **case.tiers)
    expected = [one_step(engine, step) for step in range(2)]
    engine.save_checkpoint(Path(path, "sound"))
    expected += [one_step(engine, step) for step in (2, 3)]
    engine.load_checkpoint(Path(path, "sound"))
    engine._boundary.stores.read_ahead.limit = 1  # else all has been read before the backward begins
    told = broken_step(engine, case)
    engine.zero_grad()  # a step that has not begun may be repeated instead
    if not case.healed:
        with pytest.raises(zero.UsageError, match="interrupted"):
            one_step(engine, 2)
        engine.load_checkpoint(Path(path, "sound"))
    again = [one_step(engine, step) for step in (2, 3)]
    return {"told": told, "same": again == expected[2:]}


def broken_step(engine: zero.Engine, case: Breaks) -> str:
    """What is said where rank 1's disk breaks."""
    x = torch.ones(BATCH, WIDTH, device=engine.accelerator.device)
    calls: dict[str, Callable[[Any], Any]] = {
        "forward": lambda _: engine(x).float().square().mean(),
        "backward": engine.backward,
        "step": lambda _: engine.step(),
    }
    result = None
    for where, call in calls.items():
        if where == case.where:
            disk = broken(case.call, errno.EIO, case.after, mine=engine.rank == 1)
            with disk, pytest.raises(zero.OffloadError) as failed:
                call(result)
            return str(failed.value)
        result = call(result)
    return ""


@pytest.mark.parametrize("name", list(BREAKS))
def test_a_disk_that_fails_on_one_rank_is_told_to_all(cluster: Clusters, tmp_path: Path, name: str) -> None:
    """At once, with the rank that it is; training goes on, from a checkpoint where weights have changed."""
    for found in cluster(2).run(failing_disk_body, path=str(tmp_path), name=name, limit=60):
        assert re.match("rank 1: .* bytes of state could not be .*: Input/output error", found["told"])
        assert found["same"]


def whole_values(engine: zero.Engine) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Each way to whole values: the call of the disk that is to fail, and what calls it."""
    weight = engine.module[1].weight

    def read() -> None:
        with zero.gathered(weight):
            raise AssertionError("values that could not be read")

    def write() -> None:
        with zero.gathered(weight, write_rank=0), torch.no_grad():
            weight.fill_(0.5)

    state = engine.state_dict()
    return {
        "gathered": ("preadv", read),
        "state_dict": ("preadv", lambda: engine.state_dict(master=True)),
        "full_master": ("preadv", lambda: engine.full_master("1.weight")),
        "full_optimizer_state": ("preadv", lambda: engine.full_optimizer_state("1.weight")),
        "gathered, written": ("pwritev", write),
        "load_state_dict": ("pwritev", lambda: engine.load_state_dict(state)),
    }


def whole_values_body(context: Context, path: str) -> dict[str, tuple[str, bool]]:
    """What is said of each, and whether the engine goes on."""
    engine = disk_engine(path)
    losses = [one_step(engine, step) for step in range(3)]
    engine.load_checkpoint(saved(engine, Path(path, "sound")))
    found = {}
    for name, (call, run) in whole_values(engine).items():
        engine._boundary.stores.read_ahead.clear()
        with broken(call, errno.EIO, mine=context.rank == 1), pytest.raises(zero.OffloadError) as failed:
            run()
        changed = "writ" in name or "load" in name
        if changed:
            with pytest.raises(zero.UsageError, match="interrupted"):
                one_step(engine, 3)
            engine.load_checkpoint(Path(path, "sound"))
        found[name] = str(failed.value), one_step(engine, 3) != losses[0]
        engine.load_checkpoint(Path(path, "sound"))
    return found


def saved(engine: zero.Engine, path: Path) -> Path:
    engine.save_checkpoint(path)
    return path


def test_whole_values_that_one_rank_cannot_move_are_told_to_all(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(whole_values_body, path=str(tmp_path), limit=60):
        for name, (told, goes_on) in found.items():
            assert re.match("rank 1: .* bytes of state could not be .* the disk of", told), name
            assert goes_on, name


def compiled_body(context: Context, path: str) -> list[str]:
    """Rank 1 cannot read parameters in a forward, then in a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    config = zero.Config(
        timeout=20, compile=zero.Compile(inner="aot_eager"), offload=zero.Offload(params="disk", path=path)
    )
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), config)
    one_step(engine, 0)
    assert engine.explain().mode == "graph"
    x, told = torch.ones(BATCH, WIDTH, device=engine.accelerator.device), []
    for loss in (None, engine(x).square().mean()):
        engine._boundary.stores.read_ahead.clear()
        disk = broken("preadv", errno.EIO, mine=context.rank == 1)
        with disk, pytest.raises(zero.OffloadError) as failed:
            engine(x) if loss is None else engine.backward(loss)
        told.append(str(failed.value))
        engine.zero_grad()
    one_step(engine, 1)
    return told


def test_a_disk_that_fails_in_compiled_models_is_told_to_all(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(compiled_body, path=str(tmp_path), limit=120):
        assert all(re.match("rank 1: .* bytes of state could not be read", told) for told in found), found
