"""DeepSpeed's call and its loop."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel, tokens
from zero.integrations import deepspeed
from zero.integrations.deepspeed_blocks import build_optimizer, build_scheduler
from zero.integrations.deepspeed_schedules import OneCycle, WarmupLR

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 1e-2},
}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        **more,
    }


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def train(engine: zero.Engine, steps: range, rank: int, micros: int = 2) -> list[Tensor]:
    """DeepSpeed's loop; the losses of the micro-batches."""
    losses = []
    for micro in range(steps.start * micros, steps.stop * micros):
        loss = engine(tokens(micro, rank, engine.module))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().cpu())
    return losses


def loop_body(context: Context, stage: int, path: str) -> None:
    without = {
        name: value for name, value in settings(stage).items() if name not in ("optimizer", "scheduler")
    }
    config = zero.from_deepspeed(without, world_size=2)
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    by_hand = zero.initialize(plain, optimizer, config)
    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=3)  # the same in its first steps
    expected = []
    for step in range(4):
        expected += train(by_hand, range(step, step + 1), context.rank)
        scheduler.step()

    ours = model()
    engine, given, loader, rates = deepspeed.initialize(
        model=ours, model_parameters=ours.parameters(), config=settings(stage)
    )
    assert given is engine.optimizer
    assert loader is None
    assert rates is engine.lr_scheduler
    found = train(engine, range(4), context.rank)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert engine.get_lr() == scheduler.get_last_lr() == rates.get_last_lr()
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    assert sizes == (8, 2, 2)

    engine.save_checkpoint(path, {"epoch": 3})
    rest = train(engine, range(4, 6), context.rank)
    resumed, _, _, again = deepspeed.initialize(model=model(), config=settings(stage))
    assert resumed.load_checkpoint(path).state["epoch"] == 3
    assert again.get_last_lr() != rates.get_last_lr()
    assert all(map(torch.equal, train(resumed, range(4, 6), context.rank), rest))
    assert again.get_last_lr() == rates.get_last_lr()
    fresh, *_ = deepspeed.initialize(model=model(), config=settings(stage))
    with pytest.raises(TypeError, match="no tuple: load_checkpoint returns one object"):
        _, _ = fresh.load_checkpoint(path, weights_only=True)
    assert fresh.lr_scheduler.last_epoch == 0
    for call in (fresh.save_checkpoint, fresh.load_checkpoint):
        with pytest.raises(zero.UsageError, match="takes no tag 'newest': give the checkpoint's own path"):
            call(path, "newest")
        with pytest.raises(zero.UsageError, match="takes no tag="):
            call(path, tag="newest")
    with pytest.raises(zero.UsageError, match="takes no client_state=: pass it as state="):
        fresh.save_checkpoint(path, client_state={"step": 1})
    for name in ("cur_scale", "dp_world_size", "global_samples", "_zero3_consolidated_16bit_state_dict"):
        with pytest.raises(AttributeError, match=rf"{name}': engine\."):
            getattr(fresh, name)


@pytest.mark.parametrize("stage", [1, 3])
def test_its_loop_trains_as_by_hand_and_goes_on_from_a_checkpoint(
    cluster: Clusters, stage: int, tmp_path: Path
) -> None:
    cluster(2).run(loop_body, stage=stage, path=str(tmp_path / "saved"))


def one_cycle_body(context: Context) -> None:
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    more = {"scheduler": {"type": "OneCycle", "params": cycle}, "gradient_accumulation_steps": 1}
    plain, ours = model(), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycle(optimizer, **cycle)
    engine, *_ = deepspeed.initialize(model=ours, config=settings(3, **more))
    for step in range(8):
        loss = plain(tokens(step, 0, plain))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        (found,) = train(engine, range(step, step + 1), 0, micros=1)
        torch.testing.assert_close(found, loss.detach(), atol=1e-5, rtol=0)
    assert engine.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"] != (0.9, 0.95)


@pytest.mark.host
def test_kernels_follow_the_momentum_of_a_cycle(cluster: Clusters) -> None:
    cluster(1).run(one_cycle_body)


def overflow_body(context: Context) -> None:
    more = {"fp16": {"enabled": True}, "gradient_accumulation_steps": 1}
    engine, _, _, scheduler = deepspeed.initialize(model=model(), config=settings(2, **more))
    for step, factor in enumerate((1e6, 1e-3, 1e6, 1e-3)):
        engine.backward(engine(tokens(step, context.rank, engine.module))["loss"].float() * factor)
        assert engine.step()
    assert (engine.steps, engine.skipped_steps, scheduler.last_epoch) == (4, 2, 2)


def test_a_skipped_step_leaves_the_schedule_where_it_is(cluster: Clusters) -> None:
    cluster(2).run(overflow_body)


def parts_body(context: Context, path: str) -> list[list[int]]:
    net = nn.Linear(2, 2)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=Namespace(deepspeed_config=path),
        model=net,
        training_data=TensorDataset(torch.arange(10)),
        collate_fn=lambda rows: torch.stack([row[0] for row in rows]),
    )
    assert type(optimizer).__name__ == "SGD"
    assert scheduler is None
    assert loader is not None
    assert loader is engine.training_dataloader
    rows = [batch.tolist() for batch in loader]

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            yield from torch.arange(3)

    net = nn.Linear(2, 2)
    *_, stream, own = deepspeed.initialize(
        model=net,
        config=path,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        training_data=Stream(),
        model_parameters=net.parameters(),
    )
    assert stream is not None
    assert [batch.tolist() for batch in stream] == [[0, 1]]
    assert own.get_last_lr() == [0.5]
    return rows


def test_loaders_and_what_is_given_in_place_of_the_sections(cluster: Clusters, tmp_path: Path) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "dataloader_drop_last": True,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    shares = cluster(2).run(parts_body, path=str(file))
    assert [[len(batch) for batch in share] for share in shares] == [[2, 2], [2, 2]]
    assert len({row for share in shares for batch in share for row in batch}) == 8  # none is seen twice


def muon_body(context: Context) -> None:
    block = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model(), config=settings(3, optimizer=block, gradient_accumulation_steps=1)
    )
    assert optimizer is engine.optimizer
    before = engine.full_master("head.weight")
    train(engine, range(2), context.rank)
    assert not torch.equal(before, engine.full_master("head.weight"))
    assert engine.get_lr() == scheduler.get_last_lr()
    assert len(engine.get_lr()) == 2


def test_muon_and_adamw_for_the_rest(cluster: Clusters) -> None:
    cluster(2).run(muon_body)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 8)


@pytest.mark.host
@pytest.mark.parametrize(
    ("block", "kind", "expected"),
    [
        ({"type": "Adam"}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, {"weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ({"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"momentum": 0.9}),
        ({"type": "Lion"}, zero.Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ({"type": "Adagrad", "params": {"eps": 1e-9}}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-9}),
    ],
)
def test_which_optimizer_is_built(block: dict[str, Any], kind: type, expected: dict[str, Any]) -> None:
    net = Small()
    built = build_optimizer(block, net.parameters(), net)
    assert type(built) is kind
    assert isinstance(built, torch.optim.Optimizer)
    assert {name: built.param_groups[0][name] for name in expected} == expected


@pytest.mark.host
def test_muon_takes_the_hidden_matrices() -> None:
    net = Small()
    block = {
        "type": "Muon",
        "params": {"muon_lr": 0.05, "adam_lr": 1e-4, "weight_decay": 0.2, "betas": [0.9, 0.9]},
    }
    groups = [{"params": [net.embed.weight, *net.inner.parameters()]}, {"params": net.lm_head.parameters()}]
    built = build_optimizer(block, groups, net)
    assert isinstance(built, list)
    muon, adam = built
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(net.inner.weight)]
    assert [len(group["params"]) for group in adam.param_groups] == [2, 2]
    assert (muon.defaults["lr"], adam.defaults["lr"]) == (0.05, 1e-4)
    assert muon.defaults["weight_decay"] == adam.defaults["weight_decay"] == 0.2
    muon, adam = build_optimizer({"type": "Muon"}, net.parameters(), net)
    assert [muon.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [0.02, 0.95, 0]
    assert [adam.defaults[name] for name in ("lr", "betas", "eps")] == [3e-4, (0.9, 0.95), 1e-10]
    net.conv = nn.Conv1d(4, 4, 3)
    with pytest.raises(zero.ConfigError, match=r"matrices, and conv\.weight has more dimensions"):
        build_optimizer({"type": "Muon"}, net.parameters(), net)


@pytest.mark.host
@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"type": "OneBitAdam"},
            "'optimizer.type' is 'OneBitAdam': expected Adam, AdamW, Lion, Muon or a class",
        ),
        ({"type": "lr_scheduler"}, "'optimizer.type' is 'lr_scheduler'"),
        ({"type": "AdamW", "params": {"lr": "auto"}}, "'optimizer.params.lr': 'auto' is no value here"),
        (
            {"type": "AdamW", "params": {"rate": 1.0}},
            "'optimizer.params.rate': AdamW takes no such .*, but lr, ",
        ),
        (
            {"type": "AdamW", "params": {"lr": -1.0}},
            "'optimizer.params' do not fit AdamW: Invalid learning rate",
        ),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, "write 'gradient_clipping' beside 'optimizer'"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction' is false"),
        ({"params": {}}, "'optimizer' must be {'type': '...', 'params'"),
        ({"type": "Adam", "kind": 1}, "'optimizer' has 'kind': no counterpart"),
    ],
)
def test_which_optimizers_are_refused(block: dict[str, Any], said: str) -> None:
    net = Small()
    with pytest.raises(zero.ConfigError, match=said):
        build_optimizer(block, net.parameters(), net)


@pytest.mark.host
@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "Cosine"}, "'scheduler.type' is 'Cosine': expected one of WarmupLR, WarmupDecayLR"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 5}}, "engine.load_checkpoint restores it"),
        ({"type": "WarmupDecayLR"}, "'scheduler.params' do not fit WarmupDecayLR: .* 'total_num_steps'"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "'auto' is no value here"),
    ],
)
def test_which_schedulers_are_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(zero.ConfigError, match=said):
        build_scheduler(block, torch.optim.SGD(Small().parameters(), lr=0.1))


@pytest.mark.host
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"mpu": object()}, zero.UsageError, r"no mpu=: pass process_group=mpu.get_data_parallel_group\(\)"),
        ({"such_thing": 1}, zero.UsageError, "no such_thing=: unknown; remove it"),
        ({"model": None}, zero.UsageError, "needs model="),
        ({"config": None}, zero.UsageError, "one of config= and args.deepspeed_config: neither is given"),
        ({"args": Namespace(deepspeed_config="ds.json")}, zero.UsageError, "both are given"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, zero.ConfigError, "a scheduler needs an optimizer"),
        ({"training_data": [1, 2]}, zero.ConfigError, "needs 'train_micro_batch_size_per_gpu'"),
        (
            {"config": {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}},
            zero.ConfigError,
            "would fit",
        ),
    ],
)
def test_which_calls_are_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        deepspeed.initialize(**{"model": Small(), "config": {}, **given})
