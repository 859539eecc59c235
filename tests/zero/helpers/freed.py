"""Engines that nobody holds any more.

They train by `engine.backward`, which has autograd run in the calling thread. Where `loss.backward()` runs
in a thread of the device, that thread lets go of the graph a moment later.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.models import fresh as language_model
from tests.zero.helpers.models import language_loss
from tests.zero.helpers.training import adamw, collected


def trained_once(context: Context, settings: dict[str, Any]) -> weakref.ref[zero.Engine]:
    model = language_model()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **settings))
    engine.backward(language_loss(model, 0, context.rank))
    engine.step()
    return weakref.ref(engine)


@collected()
def freed_body(context: Context, **settings: Any) -> tuple[bool, int]:
    """Whether an engine without references is gone, and the bytes of device memory still in use."""
    trained_once(context, settings)
    gc.collect()
    before = context.accelerator.memory.stats().allocated
    alive = trained_once(context, settings)
    gc.collect()
    exact = context.accelerator.capabilities.counts_every_byte
    return alive() is None, context.accelerator.memory.stats().allocated - before if exact else 0
