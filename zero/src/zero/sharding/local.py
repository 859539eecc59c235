"""Parameters that differ by rank: those of modules that `Config(local_modules=...)` names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from zero.config.training import Config
from zero.errors import ConfigError
from zero.sharding.forms import named_leaves


def apart_of(name: str, config: Config) -> frozenset[str]:
    """The dimensions of the mesh along which a parameter or buffer of this name differs."""
    found = (dim for pattern, dim in config.local_modules if _matches(name, pattern))
    return frozenset(found)


def local_parameters(model: nn.Module, config: Config) -> dict[nn.Parameter, frozenset[str]]:
    """The dimensions along which parameters differ, for those that do.

    Raises ConfigError if a pattern matches no parameter, unless models differ altogether ("*"): a stage of a
    pipeline need not have experts.
    """
    if not config.local_modules:
        return {}
    found: dict[nn.Parameter, frozenset[str]] = {}
    for name, parameter in named_leaves(model):
        if apart := apart_of(name, config):
            found[parameter] = found.get(parameter, frozenset()) | apart
    if any(pattern == "*" for pattern, _ in config.local_modules):
        return found
    names = [name for name, _ in named_leaves(model)]
    for pattern, _ in config.local_modules:
        if not any(_matches(name, pattern) for name in names):
            raise ConfigError(
                f"local_modules: no module with parameters is named {pattern!r}; write names as in "
                "model.named_modules(), with * for any part of them"
            )
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a parameter is, or is in a module that is, named so."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
