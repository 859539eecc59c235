"""A backend that plays one rank of any job in one process: its device has shapes and no values.

The device is torch's meta device. Its bytes are counted as an allocator would count them, and what is read
from it is zero. Collectives move nothing: they are noted, with the ranks that they are over, those that torch
itself issues among them. On the host they give what ranks equal to this one would give; so does the store.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelz import (
    HOST,
    Accelerator,
    BackendDescriptor,
    FlatBuffer,
    FlatBufferStrategy,
    HostRng,
    Kernels,
    Memory,
    MemoryStats,
    NullStreams,
    Slot,
    hookimpl,
)
from accelz.capabilities import Capabilities
from accelz.hooks import Probe
from accelz.ranks.group import Group
from accelz.roles.collectives import Collectives
from accelz.updates import Update

META = torch.device("meta")
CAPACITY = 80 << 30
Noted = tuple[str, tuple[int, ...], int, str]
"""A collective: its name, the ranks that it is over, the elements of its largest buffer, their dtype."""


class PlayedStore(dist.Store):
    """A job's store in which every rank has said what this one says, and is wherever this one waits."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[_of_any(key)] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[_of_any(key)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(_of_any(key) in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        return

    def deleteKey(self, key: str) -> bool:  # the name that torch's native half calls
        return self._values.pop(_of_any(key), None) is not None


def _of_any(key: str) -> str:
    """A key under which a rank says something, as `Exchange` has them, without the rank's number."""
    return re.sub(r"/rank \d+$", "/rank", key)


class PlayedMemory(Memory):
    """Counts the bytes of storages from their making, through their resizing, to their end."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}  # by storage
        self._allocated = self._peak = 0

    def stats(self) -> MemoryStats:
        return MemoryStats(self._allocated, self._peak, CAPACITY, CAPACITY - self._allocated)

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def made(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it ends, if it is on the device."""
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage._cdata not in self._bytes:
            weakref.finalize(storage, self._count, storage._cdata, 0).atexit = False
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._count(storage._cdata, storage.nbytes())

    def _count(self, storage: int, nbytes: int) -> None:
        self._allocated += nbytes - self._bytes.pop(storage, 0)
        self._peak = max(self._peak, self._allocated)
        if nbytes:
            self._bytes[storage] = nbytes


class PlayedBuffers(FlatBufferStrategy):
    """Parameters become views where they are, as nothing has to be copied."""

    def flatten(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], numel: int, dtype: torch.dtype
    ) -> FlatBuffer:
        buffer = FlatBuffer(torch.empty(numel, dtype=dtype, device=META), parameters, slots)
        buffer.bind()
        return buffer


class PlayedKernels(Kernels):
    """Operations that take no memory beside their results, which they need not write."""

    def step(self, update: Update) -> None:
        return

    def norm_and_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.zeros(2, dtype=torch.float32, device=tensors[0].device)

    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        return

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        return


class _Over(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class PlayedCollectives(Collectives):
    """issued: all collectives so far, those that torch itself has issued among them. made: how many groups
    have been, each a call of every rank of the job.

    Buffers are counted in memory now at the latest: what the engine makes in hooks, no dispatch mode sees.
    """

    def __init__(self, memory: PlayedMemory) -> None:
        super().__init__("fake")
        self.issued: list[Noted] = []
        self.made = 0
        self._memory = memory

    def _make_group(self, ranks: list[int] | None, timeout: timedelta, members_only: bool) -> Any:
        self.made += 1
        return super()._make_group(ranks, timeout, members_only)

    def note(self, op: str, process_group: dist.ProcessGroup, *buffers: Tensor) -> dist.Work:
        for each in buffers:
            self._memory.made(each)
        largest = max(buffers, key=Tensor.numel)
        ranks = tuple(dist.get_process_group_ranks(process_group))
        self.issued.append((op, ranks, largest.numel(), str(largest.dtype)))
        return _Over()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        output.view(group.size, -1).copy_(shard.expand(group.size, -1))
        return self.note("all_gather", group.process_group, output, shard)

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        return self.note("reduce_scatter", group.process_group, full, output)

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        return self.note("all_to_all", group.process_group, output, parts)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(group.size)
        return self.note("all_reduce", group.process_group, tensor)

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        return self.note("broadcast", group.process_group, tensor)


class Played(Accelerator):
    """issued: see `PlayedCollectives`."""

    memory: PlayedMemory
    collectives: PlayedCollectives

    def __init__(self) -> None:
        memory = PlayedMemory()
        torch._register_device_module(META.type, ModuleType("torch.meta"))  # as a vendor's library does
        super().__init__(
            name="played",
            device=META,
            capabilities=Capabilities(
                storage_resize=True,
                exact_memory=True,
                dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            ),
            memory=memory,
            streams=NullStreams(),
            rng=HostRng(),
            collectives=PlayedCollectives(memory),
            flat_buffers=PlayedBuffers(META),
            kernels=PlayedKernels(),
        )

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Count what is allocated in the block, and have it read zeros."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, nbytes: int) -> None:
            resize(storage, nbytes)
            if storage.device.type == META.type:
                self.memory.resized(storage)

        with _Device(self), patch.object(torch.UntypedStorage, "resize_", counted):
            yield


class _Device(TorchDispatchMode):
    """What the device does in an operation, beside its shapes."""

    def __init__(self, accelerator: Played) -> None:
        super().__init__()
        self._memory = accelerator.memory
        self._collectives = accelerator.collectives

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local tensors come here
        kwargs = kwargs or {}
        if read := _READS.get(func.overloadpacket):
            found = read(*args, **kwargs)
            if found is not None:
                return found
        if func.namespace == "_c10d_functional" and isinstance(args[-1], str) and args[-1]:
            self._note(func, args)
        result = func(*args, **kwargs)
        if not any(each.alias_info for each in func._schema.returns):
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self._memory.made(each)
        return result

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        self._collectives.note(f"torch's {func.overloadpacket.__name__}", group, args[0])


def _moved(tensor: Tensor, **to: Any) -> Any:
    """`tensor.to(...)` from the device to the host."""
    if not tensor.is_meta or torch.device(to.get("device") or META).type == META.type:
        return None
    return torch.zeros(tensor.shape, dtype=to.get("dtype") or tensor.dtype, device=HOST)


def _copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    return into.zero_() if source.is_meta and not into.is_meta else None


def _scalar(tensor: Tensor) -> Any:
    return tensor.new_zeros((), device=HOST).item() if tensor.is_meta else None


_READS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._to_copy: _moved,
    torch.ops.aten.copy_: _copied,
    torch.ops.aten._local_scalar_dense: _scalar,
}


@hookimpl
def accelz_backend() -> BackendDescriptor:
    return BackendDescriptor("played", 2, -1, lambda: Probe(True, "plays a rank"), Played)
