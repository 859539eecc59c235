"""What a module's state dict is made of, and the names of its parameters there.

They are the names that files and users have: hooks on state dicts may have renamed what `named_parameters()`
says, as torch's wrappers for activation checkpointing do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StateEntries:
    """The entries of a state dict by what they are.

    parameters: every parameter's names, those of a tied one in the state dict's order; what is not in the
    state dict has the names of `named_parameters()`. rest: extra state, and what hooks have added.
    """

    parameters: dict[nn.Parameter, tuple[str, ...]]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def first_names(self) -> dict[str, str]:
        """For every name of a parameter its first one."""
        return {name: names[0] for names in self.parameters.values() for name in names}


def entries_of(module: nn.Module) -> StateEntries:
    """The entries as they are now."""
    called = dict(module.named_parameters(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in called.values()}
    buffers = {id(buffer) for buffer in module.buffers()}
    found = StateEntries({})
    for name, value in module.state_dict(keep_vars=True).items():
        parameter = value if isinstance(value, nn.Parameter) and value in names else called.get(name)
        if parameter is not None:
            names[parameter].append(name)
        elif id(value) in buffers:
            found.buffers[name] = value
        else:
            found.rest[name] = value
    for name, parameter in called.items():
        found.parameters[parameter] = tuple(names[parameter] or [name])
    return found


def names_of(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter, those of `named_parameters()` as well, its first in the state dict."""
    entries = entries_of(module)
    called = module.named_parameters(remove_duplicate=False)
    return {**{name: entries.parameters[p][0] for name, p in called}, **entries.first_names}


def load_rest(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Hand extra state, and whatever else hooks add to state dicts, to the modules that it came from."""
    if values:
        with torch.no_grad():
            module.load_state_dict(dict(values), strict=False)
