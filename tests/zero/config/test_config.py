"""Wrong configurations, models and optimizers: a typed error that says what to do, and nothing changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.testing._internal.two_tensor import TwoTensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel
from tests.zero.helpers.training import adamw
from zero.drafts.checks import check_model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stage": 4}, "stage = 4"),
        ({"stage": "3"}, "stage = '3'"),
        ({"stage": True}, "stage = True"),
        ({"stagee": 3}, "did you mean 'stage'"),
        ({"offload_everything": True}, "known: stage, precision"),
        ({"precision": "float16"}, "precision = 'float16'"),
        ({"cast_buffers": True}, "cast_buffers: precision='model' leaves every dtype"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps = 1.5"),
        ({"accumulate": "never"}, "accumulate = 'never'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype = 'int8'"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0"),
        ({"clip_norm": float("nan")}, "clip_norm = nan"),
        ({"loss_scale": 0.0}, "loss_scale = 0.0"),
        ({"loss_scale": "static"}, "loss_scale = 'static'"),
        ({"loss_scale_window": 0}, "loss_scale_window = 0"),
        ({"units": 3}, "units = 3"),
        ({"units": [nn.Linear(2, 2)]}, "write the class, Linear, or its name"),
        ({"autocast_modules": (nn.Linear(2, 2),)}, "write the class, Linear, or its name"),
        (
            {"offload": "host"},
            "offload = 'host': must be 'auto', or say what leaves the device: zero.Offload(",
        ),
        ({"persistent_below": -1}, "persistent_below = -1"),
        ({"prefetch": -1}, "prefetch = -1"),
        ({"cast_inputs": "yes"}, "cast_inputs = 'yes'"),
        ({"timeout": 0.0}, "timeout = 0.0"),
        ({"stage": 7, "prefetch": -2}, "prefetch = -2"),
    ],
)
def test_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(zero.ConfigError) as caught:
        zero.Config(**values)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "wrong", [lambda: zero.Config(loss_scale="x"), lambda: zero.Compile(persist_budget="x")]
)
def test_a_value_that_may_be_of_several_types_is_named_once(wrong: Callable[[], object]) -> None:
    with pytest.raises(zero.ConfigError, match=r"^zero\.\w+: \w+ = 'x': [^;]*, or [^=]*$"):
        wrong()


def test_a_config_is_frozen_and_comparable() -> None:
    config = zero.Config(stage=2, clip_norm=1)
    assert config == zero.Config(stage=2, clip_norm=1.0)
    with pytest.raises(ValueError, match="frozen"):
        config.stage = 3


@pytest.mark.parametrize("offload", [None, "auto", zero.Offload(optimizer="host", params="host")])
def test_where_state_lives_follows_a_copy(offload: zero.Offload | str | None) -> None:
    config = zero.Config(offload=offload)
    assert config.offload.optimizer == ("device" if offload is None else "host")
    for other in ("auto", None, zero.Offload(gradients="host", optimizer="host")):
        assert config.model_copy(update={"offload": other}) == zero.Config(offload=other)
    if not isinstance(offload, zero.Offload):
        assert config.model_dump()["offload"] == offload
        assert zero.Config(**json.loads(config.model_dump_json())) == config
    assert config == zero.Config(offload=offload)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 3)


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def complex_valued() -> nn.Module:
    return nn.Linear(3, 3, dtype=torch.complex64)


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3))


def overlapping() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    return model


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("adjacency", buffer, persistent=False)
    return model


def empty() -> nn.Module:
    return nn.ReLU()


def frozen() -> nn.Linear:
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    return model


class Wrapper(torch.optim.Optimizer):
    """Has everything from another optimizer, as the wrapper of schedule-free ones."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state


def bad_input_body(context: Context) -> dict[str, str]:
    any_parameter = [nn.Parameter(torch.ones(2))]
    outside = LanguageModel()
    [*outside.parameters(), *any_parameter]
    stepped = LanguageModel()
    used = adamw(stepped)
    stepped(torch.zeros(1, 2, dtype=torch.long))["loss"].backward()
    used.step()
    whole, config = LanguageModel, zero.Config(timeout=10)
    counting = torch.optim.SGD(any_parameter, lr=1)
    counting.state["calls"] = 0
    model = LanguageModel()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    cases: dict[str, tuple[Any, Any, Any]] = {
        "not a module": (lambda x: x, torch.optim.SGD(any_parameter, lr=1), config),
        "no parameters": (empty(), torch.optim.SGD(any_parameter, lr=1), config),
        "lazy": (lazy(), torch.optim.SGD(any_parameter, lr=1), config),
        "TorchScript": (scripted(), torch.optim.SGD(any_parameter, lr=1), config),
        "meta": (on_meta(), torch.optim.SGD(any_parameter, lr=1), config),
        "inference": ((m := in_inference_mode()), adamw(m), config),
        "complex": (complex_valued(), torch.optim.SGD(any_parameter, lr=1), config),
        "wrapped": ((m := nn.DataParallel(whole())), adamw(m), config),
        "overlap": (overlapping(), torch.optim.SGD(any_parameter, lr=1), config),
        "meta buffer": ((m := with_buffer(torch.ones(3, device="meta"))), adamw(m), config),
        "lazy buffer": ((m := with_buffer(UninitializedBuffer())), adamw(m), config),
        "sparse buffer": ((m := with_buffer(torch.eye(3).to_sparse())), adamw(m), config),
        "compressed buffer": ((m := with_buffer(torch.eye(3).to_sparse_csr())), adamw(m), config),
        "nested buffer": ((m := with_buffer(nested)), adamw(m), config),
        "not an optimizer": (whole(), [1, 2], config),
        "foreign parameter": (
            outside,
            torch.optim.SGD([*outside.parameters(), *any_parameter], lr=1),
            config,
        ),
        "nothing trainable": ((m := frozen()), torch.optim.SGD([m.weight], lr=1), config),
        "LBFGS": ((m := whole()), torch.optim.LBFGS(m.parameters()), config),
        "wrapper": ((m := whole()), Wrapper(adamw(m)), config),
        "Adafactor": (
            (m := whole()),
            torch.optim.Adafactor(m.parameters()),
            zero.Config(timeout=10, whole_parameters=False),
        ),
        "stepped": (stepped, used, config),
        "state of its own": (whole(), counting, config),
        "dict config": ((m := whole()), adamw(m), {"stage": 3}),
        "dtype": ((m := whole().to(torch.float8_e5m2)), torch.optim.SGD(m.parameters(), lr=1), config),
        "units": ((m := whole()), adamw(m), zero.Config(units=(nn.Conv2d,), timeout=10)),
    }
    messages = {}
    for name, (module, optimizer, settings) in cases.items():
        before = _fingerprint(module)
        try:
            zero.initialize(module, optimizer, settings)
            messages[name] = "nothing raised"
        except zero.ZeroError as error:
            messages[name] = f"{type(error).__name__}: {error}"
        if _fingerprint(module) != before:
            messages[name] += " BUT CHANGED THE MODEL"
    engine = zero.initialize(model, adamw(model), config)
    try:
        zero.initialize(model, engine.optimizer, config)
    except zero.ZeroError as error:
        messages["twice"] = f"{type(error).__name__}: {error}"
    return messages


def _fingerprint(module: Any) -> list[Any]:
    if not isinstance(module, nn.Module) or any(is_lazy(p) for p in module.parameters()):
        return []
    named = module.named_parameters()
    return [(n, id(p), type(p), p.untyped_storage().nbytes(), p.data_ptr()) for n, p in named]


EXPECTED = {
    "not a module": "ModelError: expected a torch.nn.Module, got function",
    "no parameters": "ModelError: the model has no parameters",
    "lazy": "ModelError: parameter '1.weight' is lazy",
    "TorchScript": "ModelError: module '0' is TorchScript",
    "meta": "ModelError: parameter 'weight' is on the meta device",
    "inference": "ModelError: parameter 'weight' was made in torch.inference_mode()",
    "complex": "ModelError: parameter 'weight' is torch.complex64",
    "wrapped": "ModelError: the model is wrapped in DataParallel",
    "overlap": "ModelError: parameters '0.weight' and '1.weight' are different Parameter objects",
    "meta buffer": "ModelError: buffer 'adjacency' is on the meta device",
    "lazy buffer": "ModelError: buffer 'adjacency' is lazy",
    "sparse buffer": "ModelError: buffer 'adjacency' is torch.sparse_coo",
    "compressed buffer": "ModelError: buffer 'adjacency' is torch.sparse_csr",
    "nested buffer": "ModelError: buffer 'adjacency' is nested",
    "not an optimizer": "OptimizerError: expected a torch.optim.Optimizer or a list of them, got int",
    "foreign parameter": "OptimizerError: param_groups[0]['params'][",
    "nothing trainable": "OptimizerError: the optimizer has no trainable parameter",
    "LBFGS": "OptimizerError: LBFGS cannot be sharded",
    "wrapper": "OptimizerError: Wrapper has not called torch.optim.Optimizer's __init__",
    "Adafactor": "OptimizerError: Adafactor needs whole matrices",
    "stepped": "OptimizerError: the optimizer already has state",
    "state of its own": "OptimizerError: the optimizer's state has entries that are of no parameter: 'calls'",
    "dict config": "ConfigError: expected a zero.Config, got dict",
    "dtype": "ConfigError: the device '{device}' does not support torch.float8_e5m2",
    "units": "ConfigError: units=",
    "twice": "ModelError: parameter 'gain' already belongs to an engine, and still does when that is "
    "gone: build the model anew, and load engine.state_dict() or a checkpoint into it",
}


@pytest.mark.parametrize("size", [1, 2])
def test_bad_input_changes_nothing(cluster: Clusters, size: int, device: str) -> None:
    for messages in cluster(size).run(bad_input_body):
        assert set(messages) == set(EXPECTED)
        for name, start in EXPECTED.items():
            assert messages[name].startswith(start.replace("{device}", device)), messages[name]
            assert "CHANGED" not in messages[name], messages[name]


def test_trained_parameters_made_of_others_are_refused() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    with pytest.raises(zero.ModelError, match=r"'weight' is a TwoTensor, of which .*: freeze it"):
        check_model(model, torch.device("cpu"))


@pytest.mark.slow
def test_no_public_name_is_also_a_module() -> None:
    """Importing the module first would replace the public name with it."""
    code = """if True:
        import importlib, types, zero
        for home in {"errors", *zero._HOME.values()}:
            importlib.import_module(f"zero.{home}")
        assert set(zero._HOME) <= {"__version__", *zero.__all__}
        print([name for name in zero.__all__ if isinstance(getattr(zero, name), types.ModuleType)])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_public_face_is_frozen() -> None:
    assert zero.__all__ == [
        "CheckpointError",
        "CommunicationError",
        "Compile",
        "Config",
        "ConfigError",
        "CorruptCheckpointError",
        "EMA",
        "Engine",
        "GradientOverflowError",
        "Lion",
        "ModelError",
        "Offload",
        "OffloadError",
        "OptimizerError",
        "OutOfMemoryError",
        "RankMismatchError",
        "ShardedParameterError",
        "StateError",
        "UsageError",
        "ZeroError",
        "from_deepspeed",
        "gathered",
        "init",
        "initialize",
        "load_pretrained",
        "plan",
        "register_form",
    ]
    engine = [n for n in vars(zero.Engine) if not n.startswith("_")]
    assert engine == [
        "backward",
        "step",
        "attach",
        "no_sync",
        "zero_grad",
        "explain",
        "steps",
        "is_boundary",
        "grad_norm",
        "loss_scale",
        "skipped_steps",
        "traffic",
        "device",
        "rank",
        "world_size",
        "train",
        "eval",
        "refresh_weights",
        "state_dict",
        "load_state_dict",
        "full_master",
        "full_gradient",
        "clip_grad_norm_",
        "gradient_norms",
        "parameter_statistics",
        "full_optimizer_state",
        "save_checkpoint",
        "load_checkpoint",
        "load_pretrained",
        "save_pretrained",
        "wait_for_checkpoint",
        "offload_states",
        "reload_states",
        "trace_memory",
        "memory_report",
        "observe",
        "log",
        "count_flops",
        "profile",
        "record_flight",
    ]
    assert list(zero.Config.model_fields) == [
        "stage",
        "precision",
        "shard_ranks",
        "local_modules",
        "gradient_accumulation_steps",
        "accumulate",
        "reduce_dtype",
        "gather_dtype",
        "autocast_modules",
        "exact_parameters",
        "clip_norm",
        "loss_scale",
        "loss_scale_window",
        "whole_parameters",
        "moments",
        "masters",
        "units",
        "persistent_below",
        "prefetch",
        "cast_inputs",
        "cast_buffers",
        "offload",
        "compile",
        "capture_step",
        "timeout",
        "outlive_launcher",
    ]
