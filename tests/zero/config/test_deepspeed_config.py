"""Translated DeepSpeed configurations, and the errors for those that cannot be translated."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import zero

HUGGING_FACE = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
}


def test_a_usual_one_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HUGGING_FACE))
    expected = zero.Config(
        stage=3,
        precision="bf16",
        gradient_accumulation_steps=4,
        clip_norm=1.0,
        persistent_below=100000,
        offload=zero.Offload(optimizer="host"),
    )
    for source in (HUGGING_FACE, path, str(path)):
        assert zero.from_deepspeed(source) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"stage": 0}),
        ({"zero_optimization": {"stage": 2}}, {"stage": 2}),
        ({"fp16": {"enabled": True}}, {"stage": 0, "precision": "fp16", "loss_scale_window": 1000}),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 10, "hysteresis": 2}},
            {"stage": 0, "precision": "fp16", "loss_scale": 128.0, "loss_scale_window": 10},
        ),
        ({"fp16": {"enabled": True, "hysteresis": 1}}, _dynamic := {
            "stage": 0, "precision": "fp16", "loss_scale_window": 1000}),
        ({"fp16": {"enabled": True, "hysteresis": 2, "min_loss_scale": 1, "consecutive_hysteresis": False}},
            _dynamic),
        ({"fp16": {"enabled": True, "loss_scale": 8, "initial_scale_power": 9, "hysteresis": 4}},
            _dynamic | {"loss_scale": 8.0}),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            {"stage": 0, "precision": "bf16", "moments": "bf16"}),
        ({"bf16": {"enabled": False, "bf16_optimizer_states": True}}, {"stage": 0}),
        ({"communication_data_type": "bfp16"}, {"stage": 0, "reduce_dtype": "bf16"}),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {"gather_dtype": "int8"}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True}},
            {"shard_ranks": 8}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, {"stage": 3}),
        ({"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True}}, {"compile": True}),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, _accumulating := {
            "stage": 0, "gradient_accumulation_steps": 8}),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
            _accumulating),
        ({"train_batch_size": 64}, {"stage": 0}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.0}}},
            {"stage": 2}),
        ({"gradient_predivide_factor": 1.0, "prescale_gradients": False, "amp": {"enabled": False}},
            {"stage": 0}),
    ],
)  # fmt: skip
def test_what_each_key_becomes(given: dict[str, Any], expected: dict[str, Any]) -> None:
    counting = {"gradient_accumulation_steps": 1, **expected}  # as DeepSpeed does
    assert zero.from_deepspeed(given, world_size=2) == zero.Config(**counting)


def test_tiers() -> None:
    disk = {"device": "nvme", "nvme_path": "/local"}
    stage3: dict[str, Any] = {"stage": 3, "offload_optimizer": disk | {"ratio": 0.5}, "offload_param": disk}
    config = zero.from_deepspeed({"zero_optimization": stage3})
    assert config.offload == zero.Offload(
        optimizer="disk", params="disk", fraction={"optimizer": 0.5}, path="/local"
    )
    stage3["offload_param"] = {"device": "cpu", "nvme_path": "/not/used"}
    config = zero.from_deepspeed({"zero_optimization": stage3})
    assert config.offload.params == "host"
    stage3["offload_param"] = disk | {"nvme_path": "/elsewhere"}
    with pytest.raises(zero.ConfigError, match="a single directory, not /elsewhere and /local"):
        zero.from_deepspeed({"zero_optimization": stage3})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"torch_autocast": {"enabled": True}}, "under torch.autocast"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "'zero_optimization.zero_quan",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "no counterpart; remove it"),
        ({"bf16": True}, r"'bf16': expected a section, \{...\}, not True"),
        ({"bfloat16": {"enabled": True}}, "'bfloat16.enabled': an old name; write 'bf16'"),
        ({"zero_optimisation": {"stage": 3}}, "unknown; did you mean 'zero_optimization.stage'"),
        (
            {"train_batch_size": -8, "train_micro_batch_size_per_gpu": 4},
            "'train_batch_size' must be at least 1",
        ),
        ({"gradient_accumulation_steps": 0}, "'gradient_accumulation_steps' must be at least 1"),
        ({"zero_optimization": {"stage": "three"}}, "'zero_optimization.stage' is 'three': expected a whole"),
        ({"zero_optimization": {"stage": True}}, "expected a whole number"),
        ({"gradient_clipping": "auto"}, "'gradient_clipping' is 'auto': write the value"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            r"'bf16.bf16_master_weights_and_grads': masters keep fp32 values, .*Config\(masters='split'",
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, r"starts at 2\*\*16"),
        ({"fp16": {"enabled": True, "initial_scale_power": 0}}, r"starts at 2\*\*16"),
        ({"fp16": {"enabled": True, "hysteresis": 3}}, "'fp16.hysteresis': .* halved at every overflow"),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "halved at every overflow; remove it"),
        ({"fp16": {"enabled": True, "min_loss_scale": 128}}, r"'fp16.min_loss_scale': .* down to 2\*\*-24"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window = 0"),
        ({"zero_optimization": {"stage": 1.5}}, "is 1.5: expected a whole number"),
        ({"tensorboard": {"enabled": True}}, "'tensorboard.enabled': only reports and changes no values"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "'data_types.grad_accum_dtype': no counterpart"),
        ({"communication_data_type": "int4"}, "'int4', not one of fp32, fp16, bf16"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            r"'train_batch_size' 10 and 'train_micro_batch_size_per_gpu' 4 do not fit 2 ranks: .* would fit: "
            r"'train_batch_size': 8, 'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 1$",
        ),
        (
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 4,
            },
            "'train_batch_size': 32, 'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 4$",
        ),
        (
            {"train_batch_size": 7},
            "'train_batch_size': 8, 'train_micro_batch_size_per_gpu': 4, .*_steps': 1$",
        ),
        (
            {"train_batch_size": 63, "gradient_accumulation_steps": 4},
            "'train_batch_size': 64, 'train_micro_batch_size_per_gpu': 8, 'gradient_accumulation_steps': 4$",
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "set stage=3"),
        ({"zero_optimization": {"stage": 1, "zero_quantized_weights": True}}, "set stage=3"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, "shard_ranks = 1: .* equal to 2"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(zero.ConfigError, match=said):
        zero.from_deepspeed(given, world_size=2)


def test_auto_is_refused_only_where_its_value_would_count() -> None:
    given: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    }
    assert zero.from_deepspeed(given) == zero.Config(stage=3, gradient_accumulation_steps=1)
    tuning = {
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    }
    same = {"data_types": {"grad_accum_dtype": "fp32"}}
    assert zero.from_deepspeed({**given, **tuning, **same}) == zero.Config(
        stage=3, gradient_accumulation_steps=1
    )
    given["fp16"] = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000}
    with pytest.raises(zero.ConfigError) as caught:
        zero.from_deepspeed(given)
    problems = str(caught.value).partition(": ")[2]
    with pytest.raises(zero.ConfigError, match=r"'train_batch_size' is 'auto': write the value$"):
        zero.from_deepspeed({"train_batch_size": "auto"})
    assert problems == "'fp16.enabled' is 'auto': write the value"
    assert "loss_scale" not in problems


def test_of_an_optimizer_and_a_schedule_it_says_who_builds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR"},
        "gradient_clipping": 1.0,
    }
    with pytest.warns(UserWarning, match=r"leaves out 'optimizer' and 'scheduler' .*deepspeed\.initialize\("):
        assert zero.from_deepspeed(given) == zero.Config(
            stage=0, clip_norm=1.0, gradient_accumulation_steps=1
        )
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.from_deepspeed(given)


def test_all_problems_are_told_at_once() -> None:
    given = {"comms_logger": {"enabled": True}, "curriculum_learning": {"enabled": True}, "fp16": "auto"}
    with pytest.raises(zero.ConfigError) as caught:
        zero.from_deepspeed(given)
    for name in ("comms_logger.enabled", "curriculum_learning.enabled", "fp16"):
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, ["ds.json"]])
def test_what_is_no_configuration_at_all(source: Any) -> None:
    with pytest.raises(zero.ConfigError, match="is not a DeepSpeed configuration"):
        zero.from_deepspeed(source)


@pytest.mark.parametrize("content", ["", "[1]", None])
def test_a_file_that_is_none(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(zero.ConfigError, match=r"ds\.json is not a DeepSpeed configuration"):
        zero.from_deepspeed(path)


def test_ranks_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert zero.from_deepspeed(given).gradient_accumulation_steps == 4
