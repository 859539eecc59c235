"""The configuration: how a model is trained, and where its state lives.

Importing this package does not import torch; `Config`, which needs it, does.

Modules, lowest first:

paths, sizes            `~` in paths; "8GiB" and back
settings_file           settings given as a mapping or as a file
output                  what `zero consolidate` can be asked for
validated               settings whose errors say what to write instead of a wrong value
compilation, offload    compiled training; where state lives between its uses
training                the one validated configuration
deepspeed               DeepSpeed's configuration, translated
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.config.training import Config as Config


def __getattr__(name: str) -> Any:
    if name != "Config":
        raise AttributeError(f"module 'zero.config' has no attribute {name!r}")
    from zero.config.training import Config

    return Config
