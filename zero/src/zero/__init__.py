"""zero: a ZeRO engine (stages 1, 2, 3) for whatever accelerator accelz finds.

engine = zero.initialize(model, optimizer, zero.Config(stage=3, precision="bf16"))
for batch in loader:
    loss = engine(batch).loss
    engine.backward(loss)
    engine.step()
"""

from zero.access import gathered
from zero.compiled.settings import Compile
from zero.config import Config
from zero.deferred_init import init
from zero.engine import Engine
from zero.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    CorruptCheckpointError,
    ModelError,
    OffloadError,
    OptimizerError,
    OutOfMemoryError,
    RankMismatchError,
    ShardedParameterError,
    StateError,
    UsageError,
    ZeroError,
)
from zero.initialize import initialize
from zero.lion import Lion
from zero.offload import Offload
from zero.pretrained import load_pretrained

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "Compile",
    "Config",
    "ConfigError",
    "CorruptCheckpointError",
    "Engine",
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
    "gathered",
    "init",
    "initialize",
    "load_pretrained",
]
__version__ = "0.1.0"
