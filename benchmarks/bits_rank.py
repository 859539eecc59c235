"""One rank that trains variants one after another and tells the bits that came out."""

from __future__ import annotations

import gc
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when the library starts

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import accelz
from accelz import Accelerator
from benchmarks import machine, model, peers
from benchmarks.late_streams import LateStreams

Mode = Literal["default", "deterministic", "late"]
POOL = 4  # batches, trained on in turn


@dataclass(frozen=True)
class Variant:
    """A way of training. config: settings of `zero.Config`; None for plain PyTorch, unsharded.

    alike: variants of the same name must give the same bits.
    """

    alike: str
    config: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """The bits of one run. losses: of each step, fp32. weights: a digest of all masters at the end."""

    losses: list[bytes]
    weights: str

    @property
    def last_loss(self) -> float:
        value: float = struct.unpack("<f", self.losses[-1])[0]
        return value


class BitsRank:
    """Trains on one device. Every run begins with the same model, and is given the same batches."""

    def __init__(self, device: str, size: str, length: int, setting: peers.Setting, seed: int) -> None:
        self._size = size
        self._length = length
        self._setting = setting
        self._seed = seed
        self._accelerator = accelz.use(device)
        self._accelerator.bind(int(os.environ["LOCAL_RANK"]))

    def has_streams(self) -> bool:
        """Whether the device works asynchronously."""
        return self._accelerator.capabilities.asynchronous

    def generates_code(self) -> bool:
        """Whether torch's compiler generates code for the device."""
        return machine.generates_code(self._accelerator.device.type)

    def trace(self, variant: Variant, mode: Mode, steps: int) -> Trace:
        """Train for `steps` steps."""
        rank = int(os.environ["RANK"])
        to = self._accelerator.device
        made = model.make_batches(self._size, self._setting.batch, self._length, rank, POOL)
        batches = [(x.to(to), y.to(to)) for x, y in made]
        gc.collect()  # what the run before has left
        with _mode(mode, self._accelerator, self._seed):
            peer = self._peer(variant)
            losses = [peer.step(*batches[step % POOL]) for step in range(steps)]
            return Trace([struct.pack("<f", loss.float().item()) for loss in losses], _digest(peer.weights()))

    def _peer(self, variant: Variant) -> peers.PlainPeer | peers.ZeroPeer:
        with self._accelerator.device:
            network = model.build(self._size, self._length)
        if variant.config is None:
            return peers.build_plain(network, self._setting)
        return peers.ZeroPeer(network, self._setting, **variant.config)


@contextmanager
def _mode(mode: Mode, accelerator: Accelerator, seed: int) -> Iterator[None]:
    """Kernels of which every run gives the same bits, unless `mode` is "default"; "late": streams delayed."""
    if mode == "default":
        yield
        return
    streams = accelerator.streams
    if mode == "late":
        accelerator.streams = LateStreams(accelerator, seed)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        accelerator.streams = streams


def _digest(weights: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
