"""Combining the CRC-32 values of adjacent stretches of bytes, so that a checksum can be taken in pieces.

A CRC is a polynomial over GF(2), its highest power in the lowest bit. Appending a zero byte multiplies it by
x⁸, modulo the CRC's own polynomial. The method is that of zlib's crc32_combine (M. Adler).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE, _ZERO_BYTE = 1 << 31, 1 << 23  # 1 and x⁸


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two stretches, one after the other, from that of each. length: bytes of the second."""
    return _product(_zeros(length), first) ^ second


def _product(one: int, other: int) -> int:
    result = 0
    while one:
        if one & _ONE:
            result ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ _POLYNOMIAL * (other & 1)
    return result


@lru_cache(maxsize=256)
def _zeros(length: int) -> int:
    """What appending `length` zero bytes multiplies a CRC by."""
    result, power = _ONE, _ZERO_BYTE
    while length:
        if length & 1:
            result = _product(result, power)
        power = _product(power, power)
        length >>= 1
    return result
