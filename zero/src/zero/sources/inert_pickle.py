"""Reading pickles without running anything in them: plain containers, and stand-ins for what they name.

The stand-ins are inert: classes that keep what was stored, and functions that put their arguments in a
record. Python's unpickler resolves names in one place, `find_class`; names that are not known there are
refused, or become Strangers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero.errors import CheckpointError
from zero.files.boundary import typed
from zero.files.manifest import ITEM_BYTES, MOST_DIMENSIONS, TORCH_NAMES, is_row_major
from zero.sources.bounded_unpickler import (
    CONTAINERS,
    Function,
    Inert,
    Stranger,
    Unpickler,
    made_dict,
    made_set,
)

MOST_STEPS = 1 << 23  # of a file of torch.save; each tensor takes some thirty
_NEW_CLASS = 100  # steps: a Stranger's class takes a kilobyte
_LONG_NAME = 64
_LONGEST_STORAGE = 256
_MOST_ARGUMENTS = 16
_TOO_LARGE = 1 << 62


class StoredStorage(NamedTuple):
    """A storage in a file of torch.save. dtype: named as in safetensors; None if the tensor has its own."""

    dtype: str | None
    key: str
    numel: int


class StoredTensor(NamedTuple):
    """A tensor in a file of torch.save.

    storage: the key of its storage. dtype: named as in safetensors. offset, stride: in elements; the offset
    is that of its first element in the storage.
    """

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_row_major(self) -> bool:
        return is_row_major(self.shape, self.stride)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def tensors_in(value: Any) -> Iterator[StoredTensor]:
    """All tensors in nested containers and in what was kept of objects."""
    return (found for found in _values_in(value, (Inert,)) if isinstance(found, StoredTensor))


def strangers_in(value: Any) -> Iterator[Stranger]:
    """All Strangers in nested containers, but not those inside other Strangers."""
    for found in _values_in(value, ()):
        if isinstance(found, Stranger) or (isinstance(found, type) and issubclass(found, Stranger)):
            yield found  # type: ignore[misc]


def _values_in(value: Any, objects: tuple[type, ...]) -> Iterator[Any]:
    """What is in nested containers, each container and object once, however many hold it.

    objects: classes of objects whose attributes count as containers too.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        yield value
        inner = vars(value) if isinstance(value, objects) else value
        if isinstance(inner, StoredTensor) or not isinstance(inner, CONTAINERS) or id(value) in seen:
            continue
        seen.add(id(value))
        left.extend(inner.values() if isinstance(inner, dict) else inner)


def refusal(path: Path, name: str) -> CheckpointError:
    """The error for a file that holds an object of a class or function `name`, which is not read."""
    return CheckpointError(
        f"{path} holds objects that are not read, because that would run their code: {name}"
    )


def sizes_of(value: Any) -> tuple[int, ...]:
    """A tensor's sizes, offsets or strides. Raises ValueError for what cannot be."""
    if not isinstance(value, (list, tuple)) or len(value) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor's sizes are not a tuple of at most {MOST_DIMENSIONS} numbers")
    for size in value:
        if type(size) is not int or not 0 <= size < _TOO_LARGE:
            raise ValueError("a tensor has sizes that no tensor has")
    return tuple(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """The same for a shape, whose product has to be possible, too."""
    shape = sizes_of(value)
    if math.prod(filter(None, shape)) >= _TOO_LARGE:
        raise ValueError(f"no tensor has the sizes {shape}")
    return shape


def _tensor(storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    if not isinstance(storage, StoredStorage) or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError("a tensor has no storage, or an unknown dtype")
    (start,) = sizes_of((offset,))
    tensor = StoredTensor(storage.key, dtype, start, shape_of(shape), sizes_of(stride))
    if len(tensor.shape) != len(tensor.stride):
        raise ValueError("a tensor has more sizes than strides, or fewer")
    return tensor


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return _tensor(storage, getattr(storage, "dtype", None), offset, shape, stride)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    return _tensor(storage, rest[2], offset, shape, stride)


def _first(value: Any, *_: Any) -> Any:
    """Reduce a parameter to its tensor."""
    return value


def _subclass(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> StoredTensor:
    known = rebuild in _REBUILDS and type(arguments) is tuple and len(arguments) <= _MOST_ARGUMENTS
    tensor = rebuild(*arguments) if known else None
    if not isinstance(tensor, StoredTensor):
        raise ValueError("what should make a tensor of a class of its own makes none")
    return tensor


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return sizes_of(sizes)


def _bytes(value: Any = b"", encoding: Any = "latin1") -> bytes:
    """Bytes, from what pickles of protocol 2 write for them: text in latin1."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("it encodes what is not text, or not in latin1")
    return value.encode("latin1")


DTYPES: Mapping[str, Any] = {f"torch.{theirs}": name for name, theirs in TORCH_NAMES.items()}
_STORAGES = {
    f"torch.{kind}Storage": name
    for kind, name in {
        "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32",
        "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64",
    }.items()
}  # fmt: skip
_CONTAINERS: Mapping[str, Any] = {
    "collections.OrderedDict": Function(made_dict),
    "collections.Counter": Function(made_dict),
    "torch.Size": Function(_size),
    "torch.device": Function(Inert),
    "torch.serialization._get_layout": Function(Inert),
    "_codecs.encode": Function(_bytes),
    **{
        f"{module}.{name}": stand_in
        for module in ("builtins", "__builtin__")  # the latter is Python 2's, kept in protocol 2
        for name, stand_in in {
            "set": Function(made_set),
            "bytearray": Function(_bytes),
            "complex": Function(complex),
        }.items()
    },
}
_V2, _V3, _PARAMETER = Function(_tensor_v2), Function(_tensor_v3), Function(_first)
_REBUILDS = (_V2, _V3, _PARAMETER)
TENSORS: Mapping[str, Any] = {
    **DTYPES,
    **{storage: (name,) for storage, name in _STORAGES.items()},
    **_CONTAINERS,
    "torch.storage.UntypedStorage": (None,),
    "torch._utils._rebuild_tensor_v2": _V2,
    "torch._utils._rebuild_tensor_v3": _V3,
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _PARAMETER,
    "torch._tensor._rebuild_from_type_v2": Function(_subclass),
    "torch.nn.parameter.Parameter": Inert,
    "torch.Tensor": Inert,
}
"""Stand-ins for the names in a file of torch.save with tensors in plain containers."""


def load(
    data: bytes, known: Mapping[str, Any], path: Path, strangers: bool = False, most: int = MOST_STEPS
) -> Any:
    """Read the object in a pickle.

    known: stand-ins by full name. path: the file, for errors. strangers: let other names become Strangers.
    most: steps that reading it may take. Raises CheckpointError for other names without that, and
    CorruptCheckpointError for a pickle that makes no sense.
    """
    with typed(path, "holds an invalid pickle"):  # whatever a hostile one makes the unpickler raise
        return _Unpickler(data, most, known, path, strangers).load()


class _Unpickler(Unpickler):
    def __init__(self, data: bytes, most: int, known: Mapping[str, Any], path: Path, strangers: bool) -> None:
        super().__init__(data, most)
        self._known = known
        self._path = path
        self._strangers: dict[str, type[Stranger]] | None = {} if strangers else None

    def find_class(self, module: str, name: str) -> Any:
        self.spend((len(module) + len(name)) // _LONG_NAME)
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if self._strangers is None:
            raise refusal(self._path, full)
        if full not in self._strangers:
            self.spend(_NEW_CLASS)
            self._strangers[full] = type("Stranger", (Stranger,), {"name": full})
        return self._strangers[full]

    def persistent_load(self, saved: Any) -> StoredStorage:
        kind, (dtype,), key, _, numel = saved
        if kind != "storage" or not isinstance(key, str) or not isinstance(numel, int):
            raise ValueError("it refers to what is not a storage")
        if len(key) > _LONGEST_STORAGE:
            raise ValueError("the name of a storage is too long")
        return StoredStorage(dtype, key, numel)
