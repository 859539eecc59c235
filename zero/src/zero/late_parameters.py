"""Parameters that came to a model, or were unfrozen in it, after its engine was made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from zero.errors import ModelError, some
from zero.sharded_unit import ShardedUnit


class LateParameters:
    """Refuses to train or save a model as if they were the engine's.

    It has no shards of new ones, and neither gradients nor optimizer state of those that were frozen.
    """

    def __init__(self, module: nn.Module, units: Iterable[ShardedUnit]) -> None:
        groups = [group for unit in units for group in unit.groups]
        self._module = module
        self._known = {parameter for group in groups for parameter in group.parameters}
        self._frozen = [p for group in groups if not group.trainable for p in group.parameters]
        self._looked = False

    def check_trained(self) -> None:
        """Before a backward. New parameters are looked for once, which takes as long as walking the model."""
        with torch._C.DisableTorchFunctionSubclass():  # as they are: the guard of sharded ones costs time
            thawed = any(p.requires_grad for p in self._frozen)
        if thawed:
            names = self._names(lambda p: p.requires_grad and p in set(self._frozen))
            raise ModelError(f"frozen at zero.initialize, and not any more: {some(names)}. {_THAWED}")
        if not self._looked:
            self._check_new("trained", self._names(lambda p: p.requires_grad and p not in self._known))
            self._looked = True

    def check_whole(self) -> None:
        """Before values of the whole model are saved or loaded."""
        self._check_new("saved or loaded", self._names(lambda p: p not in self._known))

    def _check_new(self, what: str, names: Sequence[str]) -> None:
        if names:
            raise ModelError(
                f"not in the model at zero.initialize, and so not {what}: {some(names)}. Adapters, resized "
                "embeddings and whatever else changes the model come before it"
            )

    def _names(self, wanted: Callable[[nn.Parameter], bool]) -> list[str]:
        return [name for name, parameter in self._module.named_parameters() if wanted(parameter)]


_THAWED = (
    "The engine has no gradients and no optimizer state for them: have them trainable at zero.initialize and "
    "freeze them after it, with requires_grad_(False), for as long as they should stay as they are"
)
