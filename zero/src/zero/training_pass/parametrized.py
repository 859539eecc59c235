"""Parametrizations that a forward registers and takes away again, as PEFT does for adapters on parameters.

`torch.nn.utils.parametrize` then sets the parameter to itself, which torch counts as a write in place.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from zero.sharding.guard import UNIT_ATTRIBUTE

if TYPE_CHECKING:
    from zero.sharding.lifetime import UncopiedRef
    from zero.training_pass.unit_hooks import UnitHooks


@functools.cache
def report() -> None:
    """Tell units of parametrizations from now on, in the whole process."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if isinstance(module, ParametrizationList):
        original = getattr(module, "original", None)  # several, if a parametrization divides it
        known: UncopiedRef[UnitHooks] | None = getattr(original, "__dict__", {}).get(UNIT_ATTRIBUTE)
        hooks = None if known is None else known()
        if hooks is not None and original is not None:
            hooks.unit.guard.set_to_itself(original)
