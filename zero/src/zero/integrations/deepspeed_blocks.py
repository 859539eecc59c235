"""The sections "optimizer" and "scheduler" of a DeepSpeed configuration, and the objects they describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero.errors import ConfigError, OptimizerError, some
from zero.integrations import deepspeed_schedules
from zero.optimizer.lion import Lion

T = TypeVar("T")
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_ADAM = ("bias_correction", "set_grad_none", "fp32_optimizer_states")  # of kernels of DeepSpeed's: all true
_NOT_MUON = ("embed", "lm_head")  # in names of matrices that AdamW steps


def build_optimizer(
    block: Mapping[str, Any], parameters: Parameters, model: nn.Module
) -> Optimizer | list[Optimizer]:
    """Build the optimizer of a section, with DeepSpeed's defaults; for Muon, it and an AdamW for the rest.

    "Adam" is AdamW, as in DeepSpeed, unless "adam_w_mode" is false. Besides Adam, AdamW, Lion and Muon, the
    type is a class of torch.optim. Raises ConfigError for other types and for what they do not take.
    """
    kind, given = _read("optimizer", block)
    if "max_grad_norm" in given:
        raise ConfigError("'optimizer.params.max_grad_norm': write 'gradient_clipping' beside 'optimizer'")
    if kind.lower() in ("adam", "adamw"):
        return _adam(kind, parameters, given)
    if kind.lower() == "lion":
        return _made("optimizer", Lion, parameters, {"lr": 1e-3, "betas": (0.9, 0.999), **given})
    if kind.lower() == "muon":
        return _muon(parameters, model, given)
    found = getattr(optim, kind, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"'optimizer.type' is {kind!r}: expected Adam, AdamW, Lion, Muon or a class of torch.optim, such "
            "as SGD. Create any other optimizer in the program, and pass it as optimizer="
        )
    return _made("optimizer", found, parameters, given)


def build_scheduler(block: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler of a section. Raises ConfigError for what DeepSpeed does not have."""
    kind, given = _read("scheduler", block)
    if kind not in SCHEDULES:
        raise ConfigError(
            f"'scheduler.type' is {kind!r}: expected one of {', '.join(SCHEDULES)}. Create any other in the "
            "program, and pass it as lr_scheduler="
        )
    if given.pop("last_batch_iteration", -1) != -1:
        raise ConfigError(
            "'scheduler.params.last_batch_iteration': remove it; engine.load_checkpoint restores it"
        )
    made: Callable[..., LRScheduler] = getattr(deepspeed_schedules, kind)
    return _made("scheduler", made, optimizer, given)


def _read(section: str, block: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type and the parameters of a section. Raises ConfigError for what is not written out."""
    kind, given = block.get("type"), block.get("params") or {}
    if not isinstance(kind, str) or not isinstance(given, Mapping):
        raise ConfigError(f"{section!r} must be {{'type': '...', 'params': {{...}}}}, not {dict(block)!r}")
    others = sorted(block.keys() - {"type", "params", "legacy_fusion"})
    if others:
        raise ConfigError(f"{section!r} has {', '.join(map(repr, others))}: no counterpart; remove it")
    unwritten = [f"{section}.params.{name}" for name, value in given.items() if value == "auto"]
    if unwritten:
        raise ConfigError(f"{', '.join(map(repr, unwritten))}: 'auto' is no value here; write the value")
    return kind, {name: tuple(v) if name == "betas" else v for name, v in given.items()}


def _adam(kind: str, parameters: Parameters, given: dict[str, Any]) -> Optimizer:
    decoupled = given.pop("adam_w_mode", True) or kind.lower() == "adamw"
    if not given.pop("torch_adam", False):
        given = {"weight_decay": 0.0, **given}
    for name in _ADAM:
        if not given.pop(name, True):
            raise ConfigError(f"'optimizer.params.{name}' is false, which torch's Adam has not; remove it")
    return _made("optimizer", optim.AdamW if decoupled else optim.Adam, parameters, given)


def _muon(parameters: Parameters, model: nn.Module, given: dict[str, Any]) -> list[Optimizer]:
    """Muon for the hidden matrices, and AdamW."""
    given.pop("ns_method", None)  # ways to the same matrix; torch has its own
    adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
    for name in ("lr", "weight_decay"):
        if name in given:
            adam[name] = muon[name] = given.pop(name)
    adam |= {name: given.pop(name) for name in ("betas", "eps") if name in given}
    for defaults, own in ((muon, "muon_lr"), (adam, "adam_lr")):
        if own in given:
            defaults["lr"] = given.pop(own)
    hidden = _hidden(model)
    groups = _groups(parameters)
    matrices = [_part(group, hidden.__contains__) for group in groups]
    rest = [_part(group, lambda parameter: parameter not in hidden) for group in groups]
    found: list[Optimizer] = []
    if matrices := [group for group in matrices if group["params"]]:
        found.append(_made("optimizer", optim.Muon, matrices, {**muon, **given}))
    if rest := [group for group in rest if group["params"]]:
        found.append(_made("optimizer", optim.AdamW, rest, adam))
    return found


def _hidden(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that DeepSpeed's Muon steps. Raises ConfigError if torch's cannot step one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim >= 2}
    inner = {name: p for name, p in named.items() if not any(part in name.lower() for part in _NOT_MUON)}
    if larger := [name for name, parameter in inner.items() if parameter.ndim > 2]:
        raise ConfigError(
            f"'optimizer.type' is 'Muon', but torch.optim.Muon steps matrices, and {some(larger)} "
            "has more dimensions: create a list of optimizers in the program, and pass it to zero.initialize"
        )
    return set(inner.values())


def _groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Param_groups of what optimizers take: those, parameters, or parameters with their names."""
    found: Sequence[Any] = list(parameters)
    if found and isinstance(found[0], dict):
        return [{**group, "params": list(group["params"])} for group in found]
    return [{"params": [each[1] if isinstance(each, tuple) else each for each in found]}]


def _part(group: dict[str, Any], chosen: Callable[[nn.Parameter], bool]) -> dict[str, Any]:
    return {**group, "params": [parameter for parameter in group["params"] if chosen(parameter)]}


def _made(section: str, kind: Callable[..., T], of: Any, given: Mapping[str, Any]) -> T:
    """Make an object of a section's parameters, with an error that says what it takes."""
    takes = list(inspect.signature(kind).parameters)[1:]
    unknown = [f"'{section}.params.{name}'" for name in given if name not in takes]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: {kind.__name__} takes no such parameter, but {', '.join(takes)}"
        )
    try:
        return kind(of, **given)
    except (ConfigError, OptimizerError):
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"'{section}.params' do not fit {kind.__name__}: {error}") from error
