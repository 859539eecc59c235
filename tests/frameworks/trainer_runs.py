"""Bodies that train with transformers' Trainer, or with zero's."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import transformers
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments, trainer_jit_checkpoint

from accelz.conformance.cluster import Context
from tests.frameworks.jobs import begin_job, language_model, on_host, token_rows
from zero import Config, ZeroError, gathered
from zero.integrations.accelerate import use_extension
from zero.integrations.transformers import Trainer, TrainerMixin


class Seq2Seq(TrainerMixin, transformers.Seq2SeqTrainer):
    """As in the guide."""


LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TIMES = ("runtime", "samples_per_second", "steps_per_second", "total_flos", "preparation_time")


def rows(number: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """What a tokenizer makes of `number` texts of one length."""
    ids = token_rows(number, seed=seed).tolist()
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]


def make_trainer(
    stage: int | None,
    directory: str,
    settings: dict[str, Any],
    model: Any = None,
    timeout: float = 60.0,
    zero_config: Any = None,
    kind: type[Trainer] = Trainer,
) -> transformers.Trainer:
    """stage: None for transformers' own, with DistributedDataParallel. 26 rows are 7 batches on two ranks."""
    model = model or language_model()
    arguments = TrainingArguments(
        **{
            "output_dir": directory,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "learning_rate": 5e-3,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "num_train_epochs": 2,
            "max_grad_norm": 0.5,
            "save_strategy": "no",
            "seed": 5,
        }
        | settings
    )
    data = {"train_dataset": rows(26), "eval_dataset": rows(7, seed=2)}
    if stage is None:
        trainer = transformers.Trainer(model, arguments, **data)
    else:
        chosen = zero_config or Config(stage=stage, timeout=timeout)
        trainer = kind(model, arguments, zero_config=chosen, **data)
    if arguments.fp16:
        use_fp16(trainer.accelerator)
    return trainer


def use_fp16(accelerator: Any) -> None:
    """Set up what Accelerate sets up for mixed_precision="fp16" on a GPU, and leaves out on a CPU. The first
    steps overflow."""
    assert accelerator.mixed_precision == "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)


def history(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """What was logged, without times."""
    logged = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not k.endswith(TIMES)} for entry in logged]


def weights(trainer: transformers.Trainer) -> dict[str, Any]:
    """The whole model; {} on other ranks than 0, if it is sharded."""
    return on_host(trainer.accelerator.get_state_dict(trainer.model))


def run_out(most_rows: int, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run out of memory, as far as Accelerate can tell, on every rank."""
    if model.training and len(kwargs["input_ids"]) > most_rows:
        raise RuntimeError("CUDA out of memory.")


def trained(
    context: Context,
    stage: int | None,
    directory: str,
    settings: dict[str, Any] | None = None,
    evaluate_first: bool = False,
    most_rows: int = 64,
    told: bool = True,
) -> dict[str, Any]:
    """most_rows: that fit into memory, of a batch that is trained on. told: whether Accelerate is told of the
    device; where it is not, the trainer has to do so."""
    begin_job(context)
    if stage is not None and not told:
        del os.environ["ACCELERATE_TORCH_DEVICE"]
    model = language_model()
    model.register_forward_pre_hook(partial(run_out, most_rows), with_kwargs=True)
    trainer = make_trainer(stage, directory, settings or {}, model)
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    predicted = trainer.predict(rows(5, seed=4))
    return {
        "log": history(trainer),
        "weights": weights(trainer),
        "predicted": {"logits": predicted.predictions},
    }


def devices_of_arguments(context: Context) -> list[str]:
    """What Trainers without a launcher use: the first, the second, and one where another device is named."""
    begin_job(context)
    found, told = [], "ACCELERATE_TORCH_DEVICE"
    alone = {name: value for name, value in os.environ.items() if name not in (*LAUNCHED, told)}
    with mock.patch.dict(os.environ, alone, clear=True):
        for _ in range(2):
            found.append(device_of_arguments())
        os.environ[told] = "cpu"
        found.append(device_of_arguments())
    return found


def device_of_arguments() -> str:
    arguments = TrainingArguments(use_cpu=True)
    use_extension(arguments)
    return arguments.device.type


def resumed(context: Context, stage: int, directory: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, then once more from the first checkpoint on."""
    begin_job(context)
    trainer = make_trainer(stage, directory, settings)
    trainer.train()
    first = {"log": history(trainer), "weights": weights(trainer)}
    begin_job(context)
    again = make_trainer(stage, directory, settings)
    again.train(resume_from_checkpoint=str(sorted(Path(directory).glob("checkpoint-*"))[0]))
    return {"uninterrupted": first, "resumed": {"log": history(again), "weights": weights(again)}}


def saved(context: Context, stage: int | None, directory: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with saves and save at the end, then load by from_pretrained."""
    begin_job(context)
    trainer = make_trainer(stage, directory, settings)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(directory)
    checkpoints = sorted(Path(directory).glob("checkpoint-*"))
    return {
        "weights": weights(trainer),
        "loaded": on_host(loaded.state_dict()),
        "best": trainer.state.best_model_checkpoint,
        "log": history(trainer),
        "files": {each.name: sorted(os.listdir(each)) for each in checkpoints},
    }


def twice(context: Context, stage: int | None, directory: str) -> dict[str, Any]:
    """Train twice with one Trainer, the second time from a checkpoint of the first."""
    begin_job(context)
    trainer = make_trainer(stage, directory, {"save_strategy": "epoch"})
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    return {"log": history(trainer), "weights": weights(trainer)}


class StopsAlone(TrainerCallback):
    """Has rank 1 do something else than rank 0 in the third step: stop its training, or be told to end."""

    def __init__(self, rank: int, way: str) -> None:
        self.rank = rank
        self.way = way

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.rank == 1 and state.global_step == 2:
            if self.way == "stop":
                control.should_training_stop = True
            elif self.way == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)


class FailsAlone(Trainer):
    """Raises on rank 1 in the third step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.args.process_index == 1 and self.state.global_step == 2:
            raise ValueError("no such file")
        return super().training_step(*args, **kwargs)


def ended_alone(context: Context, directory: str, timeout: float, way: str) -> str:
    """What rank 0 is told where rank 1 ends first: way is "stop", "fail" or, by fewer rows, "data"."""
    begin_job(context)
    even = {"accelerator_config": {"even_batches": False}} if way == "data" else {}
    kind = FailsAlone if way == "fail" else Trainer
    trainer = make_trainer(3, directory, even, timeout=timeout, kind=kind)
    trainer.add_callback(StopsAlone(context.rank, way))
    try:
        trainer.train()
    except ZeroError as error:
        return str(error)
    return ""


def terminated(context: Context, directory: str) -> dict[str, Any]:
    """Train, with rank 1 told to end in the middle, and go on with another Trainer from what was saved."""
    begin_job(context)
    wanted = make_trainer(3, directory, {})
    wanted.train()
    begin_job(context)
    at_once = partial(trainer_jit_checkpoint.CheckpointManager, kill_wait=0.0)
    with mock.patch.object(trainer_jit_checkpoint, "CheckpointManager", at_once):
        trainer = make_trainer(3, directory, {"enable_jit_checkpoint": True})
    trainer.add_callback(StopsAlone(context.rank, "terminate"))
    trainer.train()
    step = trainer.state.global_step
    begin_job(context)
    again = make_trainer(3, directory, {"enable_jit_checkpoint": True})
    again.train(resume_from_checkpoint=True)
    return {
        "step": step,
        "wanted": history(wanted)[:-1],
        "found": history(again)[:-1],
        "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }


def rows_in_order(context: Context, directory: str, resume: bool) -> dict[str, Any]:
    """Train on batches of 4 rows, whatever the number of ranks."""
    begin_job(context)
    settings = {
        "per_device_train_batch_size": 4 // context.size,
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 9,
    }
    trainer = make_trainer(3, directory, settings)
    trainer.train_dataset = rows(24)
    trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-6" if resume else None)
    return {"log": history(trainer), "weights": weights(trainer)}


def translated(context: Context, stage: int | None, directory: str) -> dict[str, Any]:
    """Train an encoder and decoder, and write an output of another length on each rank."""
    begin_job(context)
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=directory,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        max_steps=4,
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=12,
    )
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    data = [{k: row[k] for k in ("input_ids", "labels")} for row in rows(8)]
    parts = {"train_dataset": data, "eval_dataset": data[:2]}
    if stage is None:
        trainer = transformers.Seq2SeqTrainer(model, arguments, **parts)
    else:
        trainer = Seq2Seq(model, arguments, zero_config=Config(stage=stage, timeout=60.0), **parts)
    trainer.train()
    length = 4 + 4 * context.rank
    predicted = trainer.predict(data[:2], min_length=length, max_length=length)
    return {
        "log": history(trainer),
        "weights": weights(trainer),
        "predicted": predicted.predictions.tolist(),
    }


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
"""As in the guide of transformers."""


def by_deepspeed_file(context: Context, directory: str, bf16: bool) -> dict[str, Any]:
    begin_job(context)
    settings = {"gradient_accumulation_steps": 3, "bf16": bf16}
    trainer = make_trainer(3, directory, settings)
    trainer.train()
    file = Path(directory) / f"deepspeed-{context.rank}.json"
    file.write_text(json.dumps(AUTO))
    begin_job(context)
    again = make_trainer(3, directory, settings, zero_config=file)
    again.train()
    return {
        "wanted": history(trainer),
        "found": history(again),
        "precision": again.engine.config.precision,
        "dtype": str(again.model.lm_head.weight.dtype),
    }


def by_differing_file(context: Context, directory: str) -> str:
    begin_job(context)
    given = AUTO | {
        "train_batch_size": 16,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    try:
        make_trainer(3, directory, {}, zero_config=given)
    except ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def generated(context: Context, stage: int | None, directory: str, adapter: bool) -> list[list[int]]:
    """What each rank's model writes after training, each rank another number of tokens; then rank 1 alone."""
    begin_job(context)
    model = peft.get_peft_model(language_model(), peft.LoraConfig(r=4)) if adapter else language_model()
    trainer = make_trainer(stage, directory, {"num_train_epochs": 1}, model)
    trainer.train()
    trainer.model.eval()
    prompt = token_rows(1, length=4)
    tokens = 2 + 5 * context.rank
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    found = trainer.model.generate(input_ids=prompt, **settings).tolist()
    with gathered(trainer.model):
        if context.rank == 1:
            found += trainer.model.generate(input_ids=prompt, **settings).tolist()
    return found
