"""Pickles read without running anything in them: plain containers, and stand-ins for what they name.

The stand-ins are inert: classes that keep what was stored, functions that put their arguments in a record.
Python's unpickler finds names in one place, `find_class`; what is not known there is refused, or becomes a
Stranger. It is the one written in Python: the one in C lets a few bytes claim any amount of memory.
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
    """In place of an object: its stored state, unused."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Stranger(Kept):
    """In place of whatever is called `name`, objects and functions: takes what its pickle does with it."""

    name = ""

    def __call__(self, *arguments: Any) -> Stranger:
        self.called = arguments
        return self

    def take(self, *values: Any) -> None:
        """Items, of something like a list, a set or a dict."""
        self.items = (*getattr(self, "items", ()), *values)

    append = extend = add = update = __setitem__ = take


class Dict(dict[Any, Any]):
    """In place of dicts that have more than items, such as the versions in a module's state dict."""

    def __setstate__(self, state: Any) -> None:
        pass


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
    """A tensor of torch.save's. dtype: named as in safetensors. offset: of its first element in its storage,
    in elements, as its strides are."""

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
    """All of them in nested containers; not what is inside them."""
    if isinstance(value, Stranger) or (isinstance(value, type) and issubclass(value, Stranger)):
        yield value  # type: ignore[misc]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strangers_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from strangers_in(item)


def refusal(path: Path, name: str) -> CheckpointError:
    """The error for a file that has an object of that name in the place of what is looked for."""
    return CheckpointError(f"{path} holds objects that are not read, since that would run their code: {name}")


def _tensor(storage: StoredStorage, dtype: Any, offset: int, shape: Any, stride: Any) -> StoredTensor:
    tensor = StoredTensor(storage.key, dtype, offset, tuple(shape), tuple(stride))
    numbers = (offset, *tensor.shape, *tensor.stride)
    if dtype not in ITEM_BYTES or len(tensor.shape) != len(tensor.stride):
        raise ValueError(f"{tensor} is no tensor")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*numbers, tensor.numel)):
        raise ValueError(f"{tensor} cannot be as large as it says")
    return tensor


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return _tensor(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    return _tensor(storage, rest[2], offset, shape, stride)


def _first(value: Any, *_: Any) -> Any:
    """What becomes of a parameter: the tensor that it is."""
    return value


def _subclass(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    if not isinstance(rebuild, Function):
        raise ValueError(f"{rebuild!r} makes no tensor")
    return rebuild(*arguments)


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, out of what pickles of the second protocol write for them."""
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
        for module in ("builtins", "__builtin__")  # the latter is Python 2's name, which the protocol keeps
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
"""What a file of torch.save with tensors in plain containers names."""


def load(data: bytes, known: Mapping[str, Any], path: Path, strangers: bool = False) -> Any:
    """The object in a pickle. known: full names, and what to make of them. path: of the file, for errors.

    Raises CheckpointError for any other name, unless those may be strangers, and CorruptCheckpointError for
    what makes no sense.
    """
    try:
        return _Unpickler(BytesIO(data), known, path, strangers).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a hostile pickle makes the unpickler raise
        what = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(f"{path} holds a pickle that makes no sense: {what}") from error


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
            raise ValueError(f"{saved!r} is no storage")
        return StoredStorage(dtype, key, numel)
