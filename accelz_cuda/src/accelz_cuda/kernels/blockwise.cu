// Symmetric block-wise quantisation to 8 bits and back: Dettmers et al., 2022; Wang et al., 2023
// (ZeRO++).
//
// Quantising, a warp holds kPerWarp consecutive elements in registers, as rows of 32 packs. The
// absolute maximum of a quantisation block is found over a thread's pack, then over lanes, rows and
// warps as far as the block reaches. Values are compared as bits: then a NaN is larger than an
// infinity, and both are larger than any number.
#include "tiles.cuh"

constexpr int kPerThread = 16;
constexpr int kPerWarp = 32 * kPerThread;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A quantisation block has 2^log2_block elements, at most kThreads * kPerThread.
struct QuantiseArguments {
  void* output;
  float* scales;
  const void* source;
  long long numel;
  int log2_block;
};

struct DequantiseArguments {
  void* output;
  const void* source;
  const float* scales;
  long long numel;
  int log2_block;
};

template <class Q>
static constexpr float kLimit = 0.0f;
template <>
constexpr float kLimit<s8> = 127.0f;
template <>
constexpr float kLimit<e4m3> = 448.0f;

struct Scale {
  float value;
  float inverse;  // 0 where all codes of the block are 0
};

template <class Q>
__device__ __forceinline__ Scale scale_of(unsigned peak) {
  constexpr unsigned kInfinity = 0x7f800000u, kNan = 0x7fffffffu;
  constexpr float kSmallestNormal = 0x1p-126f;
  if (peak >= kInfinity) return {__uint_as_float(kNan), 0.0f};
  const float value = __uint_as_float(peak) / kLimit<Q>;
  if (value < kSmallestNormal) return {0.0f, 0.0f};
  return {value, 1.0f / value};
}

template <class S>
struct Rows {
  static constexpr int kWidth = kWidthFor<S>;
  static constexpr int kRows = kPerThread / kWidth;
  static constexpr int kPerRow = 32 * kWidth;

  float x[kRows][kWidth];
  unsigned peak[kRows];  // the largest absolute value, as bits

  __device__ __forceinline__ void load(const S* source, long long first) {
    Pack<S, kWidth> packs[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) packs[r] = Pack<S, kWidth>::load(source + first + r * kPerRow);
#pragma unroll
    for (int r = 0; r < kRows; ++r) packs[r].unpack(x[r]);
  }

  // The same element by element, with zeros past the end.
  __device__ __forceinline__ void load_elements(const S* source, long long first, long long numel) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const long long i = first + r * kPerRow + k;
        x[r][k] = i < numel ? widen(source[i]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void find_peaks(int block) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      peak[r] = 0;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        peak[r] = max(peak[r], __float_as_uint(x[r][k]) & 0x7fffffffu);
    }
    spread_over_lanes(block);
    spread_over_rows(block);
    if (block > kPerWarp) spread_over_warps(block);
  }

  __device__ __forceinline__ void spread_over_lanes(int block) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      if (block > distance * kWidth) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          peak[r] = max(peak[r], __shfl_xor_sync(kAllLanes, peak[r], distance));
      }
    }
  }

  __device__ __forceinline__ void spread_over_rows(int block) {
#pragma unroll
    for (int distance = 1; distance < kRows; distance *= 2) {
      if (block > distance * kPerRow) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if ((r & distance) == 0) peak[r] = peak[r | distance] = max(peak[r], peak[r | distance]);
        }
      }
    }
  }

  __device__ __forceinline__ void spread_over_warps(int block) {
    __shared__ unsigned of_warp[kWarps];
    const int warp = threadIdx.x / 32, group = block / kPerWarp, first = warp & ~(group - 1);
    if (threadIdx.x % 32 == 0) of_warp[warp] = peak[0];
    __syncthreads();
    unsigned largest = 0;
    for (int w = first; w < first + group; ++w) largest = max(largest, of_warp[w]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) peak[r] = largest;
  }
};

template <class S, class Q>
__device__ __forceinline__ void quantise(const QuantiseArguments& a) {
  using Held = Rows<S>;
  const S* source = static_cast<const S*>(a.source);
  Q* output = static_cast<Q*>(a.output);
  const int block = 1 << a.log2_block;
  const long long tile = static_cast<long long>(blockIdx.x) * kThreads * kPerThread;
  const long long first = tile + threadIdx.x / 32 * kPerWarp + threadIdx.x % 32 * Held::kWidth;
  const bool vectors =
      head_of<Held::kWidth>(source, output) == 0 && tile + kThreads * kPerThread <= a.numel;
  Held held;
  if (vectors) {
    held.load(source, first);
  } else {
    held.load_elements(source, first, a.numel);
  }
  held.find_peaks(block);
#pragma unroll
  for (int r = 0; r < Held::kRows; ++r) {
    const long long i = first + r * Held::kPerRow;
    const Scale scale = scale_of<Q>(held.peak[r]);
    if (i < a.numel && (i & (block - 1)) == 0) a.scales[i >> a.log2_block] = scale.value;
    float codes[Held::kWidth];
#pragma unroll
    for (int k = 0; k < Held::kWidth; ++k)
      codes[k] = scale.inverse == 0.0f ? 0.0f : held.x[r][k] * scale.inverse;
    if (vectors) {
      Pack<Q, Held::kWidth>::from(codes).store(output + i);
    } else {
#pragma unroll
      for (int k = 0; k < Held::kWidth; ++k) {
        if (i + k < a.numel) output[i + k] = narrow<Q>(codes[k]);
      }
    }
  }
}

template <class To, class Q>
struct Dequantise {
  static constexpr int kWidth = kWidthFor<To>;
  static constexpr int kPacks = 4;
  struct Loaded {
    Pack<Q, kWidth> codes;
    float scale;
  };

  To* output;
  const Q* source;
  const float* scales;
  int log2_block;

  __device__ __forceinline__ Loaded load(long long i) const {
    return {Pack<Q, kWidth>::load(source + i), __ldg(scales + (i >> log2_block))};
  }

  __device__ __forceinline__ void begin() {}

  __device__ __forceinline__ void finish(int, long long i, const Loaded& in) const {
    float x[kWidth];
    in.codes.unpack(x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] *= in.scale;
    Pack<To, kWidth>::from(x).store(output + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    output[i] = narrow<To>(widen(source[i]) * scales[i >> log2_block]);
  }
};

// A pack must not span two blocks, so there is no head here: vectors from the first element, or
// none.
template <class To, class Q>
__device__ __forceinline__ void dequantise(const DequantiseArguments& a) {
  using Work = Dequantise<To, Q>;
  Work work{static_cast<To*>(a.output), static_cast<const Q*>(a.source), a.scales, a.log2_block};
  const bool aligned = head_of<Work::kWidth>(work.output, work.source) == 0;
  run_tile(work, blockIdx.x, a.numel, aligned ? 0 : -1);
}

#define BLOCKWISE(T, Q)                                                   \
  KERNEL(quantise_##Q##_##T, QuantiseArguments, 5) { quantise<T, Q>(a); } \
  KERNEL(dequantise_##T##_##Q, DequantiseArguments, 6) { dequantise<T, Q>(a); }

BLOCKWISE(f32, s8)
BLOCKWISE(bf16, s8)
BLOCKWISE(f16, s8)
BLOCKWISE(f32, e4m3)
BLOCKWISE(bf16, e4m3)
BLOCKWISE(f16, e4m3)
