"""Streams that fall behind at random, to show work that is not ordered after what it reads or overwrites."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from accelz import Accelerator, Stream, Streams

WIDTH = 2048
"""Of the square matrices whose products keep a stream busy: some 25 µs each on a large GPU."""
MOST = 40
"""Products in one delay, at most: longer than the work of a unit of the models that are trained here."""


class LateStreams(Streams):
    """The accelerator's streams, with a random delay before and after what is queued on a side stream.

    The delay after it comes twice, on the side stream and on the one that is current again, so that either of
    them may run ahead of the other. Values are not touched: results must not change.
    """

    def __init__(self, accelerator: Accelerator, seed: int) -> None:
        self._inner = accelerator.streams
        self._random = random.Random(seed)
        self._factor = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=accelerator.device)
        self._product = torch.empty_like(self._factor)

    def current(self) -> Stream:
        return self._inner.current()

    def new(self, priority: int = 0) -> Stream:
        return self._inner.new(priority)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with self._inner.use(stream):
            self._delay()
            yield
            self._delay()
        self._delay()

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        self._inner.keep_alive(tensor, stream)

    def synchronize(self) -> None:
        self._inner.synchronize()

    @torch.no_grad()
    def _delay(self) -> None:
        for _ in range(self._random.randrange(MOST)):
            torch.mm(self._factor, self._factor, out=self._product)
