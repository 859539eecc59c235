"""Reading pickles without running anything in them: plain containers, and stand-ins for what they name.

The stand-ins are inert: classes that keep what was stored, and functions that put their arguments in a
record. Python's unpickler resolves names in one place, `find_class`; names that are not known there are
refused, or become Strangers. The unpickler used is the one written in Python: with the one in C, a few bytes
can claim any amount of memory.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from zero.checkpoint.manifest import ITEM_BYTES, TORCH_NAMES, is_row_major
from zero.errors import CheckpointError, CorruptCheckpointError


class Kept:
    """Stands in for an object, and keeps its stored state without using it."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Stranger(Kept):
    """Stands in for any object or function, called `name`, and accepts whatever its pickle does with it."""

    name = ""

    def __call__(self, *arguments: Any) -> Stranger:
        self.called = arguments
        return self

    def take(self, *values: Any) -> None:
        """Accept items, as something like a list, a set or a dict does."""
        self.items = (*getattr(self, "items", ()), *values)

    append = extend = add = update = __setitem__ = take


class Dict(dict[Any, Any]):
    """Stands in for dicts that have state besides their items, as a module's state dict has versions."""

    def __setstate__(self, state: Any) -> None:
        pass


class Function:
    """Stands in for a function. A plain function would let a pickle set its attributes."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function has no state")


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
    """All tensors in nested containers."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Kept):
        yield from tensors_in(vars(value))


def strangers_in(value: Any) -> Iterator[Stranger]:
    """All Strangers in nested containers, but not those inside other Strangers."""
    if isinstance(value, Stranger) or (isinstance(value, type) and issubclass(value, Stranger)):
        yield value  # type: ignore[misc]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strangers_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from strangers_in(item)


def refusal(path: Path, name: str) -> CheckpointError:
    """The error for a file that holds an object of a class or function `name`, which is not read."""
    return CheckpointError(
        f"{path} holds objects that are not read, because that would run their code: {name}"
    )


def _tensor(storage: StoredStorage, dtype: Any, offset: int, shape: Any, stride: Any) -> StoredTensor:
    tensor = StoredTensor(storage.key, dtype, offset, tuple(shape), tuple(stride))
    numbers = (offset, *tensor.shape, *tensor.stride)
    if dtype not in ITEM_BYTES or len(tensor.shape) != len(tensor.stride):
        raise ValueError(f"{tensor} is not a tensor")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*numbers, tensor.numel)):
        raise ValueError(f"{tensor} cannot be as large as it claims")
    return tensor


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return _tensor(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    return _tensor(storage, rest[2], offset, shape, stride)


def _first(value: Any, *_: Any) -> Any:
    """Reduce a parameter to its tensor."""
    return value


def _subclass(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    if not isinstance(rebuild, Function):
        raise ValueError(f"{rebuild!r} makes no tensor")
    return rebuild(*arguments)


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, from what pickles of protocol 2 write for them."""
    return text.encode(encoding)


DTYPES: Mapping[str, Any] = {f"torch.{theirs}": name for name, theirs in TORCH_NAMES.items()}
_STORAGES = {
    f"torch.{kind}Storage": name
    for kind, name in {
        "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32",
        "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64",
    }.items()
}  # fmt: skip
_CONTAINERS: Mapping[str, Any] = {
    "collections.OrderedDict": Dict,
    "collections.Counter": Dict,
    "torch.Size": tuple,
    "torch.device": Function(Kept),
    "torch.serialization._get_layout": Function(Kept),
    "_codecs.encode": Function(_bytes),
    **{
        f"{module}.{name}": stand_in
        for module in ("builtins", "__builtin__")  # the latter is Python 2's, kept in protocol 2
        for name, stand_in in {
            "set": Function(set),
            "bytearray": Function(_bytes),
            "complex": Function(complex),
        }.items()
    },
}
TENSORS: Mapping[str, Any] = {
    **DTYPES,
    **{storage: (name,) for storage, name in _STORAGES.items()},
    **_CONTAINERS,
    "torch.storage.UntypedStorage": (None,),
    "torch._utils._rebuild_tensor_v2": Function(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Function(_tensor_v3),
    "torch._utils._rebuild_parameter": Function(_first),
    "torch._utils._rebuild_parameter_with_state": Function(_first),
    "torch._tensor._rebuild_from_type_v2": Function(_subclass),
    "torch.nn.parameter.Parameter": Kept,
    "torch.Tensor": Kept,
}
"""Stand-ins for the names in a file of torch.save with tensors in plain containers."""


def load(data: bytes, known: Mapping[str, Any], path: Path, strangers: bool = False) -> Any:
    """Read the object in a pickle.

    known: stand-ins by full name. path: the file, for errors. strangers: let other names become Strangers.
    Raises CheckpointError for other names without that, and CorruptCheckpointError for a pickle that makes
    no sense.
    """
    try:
        return _Unpickler(BytesIO(data), known, path, strangers).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a hostile pickle makes the unpickler raise
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(f"{path} holds an invalid pickle: {what}") from error


class _Unpickler(pickle._Unpickler):
    def __init__(self, file: BytesIO, known: Mapping[str, Any], path: Path, strangers: bool) -> None:
        super().__init__(file)
        self._known = known
        self._path = path
        self._strangers = strangers

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if self._strangers:
            return type("Stranger", (Stranger,), {"name": full})
        raise refusal(self._path, full)

    def persistent_load(self, saved: Any) -> StoredStorage:
        kind, (dtype,), key, _, numel = saved
        if kind != "storage" or not isinstance(key, str) or not isinstance(numel, int):
            raise ValueError(f"{saved!r} is not a storage")
        return StoredStorage(dtype, key, numel)
