"""Failures: ranks that die or diverge, exceptions in the middle of a step, calls in the wrong order."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.models import LanguageModel, Stack, features, tokens
from tests.zero.helpers.own_bytes import bytes_of_its_own
from tests.zero.helpers.paths import STRAIGHT, decaying, fresh, straight
from tests.zero.helpers.told import Heard
from tests.zero.helpers.training import adamw, same_bits, train_zero

Ranks = Callable[[int], Cluster]
TIMEOUT = 4.0  # seconds; a busy machine needs one or two to form the groups


def dying_body(context: Context, when: str, shard_ranks: int | None = None) -> tuple[str, str, float]:
    model = fresh()
    config = zero.Config(timeout=TIMEOUT, shard_ranks=shard_ranks)
    engine = zero.initialize(model, decaying(model), config)
    engine.backward(straight(model, 0, context.rank))
    engine.step()
    if context.rank == 1 and when == "forward":
        model.blocks[2].register_forward_pre_hook(lambda *_: os._exit(7))
    if context.rank == (1 if shard_ranks is None else 2) and when == "backward":
        model.blocks[1].register_full_backward_pre_hook(lambda *_: os._exit(7))
    if context.rank == 1 and when == "asleep":
        context.group.store.wait(["noticed/0", "noticed/2"], timedelta(seconds=4 * TIMEOUT))
        return "", "", 0.0
    start = time.monotonic()
    try:
        engine.backward(straight(model, 1, context.rank))
        engine.step()
    except zero.CommunicationError as error:
        seconds = time.monotonic() - start
        context.group.store.set(f"noticed/{context.rank}", "")
        return type(error).__name__, str(error), seconds
    return "", "", 0.0


@pytest.mark.parametrize("when", ["forward", "backward", "asleep"])
def test_a_dead_or_silent_rank_is_named(disposable: Ranks, when: str) -> None:
    """It is named within the timeout (and the exchange of reports), with the unit that was waited for."""
    outcomes = disposable(3).outcomes(dying_body, limit=40, when=when)
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.status == "returned", survivor
        kind, message, seconds = survivor.value
        assert kind == "CommunicationError"
        assert re.search(r"rank\(s\) .*\b1\b.* did not answer", message), message
        assert re.search("(all_gather|reduce_scatter) of unit '(<root>|blocks.[0-3])'", message), message
        assert seconds < 4 * TIMEOUT


def test_a_dead_rank_of_another_copy_is_named(disposable: Ranks) -> None:
    """Ranks 2 and 3 share a copy of the model, so errors in their group count its ranks from 0."""
    outcomes = disposable(4).outcomes(dying_body, limit=40, when="backward", shard_ranks=2)
    for rank in (0, 1, 3):
        assert outcomes[rank].status == "returned", outcomes[rank]
        kind, message, seconds = outcomes[rank].value
        assert kind == "CommunicationError"
        assert re.search(r"rank\(s\) .*\b2\b.* did not answer", message), message
        assert seconds < 4 * TIMEOUT
    assert "(ranks 0 to 1 of this group are ranks 2, 3 of the job)" in outcomes[3].value[1]


def diverging_body(context: Context, path: tuple[int, ...]) -> tuple[str, str, float]:
    model = fresh(None)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    mine = path if context.rank == 1 else STRAIGHT
    start = time.monotonic()
    try:
        engine.backward(model(features(0, context.rank, model), mine).loss)
        engine.step()
    except zero.ZeroError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.parametrize("path", [(0, 2, 1, 3), (0, 1, 3), (3,)])
def test_ranks_that_gather_other_units_are_told_so(disposable: Ranks, path: tuple[int, ...]) -> None:
    """Blocks of equal size would silently exchange wrong values; this is caught before any step."""
    for kind, message, seconds in disposable(2).run(diverging_body, limit=40, path=path):
        assert kind == "RankMismatchError", (kind, message)
        assert re.search("(number|call) [0-9]", message), message
        assert "blocks." in message
        assert "on rank 0" in message
        assert "on rank 1" in message
        assert seconds < 4 * TIMEOUT


def unequal_body(context: Context) -> list[str]:
    """Models, settings and optimizers that differ; nothing of any model may have been touched."""
    rank, found = context.rank, []

    def refused(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(zero.RankMismatchError) as caught:
            zero.initialize(model, optimizer, zero.Config(**{"timeout": TIMEOUT, **settings}))
        assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
        found.append(str(caught.value))

    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank))
    refused(wider, decaying(wider))
    deeper = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))
    refused(deeper, decaying(deeper))
    same = nn.Sequential(nn.Linear(4, 4))
    refused(same, decaying(same), prefetch=1 + rank)
    refused(same, decaying(same), compile=zero.Compile(inner="aot_eager", prefetch_budget=1000 * rank))
    refused(same, (torch.optim.SGD if rank else torch.optim.AdamW)(same.parameters(), lr=0.1))
    refused(same, decaying(same), timeout=TIMEOUT + rank)
    return found


def test_ranks_that_disagree_are_told_where(cluster: Clusters) -> None:
    for wider, deeper, setting, compiling, optimizer, timeout in cluster(2).run(unequal_body, limit=60):
        assert "1.weight (4, 4) torch.float32" in wider
        assert "1.weight (5, 4) torch.float32" in wider
        assert re.search(r"2\.weight .* on rank 1, which rank 0 does not have$", deeper)
        assert "Config(prefetch=...), which" in setting
        assert "1 on rank 0 and 2 on rank 1" in setting
        assert '"prefetch_budget":1000' in compiling
        assert "AdamW" in optimizer
        assert timeout.startswith("Config(timeout=...) must be the same on all ranks; it is ")


def long_wait_body(context: Context, path: tuple[int, ...]) -> tuple[list[str], str, float]:
    """Rank 1 takes another path, or comes late."""
    heard, model, error = Heard(), fresh(None), ""
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=2 * TIMEOUT))
    mine = path if context.rank == 1 else STRAIGHT
    if context.rank == 1 and path == STRAIGHT:
        time.sleep(1.3 * TIMEOUT)
    start = time.monotonic()
    try:
        engine.backward(model(features(0, context.rank, model), mine).loss)
        engine.step()
    except zero.ZeroError as raised:
        error = str(raised)
    return heard.texts, error, time.monotonic() - start


def test_a_long_wait_of_ranks_that_differ_is_explained_before_it_fails(disposable: Ranks) -> None:
    for texts, error, seconds in disposable(2).run(long_wait_body, limit=40, path=(3,)):
        assert "ranks issued different collectives" in error
        found = [text for text in texts if "ranks issued different collectives: number" in text]
        assert len(found) == 1 or seconds < TIMEOUT / 2, texts  # shared memory notices at once


def test_a_long_wait_for_a_rank_is_logged_once(disposable: Ranks) -> None:
    (first, error, _), (second, _, _) = disposable(2).run(long_wait_body, limit=40, path=STRAIGHT)
    assert error == ""
    assert len(first) == 1, first
    assert "rank 0 has waited" in first[0]
    assert "rank(s) 1 are not there yet" in first[0]
    assert second == []


def uneven_batches_body(context: Context, path: str) -> tuple[list[str], str]:
    """Rank 1 is out of batches first."""
    heard, model = Heard(), fresh(None)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    if context.rank == 0:
        with pytest.raises(zero.CommunicationError) as caught:
            engine.backward(straight(model, 0, 0))
        context.group.store.set("failed", "")
    else:
        with pytest.raises(zero.CommunicationError) as caught:
            engine.save_checkpoint(path)
        context.group.store.wait(["failed"], timedelta(seconds=4 * TIMEOUT))
    return heard.texts, str(caught.value)


def test_a_rank_that_waits_in_a_save_is_told_to_those_that_train(disposable: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    (training, failed), (saving, missed) = disposable(2).run(uneven_batches_body, limit=40, path=path)
    place = f"wait in save_checkpoint('{path}')"
    assert f"rank(s) 1 {place}: every rank must make the same calls" in failed
    assert "from rank(s) 0: rank(s) 0 wait in collective" in missed
    assert "all_gather of unit" in missed
    assert "every rank must call save_checkpoint" in missed
    assert len(training) == len(saving) == 1, (training, saving)
    assert f"rank(s) 1 {place}. It will fail after {TIMEOUT:.0f} s" in training[0]
    assert f"s in save_checkpoint('{path}'): rank(s) 0 wait in collective" in saving[0]


def other_writer_body(context: Context) -> tuple[str, float]:
    model = fresh(None)
    zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    start = time.monotonic()
    try:
        with zero.gathered(model.blocks[0].up.weight, write_rank=context.rank), torch.no_grad():
            model.blocks[0].up.weight.zero_()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def test_ranks_that_all_want_to_write(disposable: Ranks) -> None:
    """`write_rank=rank` is passed instead of a number that all ranks agree on."""
    for message, seconds in disposable(2).run(other_writer_body, limit=40):
        assert message.startswith("RankMismatchError"), message
        assert "from rank 0 on rank 0" in message
        assert "from rank 1 on rank 1" in message
        assert seconds < 4 * TIMEOUT


def other_model_body(context: Context) -> str:
    torch.manual_seed(0)
    model = Stack(layers=4 + context.rank)
    try:
        zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    except zero.RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_with_different_models(disposable: Ranks) -> None:
    for message in disposable(2).run(other_model_body, limit=40):
        assert "disagree about the model" in message


def other_settings_body(context: Context) -> list[str]:
    told, ours = [], {"timeout": TIMEOUT, "offload": zero.Offload(optimizer="host")}
    for name, mine, others in (("clip_norm", 1.0, None), ("prefetch", 0, 2), ("loss_scale", 2.0, 4.0)):
        model = Stack(layers=2)
        config = zero.Config(**ours, **{name: others if context.rank else mine})
        with pytest.raises(zero.RankMismatchError) as caught:
            zero.initialize(model, decaying(model), config)
        told.append(str(caught.value))
    return told


def test_ranks_with_different_settings(cluster: Clusters) -> None:
    """Some differences would let ranks wait for collectives that never come, others be silently wrong."""
    for told in cluster(2).run(other_settings_body):
        for name, message in zip(("clip_norm", "prefetch", "loss_scale"), told, strict=True):
            assert f"disagree about Config({name}=...), which must be the same" in message


def other_rates_body(context: Context) -> tuple[str, bool, bool]:
    """A scheduler that follows each rank's own loss."""
    model = fresh(None)
    optimizer = decaying(model)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=TIMEOUT))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    before = engine.full_master("blocks.0.up.weight").flatten().tolist()
    for loss in (1.0, 2.0 if context.rank else 0.5):
        scheduler.step(loss)
    with pytest.raises(zero.RankMismatchError) as caught:
        engine.backward(model(features(0, context.rank, model), STRAIGHT).loss)
    unchanged = engine.full_master("blocks.0.up.weight").flatten().tolist() == before
    optimizer.param_groups[0]["lr"] = 1e-3
    engine.backward(model(features(0, context.rank, model), STRAIGHT).loss)
    return str(caught.value), unchanged, engine.step()


def test_ranks_with_different_learning_rates(cluster: Clusters) -> None:
    """Each slice of the model would be stepped with its rank's rate. With equal rates, training continues."""
    for message, unchanged, stepped in cluster(2).run(other_rates_body):
        assert "param_groups[0]['lr'] is 0.01 on rank 0 and 0.001 on rank 1" in message
        assert "ReduceLROnPlateau" in message
        assert unchanged
        assert stepped


class ManyBetas(torch.optim.SGD):
    """An optimizer with an array of numbers in a group."""

    def __init__(self, model: nn.Module, betas: Tensor) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0]["betas"] = betas


def arrays_body(context: Context) -> tuple[bool, str]:
    model = fresh(None)
    optimizer = ManyBetas(model, torch.tensor([0.9, 0.5]))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=TIMEOUT, whole_parameters=True))
    engine.backward(straight(model, 0, context.rank))
    stepped = engine.step()
    optimizer.param_groups[0]["betas"][1] += 0.25 * context.rank
    with pytest.raises(zero.RankMismatchError) as caught:
        engine.backward(straight(model, 0, context.rank))
    return stepped, str(caught.value)


def test_ranks_with_different_arrays_of_numbers(cluster: Clusters) -> None:
    for stepped, message in cluster(2).run(arrays_body):
        assert stepped
        assert "param_groups[0]['betas'] is" in message
        assert "0.5] on rank 0" in message
        assert "0.75] on rank 1" in message


class Trap(RuntimeError):
    pass


def trap(*_: Any) -> None:
    raise Trap("stop here")


def exception_body(context: Context, shard_ranks: int | None) -> dict[str, Any]:
    """Exceptions in forward and backward, on all ranks, then six steps as if nothing had happened."""
    config = zero.Config(timeout=10, shard_ranks=shard_ranks)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=6)
    result: dict[str, Any] = {}
    for where in ("forward", "backward", "own hook", "checkpointed forward", "gradient"):
        model = fresh()
        early = _set_trap(model, where) if where == "gradient" else None  # runs before the engine's hooks
        engine = zero.initialize(model, decaying(model), config)
        handle = early or _set_trap(model, where)
        recompute = "non-reentrant" if where.startswith("checkpointed") else ""
        try:
            loss = model(features(77, context.rank, model), STRAIGHT, recompute=recompute).loss
            engine.backward(loss)
            result[where] = "no exception"
        except Trap:
            result[where] = "trapped"
        handle.remove()
        idle = all(u.idle and not u.in_use for u in engine.units)
        losses = []
        for step in range(6):
            loss = straight(model, step, context.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        result[where] = (result[where], idle, losses == expected.losses)
    return result


def _set_trap(model: Stack, where: str) -> Any:
    if where == "backward":
        return model.blocks[1].down.register_full_backward_hook(trap)
    if where == "own hook":
        return model.blocks[2].register_forward_pre_hook(trap, prepend=True)
    if where == "gradient":
        return model.blocks[2].up.weight.register_post_accumulate_grad_hook(trap)
    return model.blocks[2].up.register_forward_hook(trap)


@pytest.mark.parametrize(("size", "shard_ranks"), [(1, None), (2, None), (4, 2)])
def test_an_exception_leaves_the_engine_usable(cluster: Clusters, size: int, shard_ranks: int | None) -> None:
    for found in cluster(size).run(exception_body, shard_ranks=shard_ranks):
        for where, (outcome, idle, same) in found.items():
            assert outcome == "trapped", where
            assert idle, where
            assert same, where


def accumulating_exception_body(context: Context, shard_ranks: int | None) -> bool:
    """An exception drops the whole accumulation window, of which nothing reaches the next step."""
    config = zero.Config(gradient_accumulation_steps=2, timeout=10, shard_ranks=shard_ranks)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)
    model = fresh()
    engine = zero.initialize(model, decaying(model), config)
    engine.backward(straight(model, 50, context.rank))
    handle = _set_trap(model, "backward")
    with pytest.raises(Trap):
        engine.backward(straight(model, 51, context.rank))
    handle.remove()
    with pytest.raises(zero.UsageError, match="without backward"):
        engine.step()
    losses = []
    for step in range(4):
        loss = straight(model, step, context.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses == expected.losses


@pytest.mark.parametrize(("size", "shard_ranks"), [(2, None), (4, 2)])
def test_an_exception_drops_the_accumulation_window(
    cluster: Clusters, size: int, shard_ranks: int | None
) -> None:
    assert all(cluster(size).run(accumulating_exception_body, shard_ranks=shard_ranks))


def one_rank_raises_body(context: Context) -> str:
    """Only rank 1 raises; the others get an error that names it, within the timeout."""
    model = fresh()
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=TIMEOUT))
    if context.rank == 1:
        _set_trap(model, "backward")
    try:
        engine.backward(straight(model, 0, context.rank))
    except (Trap, zero.CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_one_rank_raises(disposable: Ranks) -> None:
    first, second = disposable(2).run(one_rank_raises_body, limit=40)
    assert second.startswith("Trap")
    assert first.startswith("CommunicationError")
    assert "did not answer" in first
    assert "1" in first


def usage_body(context: Context) -> dict[str, str]:
    """Calls that make no sense; the engine works after each."""
    model = LanguageModel()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    batch = tokens(0, context.rank, model)
    messages = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            messages[name] = "nothing raised"
        except zero.UsageError as error:
            messages[name] = str(error)

    attempt("call engine.step() first", engine.step)
    attempt("not a tensor", lambda: engine.backward(3.0))  # type: ignore[arg-type]
    attempt("not a scalar", lambda: engine.backward(model(batch)["logits"]))
    attempt("no gradient", lambda: engine.backward(torch.zeros(())))
    attempt("plain backward", model(batch)["loss"].backward)
    engine.backward(model(batch)["loss"])
    attempt("backward twice", lambda: engine.backward(model(batch)["loss"]))
    engine.step()
    attempt("step twice", engine.step)
    attempt("optimizer.step", engine.optimizer.step)
    engine.backward(model(batch)["loss"])
    messages["still works"] = str(engine.step())
    return messages


@pytest.mark.parametrize("size", [1, 2])
def test_calls_in_the_wrong_order(cluster: Clusters, size: int) -> None:
    for found in cluster(size).run(usage_body):
        assert "call engine.backward(loss) first" in found["call engine.step() first"]
        assert "got float" in found["not a tensor"]
        assert "one element" in found["not a scalar"]
        assert "does not depend on any parameter" in found["no gradient"]
        assert "call engine.backward(loss) instead" in found["plain backward"]
        assert "call engine.step() first" in found["backward twice"]
        assert "call engine.backward(loss) first" in found["step twice"]
        assert "call engine.step() instead" in found["optimizer.step"]
        assert found["still works"] == "True"


def reading_body(context: Context) -> dict[str, str]:
    """Everything that a user may try with a sharded parameter."""
    import copy
    import pickle

    model = LanguageModel()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    weight = model.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter)
    attempts: dict[str, Any] = {
        "arithmetic": lambda: weight + 1,
        "reverse": lambda: torch.ones(1) * weight,
        "matmul": lambda: torch.ones(1, weight.shape[0]) @ weight,
        "index": lambda: weight[0],
        "item": lambda: weight.sum().item(),
        "data": lambda: weight.data,
        "assign data": lambda: setattr(weight, "data", torch.zeros(3)),
        "detach": weight.detach,
        "numpy": weight.numpy,
        "tolist": weight.tolist,
        "float": weight.float,
        "to": lambda: weight.to(torch.float64),
        "cpu": weight.cpu,
        "in place": weight.zero_,
        "norm": lambda: torch.linalg.vector_norm(weight),
        "functional": lambda: nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
        "stack": lambda: torch.stack([weight, weight]),
        "print data": lambda: f"{weight:.3f}",
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(weight),
        "state_dict": model.state_dict,
        "half": model.half,
        "forward": lambda: model.blocks[0].up.forward(torch.zeros(1, 12)),
        "equal": lambda: torch.equal(weight, weight),
        "iterate": lambda: list(weight),
        "data pointer": weight.data_ptr,
    }
    result = {}
    for name, call in attempts.items():
        try:
            call()
            result[name] = "nothing raised"
        except zero.ShardedParameterError as error:
            result[name] = str(error)
    metadata = (
        tuple(weight.shape), weight.dtype, weight.device.type, weight.numel(), weight.dim(), weight.size(0),
        weight.requires_grad, weight.is_leaf, weight.grad, weight.is_contiguous(), weight.element_size(),
        len(weight), weight.stride(), isinstance(weight, nn.Parameter), weight in {weight},
    )  # fmt: skip
    result["metadata"] = str(metadata)
    result["repr"] = repr(weight)
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    engine.backward(model(tokens(0, context.rank, model))["loss"])
    result["still works"] = str(engine.step())
    return result


def test_reading_a_sharded_parameter(cluster: Clusters, device: str) -> None:
    for found in cluster(2).run(reading_body):
        metadata = found.pop("metadata")
        assert metadata == (
            f"((29, 12), torch.float32, '{device}', 348, 2, 29, True, True, None, True, 4, 29, (12, 1), "
            "True, True)"
        )
        assert found.pop("repr") == (
            "ShardedParameter('blocks.0.up.weight', shape=(29, 12), dtype=torch.float32)"
        )
        assert found.pop("still works") == "True"
        for name, message in found.items():
            assert "zero.gathered" in message, (name, message)
            if name not in ("deepcopy", "state_dict", "half"):
                assert "'blocks.0.up.weight'" in message, (name, message)


def same_bits_after_evaluation_body(context: Context) -> bool:
    """Evaluation in eval mode, under no_grad, changes nothing of training."""
    config = zero.Config(timeout=10)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)

    def with_evaluation(model: nn.Module, step: int, rank: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(features(step + 9, rank, model), STRAIGHT)
        model.train()
        return straight(model, step, rank)

    return same_bits(train_zero(context, fresh(), with_evaluation, config, decaying, steps=4), expected)


def without_grad_mode_body(context: Context) -> bool:
    """Backward and step under no_grad, for losses that were computed outside of it."""
    config = zero.Config(gradient_accumulation_steps=2, timeout=10)
    expected = train_zero(context, fresh(), straight, config, decaying, steps=4)
    model, losses = fresh(), []
    engine = zero.initialize(model, decaying(model), config)
    for step in range(4):
        loss = straight(model, step, context.rank)
        with torch.no_grad():
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses == expected.losses


def test_backward_does_not_need_grad_mode(cluster: Clusters) -> None:
    assert all(cluster(2).run(without_grad_mode_body))


def nothing_trained_body(context: Context) -> list[str]:
    """The errors if the loss does not depend on any parameter of the engine."""
    model = nn.Sequential(nn.Linear(4, 4))
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    x = torch.ones(2, 4, device=engine.accelerator.device)
    said = []
    for freeze in (False, True):
        if freeze:
            model.requires_grad_(False)
            x.requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(x).square().mean())
            engine.step()
        said.append(
            "; ".join(str(w.message) for w in caught if "this step changes nothing" in str(w.message))
        )
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_trains_nothing_is_told(cluster: Clusters, size: int) -> None:
    for rank, (before, after) in enumerate(cluster(size).run(nothing_trained_body)):
        assert before == ""
        assert ("are all of them frozen now" in after) == (rank == 0)


def test_evaluation_changes_nothing(cluster: Clusters) -> None:
    assert all(cluster(2).run(same_bits_after_evaluation_body))


class Reordered(nn.Module):
    """Equal blocks, called in an order of its own on each rank."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def evaluated_order_body(context: Context) -> str:
    """Whole values come of gathers in one order; in another, each rank would compute with others' weights."""
    with bytes_of_its_own(context.accelerator):
        model = Reordered([0, 1, 2])
        engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))
        x = torch.ones(2, 8, device=context.accelerator.device)
        with torch.no_grad():
            engine(x)
            model.order = [2, 1, 0] if context.rank else [0, 1, 2]
            with pytest.raises(zero.RankMismatchError) as told:
                engine(x)
    return str(told.value)


def test_an_evaluation_in_another_order_is_told(cluster: Clusters) -> None:
    for told in cluster(2).run(evaluated_order_body):
        assert "blocks.0" in told
        assert "blocks.2" in told
    cluster(2).stop()  # whose groups are of no use any more


def uneven_evaluation_body(context: Context) -> None:
    """Inside `zero.gathered` nothing is gathered, and ranks may evaluate differently often."""
    model = Reordered([0, 1, 2])
    engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))
    x = torch.ones(2, 8, device=context.accelerator.device)
    with torch.no_grad(), zero.gathered(model):
        for _ in range(1 + 2 * context.rank):
            engine(x)
    engine.backward(engine(x).sum())
    engine.step()


def test_ranks_may_evaluate_differently_often_inside_gathered(cluster: Clusters) -> None:
    cluster(2).run(uneven_evaluation_body)


def failed_gather_body(context: Context) -> list[str]:
    model = Reordered([0, 1, 2])
    engine = zero.initialize(model, adamw(model), zero.Config(units=("Linear",), timeout=TIMEOUT))

    def failing(*_: object) -> None:
        raise zero.CommunicationError("as the test wants")

    engine._communicator.all_gather = failing  # type: ignore[assignment,method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(zero.CommunicationError, match="as the test wants"):
            engine(torch.ones(2, 8, device=context.accelerator.device))
    return [str(w.message) for w in caught]


def test_a_gather_that_fails_is_the_only_error(cluster: Clusters) -> None:
    assert cluster(2).run(failed_gather_body) == [[], []]
