// How values are stored: fp32, the 16-bit floats, and the 8-bit codes of quantised values.
//
// All arithmetic is in fp32, and only this file knows the bits of values. Nothing is included from
// the CUDA toolkit, so NVRTC can compile the kernels on machines without one. What a GPU has no
// instruction for is done on integers, by code that the tests also run on the host, where they
// provide the three functions below.
#pragma once

using f32 = float;
struct bf16 {
  unsigned short bits;
};
struct f16 {
  unsigned short bits;
};
struct s8 {
  unsigned char bits;
};
struct e4m3 {
  unsigned char bits;
};  // float8_e4m3fn: no infinities, 0x7f is NaN, the largest value is 448

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float f16_to(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short f16_from(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float approximate_sqrt(float value) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// The larger of two absolute values; NaN if one of them is.
__device__ __forceinline__ float larger_size(float a, float b) {
  float size;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(a)), "f"(fabsf(b)));
  return size;
}

__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(low), "f"(high));
  return bits;
}

__device__ __forceinline__ unsigned f16_pair(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(low), "f"(high));
  return bits;
}
#else
// As bits, a NaN is larger than an infinity, and both are larger than any number.
__device__ __forceinline__ float larger_size(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
}

// Rounds to the nearest, ties to even, by adding half a unit in the last place, less one bit if the
// result is even.
__device__ __forceinline__ unsigned bf16_from(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
  return bf16_from(low) | bf16_from(high) << 16;
}

__device__ __forceinline__ unsigned f16_pair(float low, float high) {
  return f16_from(low) | static_cast<unsigned>(f16_from(high)) << 16;
}
#endif

// For absolute values of at most 448.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
  unsigned short bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(bits) : "f"(low), "f"(high));
  return bits;
}

__device__ __forceinline__ void from_e4m3_pair(unsigned bits, float* values) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bits)));
  values[0] = f16_to(static_cast<unsigned short>(halves));
  values[1] = f16_to(static_cast<unsigned short>(halves >> 16));
}
#else
// Below 2^-6 the codes are multiples of 2^-9; above, the upper bits of an fp32 with another
// exponent bias.
__device__ __forceinline__ unsigned e4m3_from(float value) {
  const unsigned bits = __float_as_uint(value), size = bits & 0x7fffffffu,
                 sign = bits >> 24 & 0x80u;
  constexpr unsigned kSmallestNormal = 0x3c800000u;  // 2^-6
  constexpr unsigned kBias = (127u - 7u) << 3;
  if (size > 0x7f800000u) return sign | 0x7fu;
  if (size < kSmallestNormal)
    return sign | static_cast<unsigned>(rintf(__uint_as_float(size) * 512.0f));
  return sign | (((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - kBias);
}

__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
  return e4m3_from(low) | e4m3_from(high) << 8;
}

// The code's exponent and fraction, moved to the place of an fp32's, are 2^-120 of the value, also
// for denormals.
__device__ __forceinline__ float e4m3_to(unsigned bits) {
  const unsigned size = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  if (size == 0x7fu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << 20) * 0x1p120f));
}

__device__ __forceinline__ void from_e4m3_pair(unsigned bits, float* values) {
  values[0] = e4m3_to(bits);
  values[1] = e4m3_to(bits >> 8);
}
#endif

// Adding 1.5 * 2^23 leaves no bits below 1: this rounds to the nearest, ties to even, and the
// lowest byte is the integer in two's complement. For absolute values of at most 127.
__device__ __forceinline__ unsigned s8_from(float value) {
  return __float_as_uint(value + 0x1.8p23f) & 0xffu;
}

// Packing<T>: the values in one 32-bit word.
template <class T>
struct Packing;

template <>
struct Packing<f32> {
  static __device__ __forceinline__ void unpack(unsigned word, float* values) {
    values[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ unsigned pack(const float* values) {
    return __float_as_uint(values[0]);
  }
};

template <>
struct Packing<bf16> {
  static __device__ __forceinline__ void unpack(unsigned word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ unsigned pack(const float* values) {
    return bf16_pair(values[0], values[1]);
  }
};

template <>
struct Packing<f16> {
  static __device__ __forceinline__ void unpack(unsigned word, float* values) {
    values[0] = f16_to(static_cast<unsigned short>(word));
    values[1] = f16_to(static_cast<unsigned short>(word >> 16));
  }
  static __device__ __forceinline__ unsigned pack(const float* values) {
    return f16_pair(values[0], values[1]);
  }
};

template <>
struct Packing<s8> {
  static __device__ __forceinline__ void unpack(unsigned word, float* values) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      values[k] = static_cast<float>(static_cast<signed char>(word >> 8 * k));
  }
  static __device__ __forceinline__ unsigned pack(const float* values) {
    return s8_from(values[0]) | s8_from(values[1]) << 8 | s8_from(values[2]) << 16 |
           s8_from(values[3]) << 24;
  }
};

template <>
struct Packing<e4m3> {
  static __device__ __forceinline__ void unpack(unsigned word, float* values) {
    from_e4m3_pair(word & 0xffffu, values);
    from_e4m3_pair(word >> 16, values + 2);
  }
  static __device__ __forceinline__ unsigned pack(const float* values) {
    return e4m3_pair(values[0], values[1]) | e4m3_pair(values[2], values[3]) << 16;
  }
};

// The same conversions for one value at a time.

__device__ __forceinline__ float widen(f32 value) { return value; }

template <class T>
__device__ __forceinline__ float widen(T value) {
  float values[4 / sizeof(T)];
  Packing<T>::unpack(value.bits, values);
  return values[0];
}

template <class T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    float values[4 / sizeof(T)] = {value};
    return T{static_cast<decltype(T::bits)>(Packing<T>::pack(values))};
  }
}
