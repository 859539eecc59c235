"""Lies of the collectives role."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelz import (
    CollectiveError,
    Collectives,
    Group,
    Handle,
)
from accelz.roles.collectives import DONE

from .kept import keep


class TwoInTurn(Collectives):
    """Two buffers are given out in turn, whether or not their readers have come."""

    def empty(self, numel: int, *args: Any) -> Tensor:
        made: dict[Any, list[Tensor]] = self.__dict__.setdefault("made", {})
        pair = made.setdefault((numel, *args[:-1]), [])
        pair.append(super().empty(numel, *args) if len(pair) < 2 else pair.pop(0))
        return pair[-1]


class AnotherHalf(Collectives):
    def empty(self, numel: int, dtype: torch.dtype, *args: Any) -> Tensor:
        return super().empty(numel, torch.bfloat16 if dtype is torch.float16 else dtype, *args)


class InputDestroyed(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().reduce_scatter(output, full, group, *args, **kwargs).wait()
        full.zero_()
        return DONE


class OnTheFirstStream(Collectives):
    """Takes the input as the first stream has it, whichever is in use."""

    def init(self, *args: Any, **options: Any) -> Group:
        self._first = torch.accelerator.current_stream()
        return super().init(*args, **options)

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Any) -> Any:
        with self._first:
            return super()._start_all_gather(output, shard, group)


class WaitsWhereItBegan(Collectives):
    """Waiting orders the stream that the collective was begun on."""

    def _start_reduce_scatter(self, *args: Any) -> Any:
        work, begun = super()._start_reduce_scatter(*args), torch.accelerator.current_stream()
        wait = work.wait

        def waited(timeout: Any = None) -> bool:
            with begun:
                return wait()

        work.wait = waited  # type: ignore[method-assign]
        return work


class NarrowWire(Collectives):
    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Any) -> Any:
        if shard.dtype is torch.float32:
            shard.copy_(shard.bfloat16())
        return super()._start_all_gather(output, shard, group)


class CodesRefused(Collectives):
    def all_gather(self, output: Tensor, *args: Any, **kwargs: Any) -> Handle:
        if output.dtype is torch.uint8:
            raise CollectiveError("no such dtype")
        return super().all_gather(output, *args, **kwargs)


class HalvesStay(Collectives):
    def broadcast(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
        half = tensor.is_floating_point() and tensor.itemsize == 2
        return super().broadcast(tensor.clone() if half else tensor, *args, **kwargs)


class MaximumFromZero(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, op: Any = "sum", async_op: bool = False) -> Handle:
        super().all_reduce(tensor, group, op).wait()
        if op == "max":
            tensor.clamp_(min=0)
        return DONE


class HostSums(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, op: Any = "sum", async_op: bool = False) -> Handle:
        return super().all_reduce(tensor, group, "sum" if tensor.numel() == 3 else op, async_op)


class WholeJobOnly(Collectives):
    """Where fewer ranks than all reduce, nothing happens."""

    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        if group.process_group is not torch.distributed.group.WORLD and tensor.numel() > 1:
            return DONE
        return super().all_reduce(tensor, group, *args, **kwargs)


class ReductionsNotAsync(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, op: Any = "sum", *_: Any) -> Handle:
        return super().reduce_scatter(output, full, group, op)


class KeepsALittle(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        keep(torch.ones(1 << 10, device=output.device))
        return super().all_gather(output, shard, group, async_op)


class BroadcastRaises(Collectives):
    def broadcast(self, tensor: Tensor, source: int, group: Any, async_op: bool = False) -> Handle:
        raise OSError("no link")


class RaisingHandle(Handle):
    def wait(self) -> None:
        raise KeyError("sequence number")


class WaitRaises(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().all_reduce(tensor, group, *args, **kwargs).wait()
        return RaisingHandle()


class GroupsAreLists(Collectives):
    def new_group(self, ranks: Any, timeout: float, members_only: bool = False) -> Any:
        return [super().new_group(ranks, timeout, members_only)]


class BuffersKept(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        return super().all_gather(keep(output), shard, group, async_op)


class WrongSlice(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any) -> Handle:
        super().reduce_scatter(output, full, group, *args).wait()
        output[-1] += 1 if group.size > 1 else 0
        return DONE


class SendersBackwards(Collectives):
    """What the ranks send, the last one's first."""

    def all_to_all(self, output: Tensor, parts: Tensor, received: Any, *args: Any) -> Handle:
        super().all_to_all(output, parts, received, *args).wait()
        output.copy_(torch.cat(output.split(list(received))[::-1]))
        return DONE


class AverageForSum(Collectives):
    def all_reduce(self, tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        super().all_reduce(tensor, group, *args, **kwargs).wait()
        tensor.div_(group.size) if tensor.is_floating_point() else None
        return DONE


class SourceIgnored(Collectives):
    def broadcast(self, tensor: Tensor, source: int, group: Any, async_op: bool = False) -> Handle:
        return super().broadcast(tensor, 0, group, async_op)


class NotAsync(Collectives):
    def all_gather(self, output: Tensor, shard: Tensor, group: Any, async_op: bool = False) -> Handle:
        return super().all_gather(output, shard, group)


class BarrierOpen(Collectives):
    def barrier(self, group: Any) -> None:
        return


class MisfitTaken(Collectives):
    def reduce_scatter(self, output: Tensor, full: Tensor, group: Any, *args: Any, **kwargs: Any) -> Handle:
        whole = full.to(output.dtype)[: output.numel() * group.size]
        return super().reduce_scatter(output, whole, group, *args, **kwargs)


class NoHandle(Collectives):
    def all_gather(self, *args: Any, **kwargs: Any) -> Handle:
        super().all_gather(*args, **kwargs)
        return None  # type: ignore[return-value]
