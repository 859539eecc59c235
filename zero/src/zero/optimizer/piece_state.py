"""What an optimizer keeps of one piece of a parameter: one value per element, or for all of it.

State that wraps other tensors, as quantised moments do, can be described, and put together again.

A wrapper says by torch's `__tensor_flatten__` which tensors hold its values, and what else it needs to be
made again. That is all a checkpoint keeps of it: its class by name, its shape, and these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from zero.errors import StateError, UsageError
from zero.tiers.values import Stored, Values

KIND, SHAPE, CONTEXT, TENSORS = "$wrapper", "shape", "context", "tensors"
"""The members of a description."""

_DTYPE = "torch.dtype"


def is_elementwise(key: str, value: Values, parameter: nn.Parameter) -> bool:
    """Whether a state tensor of a piece has one value per element, each by itself: blocks of a wrapper share
    scales."""
    if isinstance(value, Stored):
        return True
    return key != "step" and value.shape == parameter.shape and not is_wrapper(value)


def in_memory_order(value: Values, parameter: nn.Parameter) -> Values:
    """A tensor of the parameter's shape as one dimension, in the parameter's memory order. It shares its
    storage if it has the parameter's strides; otherwise it is a copy."""
    if isinstance(value, Stored):
        return value
    if value.stride() != parameter.stride():
        like = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
        )
        value = like.copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def tensors_beside(state: dict[str, Any], parameter: nn.Parameter) -> list[Tensor]:
    """The tensors of a state that are kept beside a parameter, including those in lists, dicts and
    wrappers."""
    leaves = ((key, leaf) for key, value in state.items() for leaf in tree_leaves(value))
    beside = (leaf for key, leaf in leaves if isinstance(leaf, Tensor) and _is_beside(key, leaf, parameter))
    return [tensor for leaf in beside for tensor in kept_tensors(leaf)]


def moved(key: str, value: Any, parameter: nn.Parameter, device: torch.device, copy: bool = False) -> Any:
    """A value of a state, with those of its tensors that are kept beside the parameter moved to `device`."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_wrapper(leaf):
            return moved_wrapper(leaf, device, copy)
        return leaf.to(device if _is_beside(key, leaf, parameter) else leaf.device, copy=copy)

    return tree_map(move, value)


def _is_beside(key: str, leaf: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a tensor is kept beside the parameter. Single numbers stay where optimizers put them, unless
    the parameter itself is one."""
    return leaf.dim() > 0 or (parameter.dim() == 0 and key != "step")


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor that says which tensors it wraps."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(value: Tensor) -> dict[str, Tensor]:
    """The tensors that hold a wrapper's values, by name."""
    return {name: getattr(value, name) for name in sorted(value.__tensor_flatten__()[0])}  # type: ignore[attr-defined]


def kept_tensors(value: Tensor) -> list[Tensor]:
    """The tensors whose memory a value takes: itself or, of a wrapper, what it wraps."""
    return list(inner_tensors(value).values()) if is_wrapper(value) else [value]


def described(value: Tensor, what: str) -> dict[str, Any]:
    """A wrapper as a dict of its tensors and of plain values; `restored` reverses this.

    Raises UsageError, naming it by `what`, for a wrapper around wrappers, for one whose class has no name in
    its module, and for a context of other things than numbers, strings, dtypes, and lists, tuples and dicts
    of them.
    """
    _, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    if getattr(sys.modules.get(type(value).__module__), type(value).__qualname__, None) is not type(value):
        raise UsageError(f"{what} is of the class {path}, which is not found under that name")
    inside = inner_tensors(value)
    for name, inner in inside.items():
        if is_wrapper(inner):
            raise UsageError(f"{what} wraps a {type(inner).__name__} as {name!r}, which wraps others itself")
    return {
        KIND: path,
        SHAPE: list(value.shape),
        CONTEXT: _mapped(context, lambda leaf: _plain(leaf, what)),
        TENSORS: inside,
    }


def is_description(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {KIND, SHAPE, CONTEXT, TENSORS}


def check_class(description: Mapping[str, Any]) -> None:
    """Raise StateError unless the program has imported the class of a described wrapper."""
    _class_of(description[KIND])


def restored(description: Mapping[str, Any], device: torch.device) -> Tensor:
    """The wrapper that was described, on `device`. Nothing is imported for it. Raises StateError as
    `check_class` does, and if the class does not accept what it is to be made of."""
    kind = _class_of(description[KIND])
    inside = {name: tensor.to(device) for name, tensor in description[TENSORS].items()}
    context, shape = _mapped(description[CONTEXT], _restored_leaf), torch.Size(description[SHAPE])
    try:
        made: Tensor = kind.__tensor_unflatten__(inside, context, shape, None)  # type: ignore[attr-defined]
    except Exception as error:
        raise StateError(
            f"{kind.__name__} cannot be made of what the checkpoint has ({type(error).__name__}: {error})"
        ) from error
    return made


def moved_wrapper(value: Tensor, device: torch.device, copy: bool) -> Tensor:
    """A wrapper around the same values on `device`; itself, if they are there and need not be copied."""
    inside = inner_tensors(value)
    there = {name: tensor.to(device, copy=copy) for name, tensor in inside.items()}
    if all(there[name] is tensor for name, tensor in inside.items()):
        return value
    _, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    made: Tensor = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
        there, context, value.shape, value.stride()
    )
    return made


def _class_of(path: str) -> type[Tensor]:
    module, _, name = str(path).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__"):
        return kind
    raise StateError(
        f"optimizer state is of the class {path}, which this program has not imported under that name: use "
        "the optimizer, and the version of its library, that saved it"
    )


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if _is_dtype(value):
        return leaf(value)
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, leaf) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    return leaf(value)


def _is_dtype(value: Any) -> bool:
    """Whether a value stands for a dtype: a pair of a mark and its name."""
    return isinstance(value, tuple) and value[:1] == (_DTYPE,)


def _plain(leaf: Any, what: str) -> Any:
    if isinstance(leaf, torch.dtype):
        return _DTYPE, str(leaf).removeprefix("torch.")
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise UsageError(f"{what} needs a {type(leaf).__name__} to be made again, which is no plain value")


def _restored_leaf(leaf: Any) -> Any:
    if not _is_dtype(leaf):
        return leaf
    dtype = getattr(torch, leaf[1], None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"the checkpoint has optimizer state in {leaf[1]!r}, a dtype that this torch lacks")
    return dtype
