"""Several parts of a model in one engine, such as the stages of a pipeline that one rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from zero.errors import ModelError, UsageError


class Parts(nn.Module):
    """Modules that are called by themselves. Their names are their numbers, as in `nn.Sequential`."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("the engine has several parts of a model: call the parts, not the engine")


def own_name(model: nn.Module, name: str) -> str:
    """The name that a parameter, buffer or extra state of a model has in its part, if it has parts."""
    return name.partition(".")[2] if isinstance(model, Parts) else name


def as_model(given: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return the module to shard. Raises ModelError for a list that is empty, or not of different modules."""
    if not isinstance(given, (list, tuple)):
        return given  # type: ignore[return-value]  # whatever it is, the checks of models tell
    for part in given:
        if not isinstance(part, nn.Module):
            raise ModelError(f"expected a list of torch.nn.Modules, got {type(part).__name__} in it")
    if not given or len(set(given)) < len(given):
        raise ModelError("expected a list of different modules, the parts of one model")
    return Parts(given)
