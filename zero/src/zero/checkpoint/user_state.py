"""The user's values as JSON from which they can be restored exactly, with tensors as parts of their own.

JSON has no tuples, no infinities, and only strings as keys. Such values are written as one-member objects:
`{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$counter": [[key, count], ...]}`,
`{"$float": "inf"}`, `{"$tensor": "<key in the manifest's tensors>"}`. `value_forms` decodes them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero.checkpoint.rank_file import Part
from zero.errors import UsageError
from zero.files.manifest import escape

_TAGS = ("$tuple", "$dict", "$counter", "$float", "$tensor")


def encode(value: Any, key: str, parts: list[Part], what: str) -> Any:
    """Encode `value` as JSON values; its tensors are added to `parts` under keys that begin with `key`.

    Takes None, bool, int, float, str, lists, tuples, dicts, collections.Counter and tensors, and numpy's
    scalars, which come back as Python's. Raises UsageError for anything else, naming it by `what`.
    """
    if type(value) is str:
        return _storable(value, what)
    if type(value) in (type(None), bool, int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
        return encode(number, key, parts, what)
    if isinstance(value, Tensor) and is_plain(value):
        unique = _unique(key, parts)
        parts.append(Part.whole(unique, value))
        return {"$tensor": unique}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{key}/{i}", parts, f"{what}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, key, parts, what)
    raise UsageError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: it can hold JSON values, "
        "tuples, Counters, dense tensors, and at the top level objects with state_dict()"
    )


def is_plain(value: Tensor) -> bool:
    """Whether a tensor is its values: dense, not on the meta device, and no wrapper around other tensors."""
    dense = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
    return dense and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__


def _encode_dict(value: dict[Any, Any], key: str, parts: list[Part], what: str) -> Any:
    encoded = {k: encode(v, f"{key}/{escape(str(k))}", parts, f"{what}[{k!r}]") for k, v in value.items()}
    if isinstance(value, Counter) or any(type(k) is not str or k in _TAGS for k in encoded):
        tag = "$counter" if isinstance(value, Counter) else "$dict"
        return {tag: [[_encode_key(k, f"the key {k!r} of {what}"), v] for k, v in encoded.items()]}
    return {_storable(k, f"a key of {what}"): v for k, v in encoded.items()}


def _encode_key(value: Any, what: str) -> Any:
    tensors: list[Part] = []
    encoded = encode(value, "", tensors, what)
    if tensors:
        raise UsageError(f"{what} is a tensor; use numbers, strings or tuples of them as keys")
    return encoded


def _storable(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is a string that cannot be encoded as UTF-8: {text!r}") from None
    return text


def _unique(key: str, parts: list[Part]) -> str:
    """`key`, made different from every part's key: the dict keys 1 and "1" would otherwise share one."""
    taken = {part.key for part in parts}
    while key in taken:
        key += "_"
    return key
