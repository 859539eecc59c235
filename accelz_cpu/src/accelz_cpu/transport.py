"""The interface of what carries a group's collectives, where that is not gloo for the whole group."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor


class Transport(ABC):
    """Carries a group's collectives. Each starts on dense tensors in host memory and returns its handle.

    timeout: seconds that the handle's `wait` may take. op: SUM, MAX or MIN of channel.py. All ranks issue the
    same movements (all_gather, all_to_all, broadcast) in the same order, and likewise the same reductions;
    the two sequences are not ordered against each other. Failures raise RuntimeError, and after a failed
    collective the transport cannot be used again.
    """

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, timeout: float, in_place: bool = False) -> dist.Work:
        """in_place: `output` is memory that the ranks of a host have in common, and `shard` a part of it."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> dist.Work: ...

    @abstractmethod
    def reduce_scatter(self, output: Tensor, full: Tensor, timeout: float, op: int) -> dist.Work:
        """dtypes: native.DTYPES."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, timeout: float, op: int) -> dist.Work:
        """dtypes: native.DTYPES."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of shared memory that this rank holds for the group now."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group once the others have what they need from this rank, and free its memory."""
