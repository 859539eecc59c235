"""Accelerators that tell the lies of a round, under the name "liar"."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path
from typing import Any

import torch

from accelz import (
    Accelerator,
    BackendUnavailableError,
    Capabilities,
)
from accelz.conformance import test_leaks
from accelz_cpu.accelerator import build

from .accelerators import NotARole, OwnFlush, ResizeRefused
from .rounds import ROUNDS, SIM_ROUNDS, Lie
from .streams import EventsHang, LateStreams

LIAR = """
from accelz.hooks import BackendDescriptor, Probe, hookimpl

def load():
    from tests.accelz.liars import told
    return told.{call}

@hookimpl
def accelz_backend():
    return BackendDescriptor("liar", 2, 5, lambda: Probe(True, "says so"), load)
"""
"""A backend's plugin, which loads what `call`, a call of a function of this module, returns."""

BRIEFLY = 0.2
"""Seconds that the kit waits for what a lie keeps: it never comes back."""

NOTHING = dict.fromkeys(Capabilities().flags(), False) | {"dtypes": frozenset({torch.float32})}
"""As flags: no capability is declared."""


def tell(round_: str) -> Accelerator:
    """The CPU accelerator with all lies of a round in it, under the name "liar"."""
    return _spoil(build(), ROUNDS[round_])


def tell_on_sim(round_: str) -> Accelerator:
    """The simulated accelerator with all lies of a round in it, under the name "liar"."""
    from accelz_sim.accelerator import build as build_sim

    return _spoil(build_sim(), SIM_ROUNDS[round_])


def modest(on_sim: bool) -> Accelerator:
    """An accelerator that declares nothing of what it can do, under the name "liar"."""
    if on_sim:
        from accelz_sim.accelerator import build as build_sim

        accelerator, flags = build_sim(), NOTHING
    else:
        # Ranks share a CPU, and the kit starts some only where that is declared.
        accelerator, flags = build(), NOTHING | {"shared_device": True}
        accelerator.streams.__class__ = LateStreams
        accelerator.__class__ = OwnFlush
    accelerator.name = "liar"
    accelerator.capabilities = Capabilities(**flags)  # type: ignore[arg-type]
    return accelerator


def without_resizing() -> Accelerator:
    """The CPU accelerator that declares nothing and whose storages refuse to be resized, named "liar"."""
    accelerator = modest(on_sim=False)
    accelerator.__class__ = type("Refusing", (ResizeRefused, type(accelerator)), {})
    return accelerator


def hanging() -> Accelerator:
    """The CPU accelerator with an event that is never passed, under the name "liar"."""
    return _spoil(build(), {"events hang": Lie("Event.synchronize", "the_interface", "streams", EventsHang)})


class HeldByOne(Accelerator):
    """Devices of which each belongs to one process at a time. folder: where processes lock them."""

    folder: Path
    devices: int

    def device_count(self) -> int:
        return self.devices

    def bind(self, local_rank: int) -> None:
        if local_rank >= self.devices:
            raise BackendUnavailableError(f"local rank {local_rank} has no device")
        held: dict[int, int] = self.__dict__.setdefault("held", {})
        if local_rank not in held:
            held[local_rank] = os.open(self.folder / f"device-{local_rank}", os.O_CREAT)
            fcntl.flock(held[local_rank], fcntl.LOCK_EX | fcntl.LOCK_NB)
        super().bind(local_rank)


def exclusive(devices: int, folder: Path) -> Accelerator:
    """The simulated accelerator with so many devices, each for one process, under the name "liar"."""
    from accelz_sim.accelerator import build as build_sim

    accelerator = _spoil(build_sim(), {"": Lie("", "", "", HeldByOne, {"shared_device": False})})
    assert isinstance(accelerator, HeldByOne)
    accelerator.devices, accelerator.folder = devices, folder
    return accelerator


def _spoil(accelerator: Accelerator, lies: dict[str, Lie]) -> Accelerator:
    test_leaks.SETTLE_SECONDS = BRIEFLY  # in whatever process of the kit this is
    accelerator.name = "liar"
    for role in {lie.role for lie in lies.values()}:
        told = (lie.mixin for lie in lies.values() if lie.role == role and lie.mixin is not object)
        mixins = tuple(dict.fromkeys(told))
        target: Any = getattr(accelerator, role) if role else accelerator
        if NotARole in mixins:
            setattr(accelerator, role, NotARole())
        elif mixins:
            target.__class__ = type("Spoiled", (*mixins, type(target)), {})
    flags = {name: value for lie in lies.values() for name, value in lie.flags.items()}
    accelerator.capabilities = dataclasses.replace(accelerator.capabilities, **flags)
    return accelerator
