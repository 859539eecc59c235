"""Any part of any tensor in safetensors files: an implementation of zero.loading.tensor_reader.Tensors."""

from __future__ import annotations

from pathlib import Path

from zero.errors import CorruptCheckpointError
from zero.files.boundary import typed
from zero.files.names import Saved
from zero.files.safetensors_header import SafeTensor, describe
from zero.files.storage import DISK, File, Storage


class SafetensorsWeights:
    """Weights in safetensors files. path: a file, or a directory with model.safetensors or an index.

    A file is opened at its first read and stays open until close(), after which it may be read again. Methods
    raise CheckpointError if a file cannot be read, and CorruptCheckpointError if it ends early.
    """

    def __init__(self, path: Path, storage: Storage = DISK) -> None:
        self.path = path
        self._storage = storage
        self._tensors = {tensor.name: tensor for tensor in describe(path)}
        self._files: dict[Path, File] = {}

    @property
    def stored(self) -> list[Saved]:
        """Names, shapes and dtypes of all tensors."""
        return [Saved(t.name, t.shape, t.dtype, t.aliases) for t in self._tensors.values()]

    def tensor(self, key: str) -> SafeTensor:
        """What is known of a tensor. key: its name."""
        return self._tensors[key]

    def read(self, key: str, start: int, into: memoryview) -> None:
        """Fill `into` with a tensor's elements from `start` on, in row-major order."""
        tensor = self._tensors[key]
        at = tensor.offset + start * tensor.item_bytes
        with typed(tensor.path):
            if tensor.path not in self._files:
                self._files[tensor.path] = self._storage.open(tensor.path)
            count = self._files[tensor.path].read(at, into)
        if count < into.nbytes:
            raise CorruptCheckpointError(f"{tensor.path} ends at byte {at + count}, within {key!r}")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
