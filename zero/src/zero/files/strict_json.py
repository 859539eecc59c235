"""JSON of files that may hold anything: what all readers agree on, in bounded work and memory."""

from __future__ import annotations

import json
from typing import Any

_MOST_TOKENS = 1 << 23  # of the characters below; the headers of some 400,000 tensors
_TOKENS = b'{[",'


def parse(data: bytes) -> Any:
    """The value of a JSON document in UTF-8.

    Raises ValueError for anything else: other encodings, NaN, names that occur twice in an object, strings
    with half a surrogate pair, nesting that is too deep, or more values than a file of weights can need.
    """
    if sum(map(data.count, (_TOKENS[i : i + 1] for i in range(len(_TOKENS))))) > _MOST_TOKENS:
        raise ValueError("it describes more than any file of weights needs")
    text = data.decode()
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a name occurs twice in an object")
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)
