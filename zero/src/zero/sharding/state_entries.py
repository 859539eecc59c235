"""What a module's state dict is made of, the names of its parameters there, and which entries a caller wants.

These are the names that files and users know: hooks on state dicts may rename what `named_parameters()`
gives, as torch's wrappers for activation checkpointing do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zero.errors import UsageError, some
from zero.sharding.forms import as_parameter, inner_leaves, is_apart, name_of, named_leaves
from zero.warning import warn


@dataclass(frozen=True)
class StateEntries:
    """The entries of a state dict, by kind.

    parameters: the names of every parameter's leaves (see `forms`); those of a tied one in the state dict's
    order. A parameter that is not in the state dict has its names of `named_parameters()`. rest: extra state,
    and entries that hooks add.
    """

    parameters: dict[nn.Parameter, tuple[str, ...]]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those of tied parameters included."""
        return (*self.by_name, *self.buffers, *self.rest)

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by each of their names."""
        return {name: parameter for parameter, names in self.parameters.items() for name in names}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict with its own tensors; wrappers taken apart into their leaves.

    With them are leaves that the module's own state dict has in another form.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    inner = inner_leaves(module)
    if not inner:
        return state
    apart = {id(p): leaves for p, leaves in inner.items() if is_apart(p, leaves)}
    found = {
        name_of(name, suffix): leaf
        for name, value in state.items()
        for suffix, leaf in apart.get(id(value), {"": value}).items()
    }
    there = {id(value) for value in found.values()}
    return found | {name: leaf for name, leaf in named_leaves(module) if id(leaf) not in there}


def entries_of(module: nn.Module) -> StateEntries:
    """Return the module's entries as they are now, parameters by their leaves."""
    called = dict(named_leaves(module))
    names: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in called.values()}
    buffers = {id(buffer) for buffer in module.buffers()}
    found = StateEntries({})
    for name, value in state_of(module).items():
        parameter = (
            own if isinstance(value, Tensor) and (own := as_parameter(value)) in names else called.get(name)
        )
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
    """Return the first name of each parameter's leaves, in the order of `named_parameters()`.

    The names of `named_parameters()` are used, with a warning, if the module's `state_dict()` raises.
    """
    try:
        entries = entries_of(module)
    except Exception as error:
        warn(
            f"model.state_dict() raises {type(error).__name__}: {error}. The names of named_parameters() "
            "are used instead, and nothing can be saved"
        )
        found: dict[nn.Parameter, str] = {}
        for name, parameter in named_leaves(module):
            found.setdefault(parameter, name)
        return found
    return {parameter: names[0] for parameter, names in entries.parameters.items()}


def load_rest(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load extra state, and whatever else hooks add to state dicts, into the modules that it belongs to."""
    if values:
        with torch.no_grad():
            module.load_state_dict(dict(values), strict=False)


@dataclass(frozen=True)
class Selection:
    """Which entries of a model are read or saved: all, those that are trained, or those of some names.

    trainable_only: leave out frozen parameters, buffers and extra state. include: shell patterns of names;
    without any, all names. A tied parameter is chosen by any of its names, and has all of them."""

    trainable_only: bool = False
    include: tuple[str, ...] = ()

    @classmethod
    def of(cls, trainable_only: bool, include: str | Iterable[str] | None) -> Selection:
        """The selection that a caller asks for. Raises UsageError for no patterns, and for what is none."""
        if include is None:
            return cls(trainable_only)
        patterns = (include,) if isinstance(include, str) else tuple(include)
        if not patterns:
            raise UsageError("include is empty: leave it out to take all names, or give a pattern")
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise UsageError(
                    "include takes shell patterns of names, such as '*.lora_*' or a list of them, got "
                    f"{type(pattern).__name__}"
                )
        return cls(trainable_only, patterns)

    def chosen(self, entries: StateEntries, trained: Collection[nn.Parameter]) -> set[str]:
        """The names of the chosen entries. Raises UsageError for a pattern that matches none, and for none.

        trained: the parameters that the engine trains.
        """
        for pattern in self.include:
            if not any(fnmatchcase(name, pattern) for name in entries.names):
                raise UsageError(
                    f"include: {pattern!r} matches no parameter or buffer; the model has "
                    f"{some(list(entries.names))}"
                )
        found = {
            name
            for parameter, names in entries.parameters.items()
            if self._has(names) and (parameter in trained or not self.trainable_only)
            for name in names
        }
        if not self.trainable_only:
            found |= {name for name in (*entries.buffers, *entries.rest) if self._has((name,))}
        if not found and entries.names:
            raise UsageError(
                "no parameter is left: trainable_only and include leave out all of "
                f"{some(list(entries.names))}"
            )
        return found

    def _has(self, names: Iterable[str]) -> bool:
        return not self.include or any(fnmatchcase(n, pattern) for n in names for pattern in self.include)


EVERYTHING = Selection()
