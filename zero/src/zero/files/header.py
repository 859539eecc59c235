"""The header of a safetensors file, as zero writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zero.files.storage import PAGE

METADATA = "__metadata__"  # the name that safetensors reserves


def in_values(dtype: str, shape: Sequence[int]) -> list[int]:
    """A tensor's shape as safetensors counts it: in values, of which F4 has two in an element of torch."""
    return [*shape[:-1], 2 * shape[-1]] if dtype == "F4" and shape else list(shape)


def lay_out(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> tuple[bytes, list[int]]:
    """The header of a file that holds `tensors` one after another, and the bytes where they begin.

    tensors: name, dtype, shape and bytes of each. The header includes its length field, and is padded with
    spaces so that the tensors begin on a page. The list of positions has one for each tensor, and one for the
    end of the last.
    """
    described: dict[str, Any] = {METADATA: metadata}
    ends = [0]
    for name, dtype, shape, nbytes in tensors:
        offsets = [ends[-1], ends[-1] + nbytes]
        described[name] = {"dtype": dtype, "shape": in_values(dtype, shape), "data_offsets": offsets}
        ends.append(offsets[1])
    text = json.dumps(described, separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    return (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8), [begin + end for end in ends]
