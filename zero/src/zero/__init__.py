"""zero: a ZeRO engine (stages 1, 2, 3) for whatever accelerator accelz finds.

engine = zero.initialize(model, optimizer, zero.Config(stage=3, precision="bf16"))
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

Importing this package does not import torch; the first name that needs torch does. So tools that only move
bytes of checkpoints start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.average import EMA
    from zero.config.compilation import Compile
    from zero.config.deepspeed import from_deepspeed
    from zero.config.offload import Offload
    from zero.config.training import Config
    from zero.deferred.deferred_init import init
    from zero.engine import Engine
    from zero.errors import (
        CheckpointError,
        CommunicationError,
        ConfigError,
        CorruptCheckpointError,
        GradientOverflowError,
        ModelError,
        OffloadError,
        OptimizerError,
        RankMismatchError,
        ShardedParameterError,
        StateError,
        UsageError,
        ZeroError,
    )
    from zero.optimizer.lion import Lion
    from zero.planning.plan import plan
    from zero.pretrained import load_pretrained
    from zero.setup.initialization import initialize
    from zero.sharding.forms import register_form
    from zero.tiers.room import OutOfMemoryError
    from zero.version import __version__ as __version__
    from zero.whole.gathered import gathered

_HOME = {  # where each public name lives that is not in zero.errors; imported at its first use
    "Compile": "config.compilation",
    "Config": "config.training",
    "EMA": "average",
    "Engine": "engine",
    "Lion": "optimizer.lion",
    "Offload": "config.offload",
    "OutOfMemoryError": "tiers.room",
    "__version__": "version",
    "from_deepspeed": "config.deepspeed",
    "gathered": "whole.gathered",
    "init": "deferred.deferred_init",
    "initialize": "setup.initialization",
    "load_pretrained": "pretrained",
    "plan": "planning.plan",
    "register_form": "sharding.forms",
}

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "Compile",
    "Config",
    "ConfigError",
    "CorruptCheckpointError",
    "EMA",
    "Engine",
    "GradientOverflowError",
    "Lion",
    "ModelError",
    "Offload",
    "OffloadError",
    "OptimizerError",
    "OutOfMemoryError",
    "RankMismatchError",
    "ShardedParameterError",
    "StateError",
    "UsageError",
    "ZeroError",
    "from_deepspeed",
    "gathered",
    "init",
    "initialize",
    "load_pretrained",
    "plan",
    "register_form",
]


def __getattr__(name: str) -> Any:
    if name not in __all__ and name != "__version__":
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    value = getattr(import_module(f"zero.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
