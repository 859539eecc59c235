"""One-dimensional values in any tier: a tensor on the device or the host, or what must be read to be used."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, NoReturn, SupportsIndex

import torch
from torch import Tensor

from accelz import HOST
from zero.errors import UsageError


class Stored(ABC):
    """One-dimensional values that must be read to be used.

    Slices are stored values, too; there is no arithmetic. dtype: that of the values when read. what: names
    them in errors.
    """

    what: ClassVar[str] = "values on disk"

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._numel = numel

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            f"{self.what} cannot be pickled or copied: engine.save_checkpoint saves them, and "
            "engine.full_optimizer_state(name) returns those of a parameter"
        )

    @property
    def device(self) -> torch.device:
        """Where they are first when they are read."""
        return HOST

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, window: slice) -> Stored:
        begin, end, step = window.indices(self._numel)
        if step != 1:
            raise ValueError("stored values can only be sliced with step 1")
        return self.part(begin, max(end, begin))

    def to(self, device: torch.device) -> Tensor:
        """Return a copy on `device`, shape (numel,)."""
        return self.read().to(device)

    def read(self) -> Tensor:
        """Return a copy in host memory, shape (numel,)."""
        values = torch.empty(self._numel, dtype=self.dtype, device=HOST)
        self.read_into(values)
        return values

    @abstractmethod
    def read_into(self, out: Tensor) -> None:
        """Fill `out`, contiguous, of this dtype, in host memory."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Overwrite with `values`, (numel,), from any device and of any dtype."""

    @abstractmethod
    def part(self, begin: int, end: int) -> Stored:
        """Return the values from `begin` up to `end`."""


Values = Tensor | Stored


class Column(NamedTuple):
    """One of the tensors of a record: values in one dtype, each for `every` elements."""

    dtype: torch.dtype
    every: int = 1

    @property
    def bytes_each(self) -> float:
        """Bytes per element of the record."""
        return self.dtype.itemsize / self.every

    def numel(self, elements: int) -> int:
        """How many values there are beside a record's elements."""
        return -(-elements // self.every)

    def nbytes(self, elements: int) -> int:
        return self.numel(elements) * self.dtype.itemsize

    def window(self, elements: slice) -> slice:
        """The values of a stretch of elements, which begins where one of its values does."""
        return slice(elements.start // self.every, self.numel(elements.stop))


def longest_block(columns: Iterable[Column]) -> int:
    """Return how many elements of a record must stay together, counted from its beginning."""
    return max((column.every for column in columns), default=1)


@contextmanager
def lasting() -> Iterator[None]:
    """Let tensors made in the block be changed in place later, whatever mode the caller is in.

    In `torch.inference_mode()`, an evaluation would otherwise make tensors that no optimizer may step.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of masters of parameters in `dtype`, and of sums of their gradients."""
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32


@contextmanager
def changing(values: Values) -> Iterator[Tensor]:
    """Yield the values as a tensor to write to; those on disk are read, and written back after the block."""
    if isinstance(values, Tensor):
        yield values
    else:
        copy = values.read()
        yield copy
        values.write(copy)


def in_memory(values: Values) -> Tensor:
    """The values as a tensor; of those on disk, a copy on the host."""
    return values if isinstance(values, Tensor) else values.read()


def put(values: Values, window: slice, source: Tensor) -> None:
    """Overwrite a stretch of values with `source`, of any device and dtype."""
    if isinstance(values, Stored):
        values[window].write(source)
    else:
        values[window].copy_(source)


def joined(parts: Sequence[Values]) -> Values:
    """Join parts in order; a single part is returned itself. All have one dtype, each may be in any tier."""
    return parts[0] if len(parts) == 1 else Joined(parts)


class Joined(Stored):
    """Values in several parts. parts: at least one, as `joined` takes them."""

    def __init__(self, parts: Sequence[Values]) -> None:
        super().__init__(sum(part.numel() for part in parts), parts[0].dtype)
        self._parts = tuple(parts)

    def to(self, device: torch.device) -> Tensor:
        return torch.cat([part.to(device) for part in self._parts])

    def read_into(self, out: Tensor) -> None:
        for window, part in self._placed():
            if isinstance(part, Stored):
                part.read_into(out[window])
            else:
                out[window].copy_(part)

    def write(self, values: Tensor) -> None:
        for window, part in self._placed():
            put(part, slice(0, part.numel()), values[window])

    def part(self, begin: int, end: int) -> Stored:
        found = [
            part[max(begin - window.start, 0) : end - window.start]
            for window, part in self._placed()
            if window.start < end and begin < window.stop
        ]
        return Joined(found or [self._parts[0][:0]])

    def _placed(self) -> Iterator[tuple[slice, Values]]:
        begin = 0
        for part in self._parts:
            yield slice(begin, begin + part.numel()), part
            begin += part.numel()


def bytes_of(values: Tensor) -> memoryview:
    """Return a view of a contiguous host tensor's memory, which keeps the tensor alive.

    numpy is avoided because torch does not resize a storage that has been exposed to it.
    """
    nbytes = values.numel() * values.element_size()
    memory = (ctypes.c_char * nbytes).from_address(values.data_ptr())
    memory.owner = values  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
