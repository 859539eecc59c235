"""Which fp32 parameters travel in autocast's dtype while torch.autocast is on.

These are the parameters that autocast casts before every use. They are cast once, before the gather, and the
results stay those of plain autocast. Parameters that are read in fp32 (embeddings, norms, biases), and those
whose use cannot be told from outside, travel as they are. torch.amp's reference lists the operations for
which autocast casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from zero.config.training import Config
from zero.errors import ConfigError
from zero.warning import warn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CAST: dict[Callable[..., Any], tuple[str, ...]] = {
    **{kind.forward: ("weight",) for kind in (nn.Linear, *_CONVOLUTIONS)},
    nn.MultiheadAttention.forward: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""Names of parameters, by the forward that casts them; a subclass may have its own forward."""
_TOLD_FROM = 0.1  # share of a model's elements in matrices of unknown use, for a warning


_is_available = cache(torch.amp.is_autocast_available)


def enabled_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to at this moment; None if it is off, or there is none."""
    if _is_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def cast_before_use(model: nn.Module, config: Config) -> set[nn.Parameter]:
    """Return the matrices that autocast casts before each use in all modules that hold them.

    Known for torch's own layers and from `config.autocast_modules`. Raises ConfigError if one of those
    matches nothing.
    """
    casting, others = set[nn.Parameter](), set[nn.Parameter]()
    named = set[type[nn.Module] | str]()
    for module in model.modules():
        rules = [rule for rule in config.autocast_modules if _matches(rule, module)]
        held = {name: p for name, p in module._parameters.items() if p is not None}
        cast = held.keys() if rules else _names(module)
        casting.update(p for name, p in held.items() if name in cast)
        others.update(p for name, p in held.items() if name not in cast)
        if any(p.dim() > 1 for p in held.values()):
            named.update(rules)
    for rule in config.autocast_modules:
        if rule not in named:
            name = getattr(rule, "__name__", rule)
            raise ConfigError(f"autocast_modules: no module of class {name!r} has matrices of its own")
    return {p for p in casting - others if p.dim() > 1}


class AutocastWarnings:
    """Warns, once each, of forwards under autocast that lose gradients or take memory needlessly.

    gathers: whether parameters are whole only while they are used. rank: this rank's number in the job.
    """

    def __init__(self, model: nn.Module, config: Config, device_type: str, gathers: bool, rank: int) -> None:
        self._rank = rank
        self._device_type = device_type
        self._vanish = _VANISH if config.loss_scale is None else ""
        graphs_tell = config.compile is not None
        self._wide = _tell_of_unknown(model, config) if gathers and not graphs_tell else ""

    def begin_forward(self) -> None:
        """Give the warnings that apply to a forward that begins."""
        dtype = enabled_dtype(self._device_type) if self._vanish or self._wide else None
        if dtype is None or not torch.is_grad_enabled():
            return
        if dtype is torch.float16 and self._vanish:
            warn(self._vanish, rank=self._rank)
            self._vanish = ""
        if self._wide:
            warn(self._wide, rank=self._rank)
            self._wide = ""


def _tell_of_unknown(model: nn.Module, config: Config) -> str:
    """Return the warning about matrices of unknown use; "" if they are few."""
    known = cast_before_use(model, config)
    unknown = {p: type(m).__name__ for m, p in _of_unknown_use(model) if p not in known}
    elements, wide = (sum(p.numel() for p in of) for of in (model.parameters(), unknown))
    if wide == 0 or wide < _TOLD_FROM * elements:
        return ""
    names = tuple(sorted(set(unknown.values())))
    return _WIDE.format(classes=", ".join(names), share=wide / elements, names=names)


def _of_unknown_use(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the fp32 matrices of modules that are not torch's own, and of these modules."""
    for module in model.modules():
        torchs = type(module).__module__.startswith("torch.nn.")
        if not (torchs or isinstance(module, (nn.Embedding, nn.EmbeddingBag))):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() > 1 and parameter.dtype is torch.float32:
                    yield module, parameter


def _names(module: nn.Module) -> tuple[str, ...]:
    return () if "forward" in module.__dict__ else _CAST.get(type(module).forward, ())


def _matches(rule: type[nn.Module] | str, module: nn.Module) -> bool:
    return type(module).__name__ == rule if isinstance(rule, str) else isinstance(module, rule)


_VANISH = (
    "this forward runs under torch.autocast in fp16, where small gradients underflow: set "
    "zero.Config(loss_scale='dynamic'), which takes the place of a GradScaler"
)
_WIDE = (
    "matrices of {classes} ({share:.0%} of the model) are gathered in fp32 under torch.autocast, and the "
    "copies that autocast makes of them stay until backward. If autocast casts them before each use, name "
    "their classes, and they are gathered already cast, without copies: "
    "zero.Config(autocast_modules={names}); or use compile=True, where the graph shows the use"
)
