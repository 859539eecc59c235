"""`model.no_sync()`, for loops that were written for DistributedDataParallel."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

from torch import nn

from zero.engine import Engine
from zero.errors import UsageError
from zero.sharding.lifetime import Uncopied

_NAME = "no_sync"


def offer_no_sync(model: nn.Module, engine: Engine) -> None:
    """Have `model.no_sync()` be the engine's, unless the model has something of that name."""
    if not hasattr(model, _NAME):
        model.__dict__[_NAME] = _NoSync(engine)


class _NoSync(Uncopied):
    """The model's method. The model must not keep the engine alive; see `sharding.lifetime`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> AbstractContextManager[None]:
        engine = self._engine()
        if engine is None:
            raise UsageError(
                "model.no_sync() is that of the model's engine, which no longer exists: keep what "
                "zero.initialize returned for as long as you train"
            )
        return engine.no_sync()
