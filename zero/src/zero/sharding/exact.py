"""Parameters whose bits stay what they are: no cast to a precision, no rounding on their way.

A storage format, such as float8 or packed float4, says how values are kept, not in what they are computed:
the module that holds them converts them with scales of its own. Packed weights may also lie in 16 or 32 bits.
As numbers of their dtype they mean nothing, so rounding them would give wrong values without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from zero.config.training import Config
from zero.errors import ConfigError
from zero.sharding.forms import packed_leaves

_PACKED = ("quant", "packed")
"""Parts of the names of classes and attributes of parameters that hold packed weights."""


def computes_in(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of floating-point numbers to compute in, not only to keep values in."""
    return dtype.is_floating_point and dtype.itemsize > 1


def exact_parameters(model: nn.Module, config: Config) -> set[nn.Parameter]:
    """Return the parameters that keep their dtype and travel as they are.

    These are frozen ones that are in a storage format or that say they are quantised, the leaves inside a
    parameter (see `forms`), and those that `config.exact_parameters` names. Raises ConfigError if a pattern
    there matches nothing.
    """
    frozen = (p for p in model.parameters() if not p.requires_grad and p.is_floating_point())
    stored = {p for p in frozen if not computes_in(p.dtype) or _says_quantised(p)}
    return stored | packed_leaves(model) | set(_named(model, config))


def _says_quantised(parameter: nn.Parameter) -> bool:
    names = [kind.__name__ for kind in type(parameter).__mro__]
    names += [name for name, value in vars(parameter).items() if value is not None and value is not False]
    return any(word in name.lower() for name in names for word in _PACKED)


def _named(model: nn.Module, config: Config) -> Iterator[nn.Parameter]:
    rule = config.exact_parameters
    named = list(model.named_parameters(remove_duplicate=False))
    if callable(rule):
        yield from (parameter for name, parameter in named if rule(name, parameter))
        return
    for pattern in rule:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(
                f"exact_parameters: no parameter is named {pattern!r}; write names as in "
                "model.named_parameters(), with * for any part of them"
            )
        yield from found
