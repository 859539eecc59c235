"""The accelerator: a device type with its capabilities and one attribute per role."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from accelz.capabilities import Capabilities
from accelz.roles.collectives import Collectives
from accelz.roles.flat_buffer import FlatBufferStrategy
from accelz.roles.kernels import Kernels
from accelz.roles.memory import Memory
from accelz.roles.rng import Rng
from accelz.roles.streams import Streams


class Accelerator:
    """What a backend's `load()` returns. Subclass it to change a method.

    name: the backend's name. device: where this process's tensors live.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        capabilities: Capabilities,
        memory: Memory,
        streams: Streams,
        rng: Rng,
        collectives: Collectives,
        flat_buffers: FlatBufferStrategy,
        kernels: Kernels,
    ) -> None:
        self.name = name
        self.device = device
        self.capabilities = capabilities
        self.memory = memory
        self.streams = streams
        self.rng = rng
        self.collectives = collectives
        self.flat_buffers = flat_buffers
        self.kernels = kernels

    def device_count(self) -> int:
        """The number of devices of this type that the process can see."""
        return 1

    def bind(self, local_rank: int) -> None:
        """Make this process use the device for `local_rank` (its rank on this node), and set `device` to it.

        It becomes the current device: tensors created on `device.type` without an index go there, and
        counters, streams and random numbers are that device's.
        """

    def flush(self) -> None:
        """Start the recorded work of a lazy-graph device. Does nothing on other devices."""

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Show what the host does in the block, under this name, on the time line of the vendor's profiler.

        name: any text. Ranges of a thread nest; threads have their own. Without `profiler_ranges`, nothing is
        shown.
        """
        return nullcontext()

    def __repr__(self) -> str:
        return f"Accelerator(name={self.name!r}, device={str(self.device)!r})"
