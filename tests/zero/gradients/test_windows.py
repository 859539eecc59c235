"""Sums over any number of backwards: the plain loop's bits are those of a loop whose engine counts."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.disks import broken
from tests.zero.helpers.kept import different, kept_gradients
from tests.zero.helpers.models import features, tokens
from tests.zero.helpers.training import adamw
from tests.zero.helpers.windows import Bits, Late, Recomputed, Sometimes, trained


def loops_body(context: Context, every: Sequence[dict[str, Any]], windows: tuple[int, ...]) -> list[str]:
    """What differs from the counting loop, by setting. Of two steps of several micro-batches, one waits in
    `no_sync`: the first, before the order of units is known, or the second."""
    found = []
    for turn, settings in enumerate(every):
        with tempfile.TemporaryDirectory() as path:
            given = dict(settings)
            if "disk" in given.get("offload", {}).values():
                given["offload"] = {**given["offload"], "path": path}
            for window in windows:
                loops = ("plain", "no_sync" if window > 1 else "plain")[:: 1 if turn % 2 else -1]
                counted = trained(context, ("counted", "counted"), window, **given)
                names = different(counted, trained(context, loops, window, **given))
                found += [f"{settings}, {loops}, {window}: {names[:2]}"] if names else []
    return found


LOCAL: dict[str, Any] = {"accumulate": "local"}
BF16: dict[str, Any] = {"precision": "bf16"}
AWAY: dict[str, Any] = {"optimizer": "host", "gradients": "host"}
DISK: dict[str, Any] = {"optimizer": "disk", "gradients": "disk"}
STAGES: list[dict[str, Any]] = [
    {"stage": stage, "accumulate": accumulate, "precision": precision}
    | ({"loss_scale": 64.0} if precision == "fp16" else {})
    for stage, accumulate, precision in product((0, 1, 2, 3), ("sharded", "local"), ("fp32", "bf16", "fp16"))
    if (stage != 1 or accumulate == "local") and (precision != "fp16" or stage != 1)
]
FEW: list[dict[str, Any]] = [
    {**BF16},
    {**BF16, **LOCAL, "clip_norm": 0.1},
    {"stage": 0, **BF16, **LOCAL},
    {"stage": 1, **BF16},
    {"stage": 2, "offload": AWAY},
    {"stage": 1, **BF16, "offload": AWAY},
    {"stage": 0, **BF16, **LOCAL, "offload": AWAY},
    {**BF16, "offload": DISK},
    {**BF16, **LOCAL, "offload": DISK},
    {"reduce_dtype": "bf16"},
    {**LOCAL, "reduce_dtype": "bf16"},
    {"stage": 0, **LOCAL, "reduce_dtype": "bf16"},
    {**BF16, **LOCAL, "reduce_dtype": "fp32"},
    {"precision": "fp16", **LOCAL, "reduce_dtype": "bf16", "loss_scale": 64.0},
]
IN_PARTS: list[dict[str, Any]] = [
    {"kind": Recomputed, **BF16, **more}
    for more in ({}, LOCAL, {"stage": 1}, {"stage": 0, **LOCAL}, {**LOCAL, "reduce_dtype": "fp32"})
]
LATE: list[dict[str, Any]] = [
    {"kind": Late, "stage": 2},
    {"kind": Late, "stage": 2, **BF16},
    {"kind": Late, "stage": 2, "offload": AWAY},
    {"kind": Late, "stage": 0, **BF16},
    {"kind": Late, "stage": 2, "offload": DISK},
]
COPIES: list[dict[str, Any]] = [
    {**BF16, "shard_ranks": 2},
    {**BF16, **LOCAL, "shard_ranks": 2},
    {"stage": 1, "shard_ranks": 2},
    {"stage": 2, "shard_ranks": 2, "offload": AWAY},
    {**BF16, **LOCAL, "shard_ranks": 2, "offload": AWAY},
    {"reduce_dtype": "bf16", "shard_ranks": 2},
]


EITHER = (1, 3)
"""Windows: a step of one backward, and one with a first, a middle and a last."""
RUNS: dict[str, tuple[int, list[dict[str, Any]], list[int], tuple[int, ...]]] = {
    # ranks, settings, those of them that another device than the host has too, windows
    "one rank": (1, [FEW[i] for i in (1, 4, 8, 10, 13)], [0, 2], EITHER),
    "stages": (2, STAGES, [], EITHER),
    "two ranks": (2, FEW, [1, 3, 5, 6, 8, 10, 13], EITHER),
    "three ranks": (3, FEW[:5], [], (3,)),
    "in parts": (2, IN_PARTS, [0, 4], (3,)),
    "late": (2, LATE, [1, 2], (3,)),
    "late in copies": (4, [{**LATE[1], "shard_ranks": 2}, {**LATE[2], "shard_ranks": 2}], [0], (3,)),
    "copies": (4, COPIES, [1, 3, 5], (3,)),
    "copies, one backward": (4, COPIES[1:4], [], (1,)),
}


def _of(name: str) -> Any:
    size, settings, on_devices, _ = RUNS[name]
    marks = [pytest.mark.slow] * (size * len(settings) > 15) + [pytest.mark.host] * (not on_devices)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_of(name) for name in RUNS])
def test_both_loops_have_the_same_bits(cluster: Clusters, device: str, name: str) -> None:
    size, every, on_devices, windows = RUNS[name]
    every = every if device == "cpu" else [every[index] for index in on_devices]
    for found in cluster(size).run(loops_body, every=every, windows=windows, limit=200):
        assert not found, "\n".join(found)


def passes_body(context: Context) -> list[dict[str, int]]:
    """Collectives of a step whose parameters get all gradients in backwards inside the backward."""
    found = []
    for count in (1, None):
        model = Recomputed()
        config = zero.Config(timeout=20, gradient_accumulation_steps=count)
        engine = zero.initialize(model, adamw(model), config)
        for number in range(2):
            engine.traffic.clear()
            x = features(number, context.rank, model)
            loss = model(tokens(number, context.rank, model), x, number)
            engine.backward(loss) if count else loss.backward()
            engine.step()
        found.append(dict(engine.traffic.calls))
    return found


def test_a_backward_with_others_inside_is_one(cluster: Clusters) -> None:
    counted, plain = cluster(2).run(passes_body)[0]
    assert plain == counted


def changed_body(context: Context, every: list[dict[str, Any]]) -> float:
    """What differs at most from an unsharded model's gradients, halved after each backward of three."""
    plain, found = Sometimes(), 0.0
    for number in range(3):
        for rank in range(context.size):
            batch = tokens(number, rank, plain), features(number, rank, plain), number + rank
            (plain(*batch) / context.size).backward()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for settings in every:
        model = Sometimes()
        config = zero.Config(timeout=20, gradient_accumulation_steps=None, **settings)
        engine = zero.initialize(model, adamw(model), config)
        for number in range(3):
            batch = tokens(number, context.rank, model), features(number, context.rank, model)
            model(*batch, number + context.rank).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        for name, parameter in model.named_parameters():
            value, other = parameter.grad, expected[name]
            assert (value is None) is (other is None), name
            if other is not None and other.numel():
                found = max(found, float((value.clone().cpu() - other).abs().max()))
        assert engine.step()
    return found


@pytest.mark.parametrize(
    ("size", "every"),
    [(1, [{}]), (2, [{"stage": 1}, {"stage": 0, **LOCAL}, {**LOCAL, "offload": AWAY}, {}]), (4, COPIES[2:4])],
)
def test_backwards_add_to_gradients_that_were_changed(
    cluster: Clusters, size: int, every: list[dict[str, Any]]
) -> None:
    assert max(cluster(size).run(changed_body, every=every)) < 1e-6


def broken_disk_body(context: Context, path: str) -> list[str]:
    """What is told where rank 1 cannot read what is kept for another backward, and where that one cannot
    write it."""
    model, told = Late(), []
    offload = zero.Offload(gradients="disk", path=path)
    config = zero.Config(stage=2, timeout=20, gradient_accumulation_steps=None, offload=offload)
    engine = zero.initialize(model, adamw(model), config)

    def backward(number: int) -> Bits:
        model(None, features(number, context.rank, model), number).backward()
        return kept_gradients(engine)

    expected = backward(1)
    for call in ("preadv", "pwritev"):
        if call == "preadv":
            engine.zero_grad()
        mine = context.rank == 1
        with broken(call, errno.EIO, mine=mine), pytest.raises(zero.OffloadError) as failed:
            backward(1)
        told.append(str(failed.value))
        engine.zero_grad()
        assert not different(expected, backward(1))
    return told


def test_gradients_that_one_rank_cannot_keep_on_disk_are_told_to_all(
    cluster: Clusters, tmp_path: Path
) -> None:
    for read, written in cluster(2).run(broken_disk_body, path=str(tmp_path), limit=60):
        assert re.match("rank 1: .* bytes of state could not be read from the disk", read)
        assert re.match("rank 1: .* bytes of state could not be written to the disk", written)


def bytes_body(context: Context, count: int | None) -> tuple[dict[str, int], int]:
    """What a step of one backward sends, and the bytes that its gradients take before it."""
    model = Sometimes()
    config = zero.Config(stage=1, precision="bf16", timeout=20, gradient_accumulation_steps=count)
    engine = zero.initialize(model, adamw(model), config)
    for step in range(2):
        engine.traffic.clear()
        loss = model(tokens(step, context.rank, model), features(step, context.rank, model), 1)
        loss.backward() if count is None else engine.backward(loss)
        held = sum(each.slice_bytes for each in engine._reducer.all)
        engine.step()
    return dict(engine.traffic.bytes), held


def test_one_backward_sends_and_keeps_what_it_computes_in(cluster: Clusters) -> None:
    counted, plain = (cluster(2).run(bytes_body, count=count) for count in (1, None))
    assert plain == counted
