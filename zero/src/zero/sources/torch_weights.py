"""Weights in files of torch.save as a source: one such as `model.pt`, or a model's in transformers' layout.

Values in nested dicts and lists are named by the path to them: "model.blocks.0.weight".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.files.weight_map import Layout
from zero.sources.inert_pickle import StoredTensor, refusal, strangers_in, tensors_in
from zero.sources.record_source import RecordSource
from zero.sources.source import TensorInfo
from zero.sources.torch_file import TorchFile

LAYOUT = Layout("pytorch_model.bin", "pytorch_model.bin.index.json")
_MOST_LEAVES = 1 << 20  # limits, since a few bytes of a pickle may claim any number
_MOST_TEXT = 1 << 28  # characters of all names together
_LONG_LIST = 64  # of plain values alone: such as the order of a job's samples
_SCALARS = (str, bytes, int, float, complex, bool, type(None))


def is_torch(path: Path) -> bool:
    """Whether a path may be a file of torch.save, or is a directory with such files of a model."""
    return LAYOUT.is_in(path) if path.is_dir() else path.is_file()


class TorchSource(RecordSource):
    """Weights in files of torch.save. path: a file, or a directory with pytorch_model.bin or an index.

    Names of one tensor (tied weights) become its aliases. Objects of the job's own in the file are left out,
    and refused if they contain tensors.
    """

    format = "torch.save"

    def describe(self) -> None:
        paths, check = LAYOUT.files(self.path)
        files = [TorchFile(path, {}, strangers=True) for path in paths]
        for file in files:
            self.add_file(file.path, file.records)
        self._infos: list[TensorInfo] = []
        found = [(name, file.path.name) for file in files for name in self._lay_out(file)]
        check(found)
        if not self._infos:
            raise CheckpointError(f"{self.path} holds no named tensors, such as those of a state dict")
        self.tensors = tuple(self._infos)

    def _lay_out(self, file: TorchFile) -> list[str]:
        """Add a file's tensors; returns their names."""
        names: dict[Any, list[str]] = {}
        leaves = _leaves(file)
        for name, value in leaves:
            if isinstance(value, StoredTensor) and name:  # empty tensors share nothing
                names.setdefault(value if value.numel else (value, name), []).append(name)
            else:
                _check_stranger(file.path, value, name)
        self.left_out += tuple(name for name, value in leaves if not isinstance(value, StoredTensor))
        for key, (name, *aliases) in names.items():
            tensor = key if isinstance(key, StoredTensor) else key[0]
            info = TensorInfo(name, tensor.shape, tensor.dtype, tensor.dtype, "parameter", tuple(aliases))
            self._infos.append(info)
            self.place(len(self._infos) - 1, 0, file, tensor, 0, tensor.numel)
        found = [name for same in names.values() for name in same]
        if len(set(found)) < len(found):
            raise CorruptCheckpointError(f"{file.path}: two tensors have the same name")
        return found


def _check_stranger(path: Path, value: Any, name: str) -> None:
    """Raise CheckpointError if weights may be in an object that is not read."""
    for stranger in strangers_in(value):
        if not name or any(True for _ in tensors_in(stranger)):
            raise refusal(path, f"{stranger.name}. Save state dicts that hold tensors in plain containers")


def _leaves(file: TorchFile) -> list[tuple[str, Any]]:
    """The values in nested dicts and lists, each with the path to it.

    Empty ones are values themselves, and so are long lists of plain values. Raises CorruptCheckpointError for
    more values than a file can need: shared containers are walked once for each path to them.
    """
    found: list[tuple[str, Any]] = []
    left: list[tuple[str, Any]] = [("", file.content)]
    steps = text = 0
    while left:
        name, value = left.pop()
        items = _items(value)
        steps += 1 + (len(value) // _LONG_LIST if isinstance(value, (list, tuple)) else 0)
        if steps + len(left) + len(items) > _MOST_LEAVES or text > _MOST_TEXT:
            raise CorruptCheckpointError(f"{file.path} claims to hold more than {_MOST_LEAVES} values")
        if not items:
            found.append((name, value))
        named = []
        for key, item in items.items() if isinstance(items, Mapping) else enumerate(items):
            named.append((f"{name}.{key}" if name else str(key), item))
            text += len(named[-1][0])
            if text > _MOST_TEXT:
                break
        left.extend(reversed(named))
    return found


def _items(value: Any) -> Mapping[Any, Any] | Sequence[Any]:
    """What is named by its place in a value; nothing in a value that has a name itself."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, (list, tuple)) or isinstance(value, StoredTensor):
        return ()
    if len(value) > _LONG_LIST and all(isinstance(item, _SCALARS) for item in value):
        return ()
    return value
