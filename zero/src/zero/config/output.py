"""How whole weights are written: what `zero consolidate` can be asked for. Imports nothing else."""

from __future__ import annotations

from typing import Literal

OutputDtype = Literal["fp32", "bf16", "fp16", "keep", "stored"]
Format = Literal["safetensors", "torch"]
DEFAULT_MEMORY = 128 << 20
"""Bytes of all buffers together."""
