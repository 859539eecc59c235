"""Pickles read without running anything in them: plain containers, and stand-ins for known names only.

The stand-ins are inert: classes that keep what was stored, functions that put their arguments in a record.
Python's unpickler finds names in one place, `find_class`, and there any other name is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from zero.checkpoint.dtypes import TORCH
from zero.errors import CheckpointError, CorruptCheckpointError


class Kept:
    """In place of an object: its stored state, unused."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Function:
    """In place of a function. A pickle can set attributes of plain ones."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function has no state")


class StoredStorage(NamedTuple):
    """A storage of torch.save's. dtype: named as in safetensors; None where the tensor says it."""

    dtype: str | None
    key: str
    numel: int


class StoredTensor(NamedTuple):
    """A tensor of torch.save's, in elements of its storage."""

    storage: StoredStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), storage.dtype)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    return StoredTensor(storage, offset, tuple(shape), tuple(stride), rest[2])


DTYPES: Mapping[str, Any] = {str(dtype): name for name, dtype in TORCH.items()}
_STORAGES = {
    f"torch.{kind}Storage": name
    for kind, name in {
        "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32",
        "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64",
    }.items()
}  # fmt: skip
TENSORS: Mapping[str, Any] = {
    **DTYPES,
    **{storage: (name,) for storage, name in _STORAGES.items()},
    "torch.storage.UntypedStorage": (None,),
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Function(_tensor_v3),
    "collections.OrderedDict": dict,
}
"""What a file of torch.save with one tensor names."""


def load(data: bytes, known: Mapping[str, Any], path: Path) -> Any:
    """The object in a pickle. known: full names, and what to make of them. path: of the file, for errors.

    Raises CheckpointError for any other name, CorruptCheckpointError for what makes no sense.
    """
    try:
        return _Unpickler(BytesIO(data), known, path).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a hostile pickle makes the unpickler raise
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(f"{path} holds a pickle that makes no sense: {what}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, known: Mapping[str, Any], path: Path) -> None:
        super().__init__(file)
        self._known = known
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._known:
            raise CheckpointError(
                f"{self._path} holds objects that are not read, since that would run their code: {full}"
            )
        return self._known[full]

    def persistent_load(self, saved: Any) -> StoredStorage:
        kind, (dtype,), key, _, numel = saved
        if kind != "storage" or not isinstance(key, str) or not isinstance(numel, int):
            raise ValueError(f"{saved!r} is no storage")
        return StoredStorage(dtype, key, numel)
