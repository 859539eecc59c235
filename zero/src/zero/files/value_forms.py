"""The forms of what a manifest holds besides its records: user values and random states. No torch.

They are documented in docs/checkpoint-format.md. `user_state` encodes and decodes such values.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

FLOATS = ("inf", "-inf", "nan")
_LENGTH_OF_PAIR = 2


def check_value(value: Any, tensors: Container[str]) -> None:
    """Raise ValueError unless this is an encoded user value, all of whose tensors are in `tensors`."""
    if isinstance(value, list):
        for item in value:
            check_value(item, tensors)
    elif isinstance(value, dict):
        _check_object(value, tensors)


def _check_object(value: dict[str, Any], tensors: Container[str]) -> None:
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag == "$tensor":
        if not isinstance(content, str) or content not in tensors:
            raise ValueError(f"a value refers to a tensor {content!r}, which is missing")
    elif tag == "$float":
        if content not in FLOATS:
            raise ValueError(f"a value has {content!r} for a float, which is none of {', '.join(FLOATS)}")
    elif tag == "$tuple":
        check_value(_listed(content, tag), tensors)
    elif tag in ("$dict", "$counter"):
        for pair in _listed(content, tag):
            if not isinstance(pair, list) or len(pair) != _LENGTH_OF_PAIR:
                raise ValueError(f"a value's {tag} has an item that is no pair")
            _check_key(pair[0])
            check_value(pair[1], tensors)
    else:
        for item in value.values():
            check_value(item, tensors)


def _check_key(key: Any) -> None:
    """Raise ValueError unless a dict can have this key: a number, string, None or tuple of those."""
    if isinstance(key, dict) and list(key) == ["$tuple"]:
        for part in _listed(key["$tuple"], "$tuple"):
            _check_key(part)
    elif isinstance(key, dict) and list(key) == ["$float"]:
        _check_object(key, ())
    elif isinstance(key, (dict, list)):
        raise ValueError(f"a value has a {type(key).__name__} as a key")


def _listed(content: Any, tag: str) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"a value's {tag} is no list")
    return content


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
