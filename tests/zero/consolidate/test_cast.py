"""Casts without torch have torch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zero
from zero.consolidate.cast import cast
from zero.files.dtypes import TORCH
from zero.tiers.values import bytes_of

FLOATS = ["F64", "F32", "F16", "BF16"]


def patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a small dtype; of a wide one what lies at and beside every fp16 and bf16."""
    item = dtype.itemsize
    if item < 4:
        return torch.arange(1 << (8 * item), dtype=torch.int32).to(torch.uint16).view(dtype)
    narrow = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    exact = torch.cat([narrow.view(torch.float16).float(), narrow.view(torch.bfloat16).float()])
    beside = [
        (exact.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001)
    ]
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 17,)).to(torch.int32).view(torch.float32)
    return torch.cat([*beside, random]).to(dtype)


@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("stored", FLOATS)
def test_every_pattern_is_rounded_as_torch_does(stored: str, wanted: str) -> None:
    values = patterns(TORCH[stored])
    expected = values.to(TORCH[wanted])
    found = torch.empty_like(expected)
    overflowed = cast(bytes_of(values), stored, bytes_of(found), wanted)
    nan = expected.isnan()
    assert torch.equal(nan, found.isnan())
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    assert torch.equal(found.view(integer)[~nan], expected.view(integer)[~nan])
    assert overflowed == (wanted == "F16" and not torch.equal(expected.isinf(), values.float().isinf()))


@pytest.mark.parametrize(("stored", "wanted"), [("I64", "F32"), ("F32", "F8_E4M3"), ("F8_E4M3", "F32")])
def test_what_is_not_cast_is_refused(stored: str, wanted: str) -> None:
    with pytest.raises(zero.CheckpointError, match="cannot cast"):
        cast(memoryview(bytearray(8)), stored, memoryview(bytearray(8)), wanted)
