"""Activations on their way between the device and the host, beside the computation.

Each direction has a stream. What a copy reads and writes is held until the device's work is ordered after the
copy: the memory of a value that has left is free for what is queued after `wait_offload`.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property

import torch
from torch import Tensor

from accelz import HOST, Accelerator, Event
from zero.tiers.carrier import Carrier


class Activations:
    """The activations of one engine's graphs. moved: bytes that have begun to leave the device so far."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.moved = 0
        self._accelerator = accelerator
        self._under_way: dict[int, tuple[Tensor, Tensor, Event]] = {}  # by the address of the copy
        self._read: deque[tuple[Tensor, Event]] = deque()  # on the host, with the end of their last copy

    def offload(self, value: Tensor) -> Tensor:
        """Begin to copy a dense tensor to page-locked host memory; returns the copy, which has the same
        strides."""
        host = self._accelerator.memory.empty_host((value.numel(),), value.dtype)
        host = host.as_strided(value.size(), value.stride())
        self.moved += value.nbytes
        self._send(self._outwards, value, host)
        return host

    def reload(self, host: Tensor, device: torch.device) -> Tensor:
        """Begin to copy it back, into new memory."""
        value = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        self._send(self._inwards, host, value)
        return value

    def wait(self, copy: Tensor) -> None:
        """Make the device's later work start after the copy that made `copy`."""
        source, _, event = self._under_way.pop(copy.data_ptr())
        self._accelerator.streams.current().wait(event)
        if source.device == HOST:
            self._read.append((source, event))
        while self._read and self._read[0][1].done():
            self._read.popleft()

    def clear(self) -> None:
        """Wait for the copies that a graph began and did not wait for, and forget them."""
        for _, _, event in self._under_way.values():
            event.synchronize()
        self._under_way.clear()

    def _send(self, carrier: Carrier, source: Tensor, copy: Tensor) -> None:
        self._under_way[copy.data_ptr()] = (source, copy, carrier.send(source, copy))

    @cached_property
    def _outwards(self) -> Carrier:
        return Carrier(self._accelerator)

    @cached_property
    def _inwards(self) -> Carrier:
        return Carrier(self._accelerator)
