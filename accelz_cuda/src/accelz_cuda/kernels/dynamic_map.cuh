// Moments in 8 bits: codes of a dynamic map with a scale for each block, as accelz.dynamic_map
// describes. Its values are the same bits everywhere, so no operation on sizes is fused.
#pragma once

#include "formats.cuh"

// Codes, the highest bit of which is the sign where there is one.
struct u8 {
  unsigned char bits;
};

constexpr int kDecades = 7;
constexpr int kBlock = 256;
constexpr float kSmallestScale = 0x1p-126f;

// A decade, from the uppermost: its last code's size, how many codes it has, and their distance.
template <int kDecade>
static constexpr double kTop = kTop<kDecade - 1> / 10;
template <>
constexpr double kTop<0> = 1;
template <bool kSign, int kDecade>
static constexpr int kCodes = (kSign ? 64 : 128) >> kDecade;
template <bool kSign, int kDecade>
static constexpr double kStep = 0.9 * kTop<kDecade> / kCodes<kSign, kDecade>;

// The size of a code is the largest of the decades' linear pieces.
template <bool kSign, int kDecade = kDecades - 1>
__device__ __forceinline__ float size_of(float number) {
  constexpr float last = 2 * kCodes<kSign, kDecade> - 1;
  constexpr float step = static_cast<float>(kStep<kSign, kDecade>);
  constexpr float top = static_cast<float>(kTop<kDecade>);
  const float piece = __fadd_rn(__fmul_rn(number - last, step), top);
  if constexpr (kDecade == 0) {
    return piece;
  } else {
    return fmaxf(piece, size_of<kSign, kDecade - 1>(number));
  }
}

// The number of a size, before it is rounded, is the smallest of their inverses.
template <bool kSign, int kDecade = kDecades - 1>
__device__ __forceinline__ float number_of(float size) {
  constexpr double step = kStep<kSign, kDecade>;
  constexpr float slope = static_cast<float>(1 / step);
  constexpr float start =
      static_cast<float>(2 * kCodes<kSign, kDecade> - 1 - kTop<kDecade> / step);
  const float piece = __fadd_rn(__fmul_rn(size, slope), start);
  if constexpr (kDecade == 0) {
    return piece;
  } else {
    return fminf(piece, number_of<kSign, kDecade - 1>(size));
  }
}

template <bool kSign>
__device__ __forceinline__ float decoded(u8 code, float scale) {
  const unsigned number = kSign ? code.bits & 127u : code.bits;
  const float size = number == 0 ? 0.0f : size_of<kSign>(static_cast<float>(number));
  return (number == code.bits ? size : -size) * scale;
}

// inverse: of the block's scale, or 0 for one that has none.
template <bool kSign>
__device__ __forceinline__ u8 coded(float value, float inverse) {
  const float size = inverse == 0.0f ? 0.0f : fabsf(value) * inverse;
  const float number = size > 0.0f ? fmaxf(number_of<kSign>(size), 0.0f) : 0.0f;
  // Adding 2^23 leaves no bits below 1: this rounds to the nearest, ties to even.
  const unsigned code = __float_as_uint(number + 0x1p23f) & 0xffu;
  const unsigned sign = kSign && code != 0 ? __float_as_uint(value) >> 24 & 0x80u : 0u;
  return {static_cast<unsigned char>(code | sign)};
}
