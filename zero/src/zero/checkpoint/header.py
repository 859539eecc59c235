"""The header of a safetensors file, as zero writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zero.checkpoint.storage import PAGE


def header_of(described: Mapping[str, Any]) -> bytes:
    """Length field and JSON, padded with spaces so that the data after it begin on a page.

    described: what the file holds, by name, with offsets from the begin of the data.
    """
    text = json.dumps(described, separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    return (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
