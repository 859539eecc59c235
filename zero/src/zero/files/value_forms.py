"""The forms of what a manifest holds besides its records: user values and random states. No torch.

They are documented in docs/checkpoint-files.md. `user_state` encodes such values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

FLOATS = ("inf", "-inf", "nan")
_LENGTH_OF_PAIR = 2
Decoded = Callable[[str], Any]
"""Takes the key of a tensor, and returns what stands for it."""


def decode(value: Any, tensor: Decoded) -> Any:
    """The user value that was encoded: see `user_state`. tensor: reads a tensor by its key.

    Raises ValueError for what encodes none.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str
    content: Any
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag == "$tensor":
        return tensor(content)
    if tag == "$float":
        if content not in FLOATS:
            raise ValueError(f"a value has {content!r} for a float, which is none of {', '.join(FLOATS)}")
        return float(content)
    if tag not in ("$tuple", "$dict", "$counter"):
        return {name: decode(item, tensor) for name, item in value.items()}
    if not isinstance(content, list):
        raise ValueError(f"a value's {tag} is no list")
    items = decode(content, tensor)
    if tag == "$tuple":
        return tuple(items)
    return _pairs(items, Counter if tag == "$counter" else dict, tag)


def _pairs(items: list[Any], kind: Callable[[dict[Any, Any]], dict[Any, Any]], tag: str) -> dict[Any, Any]:
    if not all(isinstance(item, list) and len(item) == _LENGTH_OF_PAIR for item in items):
        raise ValueError(f"a value's {tag} has an item that is no pair")
    try:
        return kind(dict(items))
    except TypeError:
        raise ValueError(f"a value's {tag} has a key that is none, such as a list") from None


def check_value(value: Any, tensors: Container[str]) -> None:
    """Raise ValueError unless this is an encoded user value, all of whose tensors are in `tensors`."""

    def known(key: Any) -> Any:
        if not isinstance(key, str) or key not in tensors:
            raise ValueError(f"a value refers to a tensor {key!r}, which is missing")
        return []  # no key of a dict, as a tensor is none

    decode(value, known)


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Reference(_Form):
    key: Annotated[str, Field(alias="$tensor")]


class _Python(_Form):
    version: int
    internal: _Reference
    gauss: Annotated[float, Field(allow_inf_nan=False)] | None


class _Numpy(_Form):
    kind: str
    keys: _Reference
    position: int
    has_gauss: int
    cached: Annotated[float, Field(allow_inf_nan=False)]


class RandomStates(_Form):
    """The states of one rank's random number generators, as `random_state.read` gives them."""

    torch: _Reference
    device: _Reference
    python: _Python
    numpy: _Numpy
