"""What a module's state dict is made of, and the names of its parameters there.

They are the names that files and users have: hooks on state dicts may have renamed what `named_parameters()`
says, as torch's wrappers for activation checkpointing do.
"""

from __future__ import annotations

import warnings
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
    def by_name(self) -> dict[str, nn.Parameter]:
        """The parameter of each name."""
        return {name: parameter for parameter, names in self.parameters.items() for name in names}


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


def first_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's own name, in the order of `named_parameters()`, whose names serve where the module has
    no state dict to look at."""
    try:
        entries = entries_of(module)
    except Exception as error:
        warnings.warn(
            f"model.state_dict() raises {type(error).__name__}: {error}. Parameters go by the names of "
            "named_parameters(), and nothing can be saved",
            stacklevel=5,
        )
        return {parameter: name for name, parameter in module.named_parameters()}
    return {parameter: names[0] for parameter, names in entries.parameters.items()}


def load_rest(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Hand extra state, and whatever else hooks add to state dicts, to the modules that it came from."""
    if values:
        with torch.no_grad():
            module.load_state_dict(dict(values), strict=False)
