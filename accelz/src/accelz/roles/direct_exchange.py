"""Collectives of host tensors in one exchange: each rank sends its part to every other rank at once.

gloo passes an all-reduce around a ring of N ranks, in 2 (N - 1) messages that wait for each other, and its
reduce-scatter is an all-reduce of a copy. Sent directly, a small one takes as long as a single message. A
direct reduce-scatter moves as few bytes as any; a direct all-reduce moves N / 2 times as many, and a direct
all-gather needs N copies of its input, so these two are for small tensors.

Values are combined in rank order, so the result has the same bits on every rank. 16-bit floats are added in
fp32 and rounded once; max and min keep NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 1 << 19
"""Bytes that a rank may send at the most in an exchange that is chosen for its latency."""

Exchange = Callable[[Tensor, Tensor], dist.Work]
"""Starts an all-to-all of equal parts: (received, sent), both 1-D in bytes."""

_COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class FinishedOnWait(dist.Work):
    """Another collective, whose result the first `wait` turns into this one's.

    finish(): what is left to do on the host once `inner` is complete.
    """

    def __init__(self, inner: dist.Work, finish: Callable[[], object]) -> None:
        super().__init__()
        self._inner = inner
        self._finish: Callable[[], object] | None = finish
        self._lock = Lock()

    def wait(self, timeout: Any = None) -> bool:
        with self._lock:  # a second thread must not return before the result, nor overwrite newer values
            if self._finish is not None:
                self._inner.wait()
                self._finish()
                self._finish = None
        return True


def is_small(nbytes: int, size: int) -> bool:
    """Whether `nbytes` to each of `size` ranks are fastest sent directly."""
    return 0 < nbytes * size <= SMALL


def all_gather(output: Tensor, shard: Tensor, size: int, exchange: Exchange) -> dist.Work:
    """Gather `shard` of every rank in `output`, both contiguous."""
    return exchange(as_bytes(output), as_bytes(shard).repeat(size))


def all_reduce(tensor: Tensor, size: int, op: Any, exchange: Exchange) -> dist.Work:
    """Reduce `tensor` (contiguous) over `size` ranks, in place."""
    sent = tensor.detach().view(-1).repeat(size)
    return _reduce(tensor, sent, size, op, exchange)


def reduce_scatter(output: Tensor, full: Tensor, size: int, op: Any, exchange: Exchange) -> dist.Work:
    """Reduce `full` over `size` ranks, and leave this rank's part in `output`, both contiguous."""
    return _reduce(output, full.detach(), size, op, exchange)


def _reduce(output: Tensor, sent: Tensor, size: int, op: Any, exchange: Exchange) -> dist.Work:
    received = torch.empty_like(sent)

    @torch.inference_mode()  # a write to the caller's tensor is recorded by no graph, as with gloo itself
    def finish() -> None:
        _combine(output.view(-1), received.view(size, -1), op)

    return FinishedOnWait(exchange(as_bytes(received), as_bytes(sent)), finish)


def _combine(output: Tensor, rows: Tensor, op: Any) -> None:
    combine = _COMBINE[op]
    wide = rows.dtype in (torch.bfloat16, torch.float16) and op == dist.ReduceOp.SUM
    total = rows[0].float() if wide else output.copy_(rows[0])
    for row in rows[1:]:
        combine(total, row, out=total)
    if wide:
        output.copy_(total)


def as_bytes(tensor: Tensor) -> Tensor:
    """View as bytes what only has to be moved: gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
