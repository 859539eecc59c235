"""Bodies that train with Accelerate as its guides do, with its own Accelerator or with zero's."""

from __future__ import annotations

import os
import time
from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration
from torch.utils.data import DataLoader

from accelz.conformance.cluster import Context
from tests.frameworks.jobs import begin_job, language_model, on_host, token_rows
from zero import Config, ZeroError
from zero.integrations.accelerate import Accelerator

ALL_AT_ONCE = ("model", "optimizer", "loader", "scheduler")


def make_accelerator(stage: int | None, timeout: float = 60.0, **settings: Any) -> accelerate.Accelerator:
    """stage: None for Accelerate's own, with DistributedDataParallel. timeout: seconds, of the engine."""
    if stage is None:
        return accelerate.Accelerator(cpu=True, **settings)
    return Accelerator(cpu=True, zero_config=Config(stage=stage, timeout=timeout), **settings)


def chosen_by_accelz(stage: int | None) -> accelerate.Accelerator:
    """An accelerator that is told nothing of its device."""
    del os.environ["ACCELERATE_TORCH_DEVICE"]
    return Accelerator(zero_config=Config(stage=stage)) if stage else accelerate.Accelerator(cpu=True)


def make_parts(rows: int = 26) -> dict[str, Any]:
    """26 rows are 7 batches of 2 on each of two ranks, the last two of them filled up."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(token_rows(rows), batch_size=2, shuffle=True),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    }


def prepare(accelerator: accelerate.Accelerator, parts: dict[str, Any], calls: tuple[Any, ...]) -> None:
    """calls: names of parts, in the order of arguments, for each call of prepare; none for a method of each
    part's own."""
    if not calls:
        parts["model"] = accelerator.prepare_model(parts["model"])
        parts["optimizer"] = accelerator.prepare_optimizer(parts["optimizer"])
        parts["loader"] = accelerator.prepare_data_loader(parts["loader"])
        parts["scheduler"] = accelerator.prepare_scheduler(parts["scheduler"])
    for names in calls:
        prepared = accelerator.prepare(*(parts[name] for name in names))
        parts |= zip(names, prepared if len(names) > 1 else (prepared,), strict=True)


def train(
    accelerator: accelerate.Accelerator,
    parts: dict[str, Any],
    epochs: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> dict[str, list[float]]:
    """The loop of Accelerate's guide to gradient accumulation."""
    model, optimizer, scheduler = parts["model"], parts["optimizer"], parts["scheduler"]
    log: dict[str, list[float]] = {"loss": [], "norm": [], "rate": []}
    model.train()
    for _ in range(epochs):
        for tokens in parts["loader"]:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip_norm is not None:
                    log["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), clip_norm)))
                if accelerator.sync_gradients and clip_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log["loss"].append(loss.item())
            log["rate"].append(scheduler.get_last_lr()[0])
    return log


def trained(
    context: Context,
    stage: int | None,
    calls: tuple[Any, ...] = (ALL_AT_ONCE,),
    settings: dict[str, Any] | None = None,
    told: bool = True,
    **loop: Any,
) -> dict[str, Any]:
    """Return the log and, on rank 0, the weights. told: whether Accelerate is told its device."""
    begin_job(context)
    accelerator = make_accelerator(stage, **(settings or {})) if told else chosen_by_accelz(stage)
    parts = make_parts()
    prepare(accelerator, parts, calls)
    log = train(accelerator, parts, **loop)
    return {"log": log, "weights": on_host(accelerator.get_state_dict(parts["model"]))}


class Counter:
    """What a program registers to be saved."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def resumed(context: Context, directory: str, windows: int) -> dict[str, Any]:
    """Train two epochs with a save between them, then the second one again from what was saved."""
    settings = {
        "project_config": ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=2),
        "gradient_accumulation_steps": windows,
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    }
    begin_job(context)
    accelerator, parts, counter = make_accelerator(3, **settings), make_parts(), Counter()
    accelerator.register_for_checkpointing(counter)
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    train(accelerator, parts)
    counter.value = 5
    accelerator.save_state()
    wanted = train(accelerator, parts)

    begin_job(context)
    settings["project_config"].iteration = 1
    accelerator, parts, counter = make_accelerator(3, **settings), make_parts(), Counter()
    accelerator.register_for_checkpointing(counter)
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    accelerator.load_state()
    parts["loader"].set_epoch(1)
    found = train(accelerator, parts)
    return {"found": found, "wanted": wanted, "counter": counter.value}


def saved_with_hooks(context: Context, directory: str) -> dict[str, Any]:
    """Save and load with the program's own hooks, which look at models and weights, as diffusers' do."""
    begin_job(context)
    accelerator, parts = make_accelerator(3), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    seen: dict[str, Any] = {}

    def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.update(models=len(models), weights=len(weights))
        seen["state"] = len(accelerator.get_state_dict(models[0]))

    def on_load(models: list[Any], input_dir: str) -> None:
        seen["left"] = len(models)

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
    before = on_host(accelerator.get_state_dict(parts["model"]))
    accelerator.save_state(directory, async_=True)
    train(accelerator, parts)
    accelerator.load_state(directory, weights_only=True)
    steps = accelerator.engine_of(parts["model"]).steps
    after = on_host(accelerator.get_state_dict(parts["model"]))
    files = sorted(os.listdir(directory))
    return {"seen": seen, "before": before, "after": after, "files": files, "steps": steps}


def loaded(context: Context, directory: str) -> dict[str, Any]:
    """The weights of a state that was saved before."""
    begin_job(context)
    accelerator, parts = make_accelerator(2), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    train(accelerator, parts)
    accelerator.load_state(directory)
    return on_host(accelerator.get_state_dict(parts["model"]))


def saved_model(context: Context, directory: str) -> dict[str, Any]:
    """Save the weights as for publishing, in several files, over files of an older save."""
    begin_job(context)
    accelerator, parts = make_accelerator(3), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    train(accelerator, parts)
    accelerator.save_model(parts["model"], directory, max_shard_size="20KB")
    accelerator.wait_for_everyone()
    loaded = language_model(seed=3)
    accelerate.load_checkpoint_in_model(loaded, directory)
    unwrapped = accelerator.unwrap_model(parts["model"])
    return {
        "weights": on_host(accelerator.get_state_dict(parts["model"])),
        "loaded": on_host(loaded.state_dict()),
        "unwrapped": type(unwrapped).__name__,
    }


def evaluated(context: Context, stage: int | None) -> dict[str, Any]:
    """Train an epoch, then collect a number of every row, of which the last batch has fewer."""
    begin_job(context)
    accelerator, parts = make_accelerator(stage), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    train(accelerator, parts)
    loader = accelerator.prepare(DataLoader(token_rows(7), batch_size=2))
    parts["model"].eval()
    found = []
    for tokens in loader:
        with torch.no_grad():
            logits = parts["model"](input_ids=tokens).logits
        found.append(accelerator.gather_for_metrics(logits.float().logsumexp(-1).sum(-1)))
    return {"rows": torch.cat(found).tolist()}


def only_read(context: Context, stage: int | None) -> dict[str, Any]:
    """Evaluate a model that has no optimizer, as a reference has none."""
    begin_job(context)
    accelerator, tokens = make_accelerator(stage), token_rows(4)
    model = accelerator.prepare(language_model()).eval()
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    sharded = stage is not None and accelerator.engine_of(model) is not None
    return {"loss": loss, "sharded": sharded}


def manual_windows(context: Context, stage: int | None) -> dict[str, Any]:
    """Two backwards for a step with no_sync, as in the guide for loops that do not use `accumulate`."""
    begin_job(context)
    accelerator, parts = make_accelerator(stage), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    model, optimizer, losses = parts["model"], parts["optimizer"], []
    batches = list(parts["loader"])
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        with accelerator.no_sync(model):
            accelerator.backward(model(input_ids=first, labels=first).loss)
        loss = model(input_ids=second, labels=second).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"log": {"loss": losses}, "weights": on_host(accelerator.get_state_dict(model))}


def scheduled_alone(context: Context, calls: tuple[Any, ...]) -> list[float]:
    """The rates of three steps."""
    begin_job(context)
    accelerator, parts = make_accelerator(3), make_parts()
    prepare(accelerator, parts, calls)
    rates = []
    for _ in range(3):
        parts["scheduler"].step()
        rates.append(parts["scheduler"].get_last_lr()[0] / 5e-3)
    return rates


def scaled(context: Context, stage: int | None, calls: tuple[Any, ...]) -> dict[str, Any]:
    """Train with the GradScaler that mixed_precision="fp16" brings on an accelerator; one step overflows."""
    begin_job(context)
    accelerator, parts = make_accelerator(stage), make_parts()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    prepare(accelerator, parts, calls)
    model, optimizer, skipped = parts["model"], parts["optimizer"], []
    for step, tokens in enumerate(parts["loader"]):
        loss = model(input_ids=tokens, labels=tokens).loss * (float("inf") if step == 2 else 1.0)
        accelerator.backward(loss)
        accelerator.scaler.unscale_(optimizer.optimizer)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
    log = {"skipped": skipped, "scale": [accelerator.scaler.get_scale()]}
    return {"log": log, "weights": on_host(accelerator.get_state_dict(model))}


def two_models(context: Context, stage: int | None) -> dict[str, Any]:
    """Two models with an optimizer each, prepared in one call, as for a GAN."""
    begin_job(context)
    accelerator = make_accelerator(stage)
    first, second = language_model(seed=0), language_model(seed=1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (first, second)]
    loader = DataLoader(token_rows(12), batch_size=2)
    prepared = accelerator.prepare(optimizers[1], first, second, optimizers[0], loader)
    optimizers, models, loader = [prepared[3], prepared[0]], prepared[1:3], prepared[4]
    losses = []
    for tokens in loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    weights = on_host(accelerator.get_state_dict(models[0]))
    others = on_host(accelerator.get_state_dict(models[1]))
    return {"log": {"loss": losses}, "weights": weights | {f"other {k}": v for k, v in others.items()}}


def uneven(context: Context, stage: int, timeout: float) -> tuple[str, str, float]:
    """Rank 1's data ends earlier: what rank 0 is told, and after how many seconds."""
    begin_job(context)
    accelerator, parts = make_accelerator(stage, timeout), make_parts()
    prepare(accelerator, parts, (("model", "optimizer"),))
    model, optimizer, start = parts["model"], parts["optimizer"], time.monotonic()
    try:
        for tokens in token_rows(4 - context.rank).split(1):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    except ZeroError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    except RuntimeError as error:
        return "other", str(error), time.monotonic() - start
    return "", "", 0.0


def failing(context: Context, stage: int, timeout: float) -> None:
    """Rank 1 fails in the middle of an epoch."""
    begin_job(context)
    accelerator, parts = make_accelerator(stage, timeout), make_parts()
    prepare(accelerator, parts, (ALL_AT_ONCE,))
    for index, tokens in enumerate(parts["loader"]):
        if index == 2 and context.rank == 1:
            raise ValueError("no such file")
        accelerator.backward(parts["model"](input_ids=tokens, labels=tokens).loss)
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()


def refused(context: Context) -> dict[str, str]:
    """What the user is told of what cannot be."""
    told = {}

    def note(name: str, call: Any) -> None:
        begin_job(context)
        try:
            call()
        except ZeroError as error:
            told[name] = f"{type(error).__name__}: {error}"

    def another_engine() -> None:
        begun = accelerate.Accelerator(cpu=True)
        begun.state.distributed_type = DistributedType.FSDP  # which a plugin does, but not on the CPU
        Accelerator.adopt(begun, None)

    def without_its_model() -> None:
        accelerator, parts = make_accelerator(3), make_parts()
        prepare(accelerator, parts, (("optimizer", "loader"),))
        train(accelerator, parts)

    def without_preparing_the_optimizer() -> None:
        accelerator, parts = make_accelerator(3), make_parts()
        prepare(accelerator, parts, (("model", "loader"),))
        train(accelerator, parts)

    def of_two_models() -> None:
        accelerator, models = make_accelerator(3), [language_model(), language_model()]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        accelerator.backward(models[0](input_ids=token_rows(1), labels=token_rows(1)).loss)

    def uneven_inputs() -> None:
        accelerator, parts = make_accelerator(3), make_parts()
        prepare(accelerator, parts, (ALL_AT_ONCE,))
        with accelerator.join_uneven_inputs([parts["model"]]):
            pass
        with accelerator.join_uneven_inputs([parts["model"]], even_batches=False):
            told["entered"] = "a block of uneven inputs"

    note("counted", lambda: Accelerator(cpu=True, zero_config=Config(gradient_accumulation_steps=2)))
    note("alone", lambda: Accelerator(zero_config=Config()))
    note("sharded", another_engine)
    note("without its model", without_its_model)
    note("without preparing the optimizer", without_preparing_the_optimizer)
    note("of two models", of_two_models)
    note("uneven inputs", uneven_inputs)
    return told
