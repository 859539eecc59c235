"""Combining the CRC-32 values of adjacent stretches of bytes, so that a checksum can be taken in pieces.

Appending zeros to a message is a linear map of its CRC over GF(2); doubling the number of zeros squares the
map. The method is that of zlib's crc32_combine (M. Adler).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_Map = tuple[int, ...]  # the images of the 32 bits


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two stretches, one after the other, from that of each. length: bytes of the second."""
    return _apply(_zeros(length), first) ^ second


def _apply(linear: _Map, value: int) -> int:
    result = 0
    for image in linear:
        if not value:
            break
        if value & 1:
            result ^= image
        value >>= 1
    return result


def _after(outer: _Map, inner: _Map) -> _Map:
    return tuple(_apply(outer, image) for image in inner)


@lru_cache(maxsize=256)
def _zeros(length: int) -> _Map:
    """The map of a CRC that appending `length` zero bytes amounts to."""
    power = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        power = _after(power, power)
    result = tuple(1 << bit for bit in range(32))
    while length:
        if length & 1:
            result = _after(power, result)
        power = _after(power, power)
        length >>= 1
    return result
