"""Bytes of the device that the engine holds, by kind, and who follows them over a step, unit by unit."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add
from typing import Literal, Protocol

from accelz import FlatBuffer, KeptBuffer


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of the device that the engine holds.

    parameters: shards, and whole buffers that stay. gathered: whole buffers in use. gradients: whole buffers
    and slices. optimizer: masters and moments.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: DeviceBytes) -> DeviceBytes:
        return DeviceBytes(*map(add, astuple(self), astuple(other)))


def held_bytes(buffer: FlatBuffer) -> int:
    """How many bytes of the device a flat buffer has now."""
    return buffer.nbytes if buffer.materialized or isinstance(buffer, KeptBuffer) else 0


PhaseName = Literal["forward", "backward", "step"]


class Tracer(Protocol):
    """Follows steps, or does nothing while nobody has asked for that."""

    def mark(self, phase: PhaseName, unit: str) -> None:
        """A unit comes or goes, or a part of it has been stepped; "" stands for no unit."""
