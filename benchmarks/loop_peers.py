"""zero at stage 3 in two loops: one that the engine counts, and PyTorch's own, with and without clipping;
and with the optimizer's part of a step as a graph of the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

import zero
from benchmarks.model import Decoder
from benchmarks.peers import Peer, Setting, ZeroPeer, optimizers_of

LIMIT = 1.0  # of the gradients' norm


class LoopPeer(Peer):
    """PyTorch's own loop. clips: whether it clips, by torch's function."""

    def __init__(self, model: Decoder, setting: Setting, clips: bool, **config: Any) -> None:
        config = {"precision": setting.precision, "timeout": setting.timeout, "stage": 3, **config}
        self._model, self._clips = model, clips
        self._optimizers = optimizers_of(model, setting)
        self._engine = zero.initialize(model, self._optimizers, zero.Config(**config))
        self._engine.traffic.clear()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._model(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clips:
            nn.utils.clip_grad_norm_(self._model.parameters(), LIMIT)
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(self._engine.traffic.bytes)


PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "zero3-counted": partial(ZeroPeer, stage=3, gradient_accumulation_steps=1),
    "zero3-loop": partial(LoopPeer, clips=False),
    "zero3-counted-clip": partial(ZeroPeer, stage=3, gradient_accumulation_steps=1, clip_norm=LIMIT),
    "zero3-loop-clip": partial(LoopPeer, clips=True),
    "zero3-captured": partial(ZeroPeer, stage=3, capture_step=True),
}
