"""What weights are read from: names, shapes and dtypes, and bytes in chunks that any thread can read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from zero.checkpoint.manifest import ITEM_BYTES

Kind = Literal["parameter", "frozen", "buffer", "state"]  # state: of the optimizer


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a source. Dtypes are named as in safetensors.

    dtype: of the stored values. training_dtype: what the weights had in training, where the stored values
    are wider masters. aliases: further names of the same tensor (tied weights), which are stored once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    training_dtype: str
    kind: Kind
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """A stretch of a tensor in a chunk. tensor: index into the source's tensors. start, length: elements, in
    row-major order. at: where it begins in the chunk, in bytes; a multiple of the item size."""

    tensor: int
    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Bytes that are read at once. pieces: what of them belongs to which tensor; the rest is padding.

    read: given memory on whole pages, at least two more than the bytes take, returns the part of it where it
    put them; raises where they are damaged.
    """

    nbytes: int
    read: Callable[[memoryview], memoryview]
    pieces: tuple[Piece, ...] = ()


class Source(ABC):
    """Weights in some format. Chunks may be read from several threads; close() when done.

    format: for people. tensors: every parameter and buffer. facts: what else there is to say, by label.
    identity: changes when the content does. left_out: names of state that is no tensor.
    Opening and reading raise CheckpointError for what is missing, CorruptCheckpointError for what is damaged.
    """

    format: str
    path: Path
    tensors: tuple[TensorInfo, ...]
    facts: dict[str, Any]
    identity: str
    left_out: tuple[str, ...] = ()

    @property
    def sums_records(self) -> bool:
        """Whether checksums cover more than a chunk, so that only `finish` tells of damage."""
        return False

    @abstractmethod
    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        """All bytes of the tensors with these indices, each once, in chunks of at most `limit` bytes."""

    @abstractmethod
    def everything(self, limit: int) -> Iterator[Chunk]:
        """Every byte that has a checksum, optimizer state included, in chunks of at most `limit` bytes."""

    def finish(self) -> None:  # noqa: B027
        """Raise CorruptCheckpointError unless all that was read since opening was intact.

        For checksums that cover more than a chunk. Call it when every chunk has been read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
