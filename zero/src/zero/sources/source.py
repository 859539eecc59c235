"""The interface of a source of weights: names, shapes, dtypes, and bytes in chunks for any thread to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from zero.files.manifest import Sized

TensorKind = Literal["parameter", "frozen", "buffer", "state"]  # state: of the optimizer


@dataclass(frozen=True)
class TensorInfo(Sized):
    """A tensor of a source. Dtypes are named as in safetensors.

    dtype: of the stored values. training_dtype: of the weights in training, which differs where the stored
    values are wider masters. aliases: further names of the same tensor (tied weights are stored once).
    packed: whether it is part of a quantised parameter, whose dtype belongs to its format.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    training_dtype: str
    kind: TensorKind
    aliases: tuple[str, ...] = ()
    packed: bool = False


class Fragment(NamedTuple):
    """A stretch of a tensor in a chunk.

    tensor: index into the source's tensors. start, length: in elements, in row-major order. at: the byte of
    the chunk where it begins, a multiple of the item size.
    """

    tensor: int
    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Bytes that are read at once. pieces: which of them belong to which tensor; the rest is not needed.

    read: takes page-aligned memory, at least two pages larger than the bytes need, and returns the part of it
    that holds them; raises if they are damaged.
    """

    nbytes: int
    read: Callable[[memoryview], memoryview]
    pieces: tuple[Fragment, ...] = ()


class Source(ABC):
    """Weights in some format. Chunks may be read from several threads; call close() when done.

    format: its name, for people. tensors: every parameter and buffer. facts: further facts to show, by label.
    identity: changes when the content does. left_out: names of state that is not a tensor. missing: names of
    what the model had and these weights were saved without.
    Opening and reading raise CheckpointError if something is missing, and CorruptCheckpointError if something
    is damaged.
    """

    format: str
    path: Path
    tensors: tuple[TensorInfo, ...]
    facts: dict[str, Any]
    identity: str
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def sums_records(self) -> bool:
        """Whether checksums cover more than a chunk, so that only finish() reports damage."""
        return False

    @abstractmethod
    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        """All bytes of the tensors with these indices, each once, in chunks of at most `limit` bytes.

        A chunk may hold other bytes as well.
        """

    @abstractmethod
    def everything(self, limit: int) -> Iterator[Chunk]:
        """Every byte that has a checksum, optimizer state included, in chunks of at most `limit` bytes."""

    def finish(self) -> None:  # noqa: B027
        """Raise CorruptCheckpointError unless everything read since opening was intact.

        This is for checksums that cover more than a chunk. Call it when every chunk has been read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
