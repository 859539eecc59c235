"""Bodies that train adapters of PEFT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
from safetensors.torch import load_file

import zero
from accelz.conformance.cluster import Context
from tests.frameworks import trainer_runs as runs
from tests.frameworks.jobs import begin_job, language_model, on_host

MATRICES = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=MATRICES, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(
        r=4, target_modules=MATRICES, modules_to_save=["lm_head"], use_dora=True, task_type="CAUSAL_LM"
    ),
    "parameters": lambda: peft.LoraConfig(
        r=4, target_modules=[], target_parameters=["self_attn.q_proj.weight"], task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def model_with(kind: str) -> Any:
    return peft.get_peft_model(language_model(), ADAPTERS[kind]())


def save_by_hand(trainer: Any, directory: str) -> None:
    """As in the migration guide, without Trainer."""
    if trainer.model.active_peft_config.is_prompt_learning:
        with zero.gathered(trainer.model):
            if trainer.engine.rank == 0:
                trainer.model.save_pretrained(directory)
        return
    state = trainer.engine.state_dict(trainable_only=True)
    if trainer.engine.rank == 0:
        with zero.gathered([]):
            trainer.model.save_pretrained(directory, state_dict=state)


def adapted(context: Context, stage: int | None, directory: str, kind: str) -> dict[str, Any]:
    """Train an adapter, save it, and load it by PEFT onto a plain model."""
    begin_job(context)
    settings = {"save_strategy": "epoch"}
    trainer = runs.make_trainer(stage, directory, settings, model_with(kind))
    trainer.train()
    moved = 0 if stage is None else trainer.engine.traffic.bytes["all_gather"]
    trainer.save_model()
    if stage is not None:
        moved = trainer.engine.traffic.bytes["all_gather"] - moved
        save_by_hand(trainer, f"{directory}/by_hand")
    trainer.accelerator.wait_for_everyone()
    loaded = peft.PeftModel.from_pretrained(language_model(), directory)
    by_hand = Path(directory) / "by_hand" / "adapter_model.safetensors"
    return {
        "by_hand": on_host(load_file(by_hand)) if stage is not None else {},
        "log": runs.history(trainer),
        "saved": on_host(load_file(Path(directory) / "adapter_model.safetensors")),
        "loaded": on_host(peft.get_peft_model_state_dict(loaded)),
        "files": sorted(set(os.listdir(directory)) - {"by_hand"}),
        "moved": moved,
        "layer": 4 * sum(parameter.numel() for parameter in language_model().model.layers[0].parameters()),
    }


def resumed(context: Context, stage: int, directory: str, kind: str) -> dict[str, Any]:
    """Train an adapter, then once more from the first checkpoint on."""
    begin_job(context)
    settings = {"save_strategy": "epoch"}
    trainer = runs.make_trainer(stage, directory, settings, model_with(kind))
    trainer.train()
    begin_job(context)
    again = runs.make_trainer(stage, directory, settings, model_with(kind))
    again.train(resume_from_checkpoint=str(Path(directory) / "checkpoint-7"))
    return {"wanted": runs.history(trainer)[:-1], "found": runs.history(again)[:-1]}


def beside_another(context: Context, stage: int, directory: str) -> dict[str, Any]:
    """Train one of two adapters, and save both."""
    begin_job(context)
    model = model_with("lora")
    model.add_adapter("other", ADAPTERS["lora"]())
    before = on_host(peft.get_peft_model_state_dict(model, adapter_name="other"))
    trainer = runs.make_trainer(stage, directory, {}, model)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    saved = on_host(load_file(Path(directory) / "other" / "adapter_model.safetensors"))
    return {"before": before, "saved": saved}


def merged(context: Context, stage: int | None, directory: str) -> dict[str, Any]:
    """Train an adapter and merge it into the base, where it is."""
    begin_job(context)
    trainer = runs.make_trainer(stage, directory, {}, model_with("lora"))
    trainer.train()
    if stage is None:
        trainer.model.merge_adapter()
    else:
        with zero.gathered(trainer.model, write_rank=0):
            if context.rank == 0:
                trainer.model.merge_adapter()
    return runs.weights(trainer)
