"""Record operations on hollow tensors, and replay them: the memory of deferred initialisation.

Everything is kept by storage. A view of a hollow storage is described by the storage's number and by shape,
strides and offset, so aliases need no bookkeeping of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import accelz
from accelz import HOST, Rng

T = TypeVar("T")


@dataclass(frozen=True)
class Hollow:
    """A view of a hollow storage, as an operation received or returned it."""

    storage: int  # number of the storage in its recording
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Operation:
    """One recorded call. touches: the hollow storages it reads or writes; writes: those that it writes."""

    function: Any
    args: Any
    kwargs: Any
    output: Hollow | None
    touches: set[int]
    writes: set[int]
    generator: torch.Generator | Rng | None = None
    state: Tensor | None = None


@dataclass
class Recording:
    """Operations in order, and the hollow storages they concern."""

    operations: list[Operation] = field(default_factory=list)
    writing: dict[int, list[int]] = field(default_factory=dict)  # storage -> operations that write it
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # storage address -> number

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it is not hollow or the tensor has none."""
        with torch._C.DisableTorchFunction():
            strided = tensor.layout is torch.strided
        return self.numbers.get(storage_of(tensor)._cdata) if strided else None

    def add_storage(self, tensor: Tensor, nbytes: int) -> None:
        storage = storage_of(tensor)
        self.numbers[storage._cdata] = len(self.storages)
        self.storages.append(storage)  # kept alive, so its address stays its own
        self.nbytes.append(nbytes)

    def let_go(self, number: int) -> None:
        """Forget a storage that has its bytes: they last as long as the tensors that use them."""
        storage = self.storages[number]
        self.numbers.pop(storage._cdata, None)
        self.storages[number] = torch.UntypedStorage(0, device=storage.device)

    def record(self, operation: Operation) -> None:
        for storage in operation.writes:
            self.writing.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage, bypassing function modes, which would take that for reading its values."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def allocate(recording: Recording, numbers: Sequence[int]) -> None:
    """Give hollow storages their bytes, uninitialised."""
    for number in numbers:
        recording.storages[number].resize_(recording.nbytes[number])
        recording.let_go(number)


def replay(recording: Recording, numbers: Sequence[int]) -> None:
    """Give hollow storages their values by running the operations recorded for them, in order.

    Other storages that they depend on exist as scratch memory meanwhile.
    """
    targets = [n for n in numbers if recording.numbers.get(recording.storages[n]._cdata) == n]
    if not targets:
        return
    chosen = _closure(recording, targets)
    memory: dict[int, torch.UntypedStorage] = {}
    for number in {s for i in chosen for s in recording.operations[i].touches} | set(targets):
        own = recording.storages[number]
        memory[number] = own if number in targets else torch.UntypedStorage(0, device=own.device)
        memory[number].resize_(recording.nbytes[number])
    with torch.no_grad():
        for index in chosen:
            _run(recording.operations[index], memory)
    for number in targets:  # have values from here on, and are no longer recorded
        recording.let_go(number)


def _closure(recording: Recording, targets: Sequence[int]) -> list[int]:
    """Find the operations that the targets' values depend on.

    They are those that write the targets and, before each of them, those that write what it touches.
    """
    chosen: set[int] = set()
    limits: dict[int, int] = {}
    work = [(n, len(recording.operations)) for n in targets]
    while work:
        storage, limit = work.pop()
        if limits.get(storage, 0) >= limit:
            continue
        limits[storage] = limit
        for index in recording.writing.get(storage, ()):
            if index < limit and index not in chosen:
                chosen.add(index)
                work.extend((s, index) for s in recording.operations[index].touches if s != storage)
    return sorted(chosen)


def _run(operation: Operation, memory: dict[int, torch.UntypedStorage]) -> None:
    def real(reference: Hollow) -> Tensor:
        storage = memory[reference.storage]
        empty = torch.empty(0, dtype=reference.dtype, device=storage.device)
        return empty.set_(storage, reference.offset, reference.size, reference.stride)

    args, kwargs = tree_map_only(Hollow, real, (operation.args, operation.kwargs))
    if operation.generator is None:
        value = operation.function(*args, **kwargs)
    else:
        assert operation.state is not None
        now = operation.generator.get_state()
        operation.generator.set_state(operation.state)
        value = operation.function(*args, **kwargs)
        operation.generator.set_state(now)
    if operation.output is not None:
        real(operation.output).copy_(value)


def generator_of(device: torch.device) -> torch.Generator | Rng:
    """The default generator of a device."""
    return torch.default_generator if device == HOST else accelz.current().rng


def each_in(kind: type[T], value: Any) -> list[T]:
    """Return the values of type `kind` among an operator's arguments."""
    return [each for each in tree_leaves(value) if isinstance(each, kind)]
