// Symmetric block-wise quantisation to 8 bits and back: Dettmers et al., 2022; Wang et al., 2023
// (ZeRO++).
//
// To quantise, a warp holds kPerWarp consecutive elements in registers, as rows of 32 packs. The
// absolute maximum of a quantisation block is found over a thread's pack, then over lanes, rows and
// warps as far as the block extends. It is found as bits: those of a NaN are larger than those of
// an infinity, and both are larger than those of any number. Instructions are the bottleneck before
// bytes are, so a thread computes nothing twice, and rare cases are behind branches that all
// threads take alike.
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

// A thread's share of its warp's elements, and for each of its rows the largest absolute value of
// the quantisation block that the row belongs to.
template <class S>
struct Rows {
  static constexpr int kWidth = kWidthFor<S>;
  static constexpr int kRows = kPerThread / kWidth;
  static constexpr int kPerRow = 32 * kWidth;

  float x[kRows][kWidth];
  unsigned peak[kRows];  // as bits

  __device__ __forceinline__ void load(const S* source) {
    Pack<S, kWidth> packs[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) packs[r] = Pack<S, kWidth>::load(source + r * kPerRow);
#pragma unroll
    for (int r = 0; r < kRows; ++r) packs[r].unpack(x[r]);
  }

  // The same, element by element, with zeros past the end. left: elements from `source` on.
  __device__ __forceinline__ void load_elements(const S* source, long long left) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int i = r * kPerRow + k;
        x[r][k] = i < left ? widen(source[i]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void find_peaks(int block) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) largest = larger_size(largest, x[r][k]);
      peak[r] = __float_as_uint(largest);
    }
    if (block >= kPerRow) {
      spread_over_lanes<true>(block);
      spread_over_rows(block);
    } else {
      spread_over_lanes<false>(block);
    }
    if (block > kPerWarp) spread_over_warps(block);
  }

  template <bool kAll>
  __device__ __forceinline__ void spread_over_lanes(int block) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      if (kAll || block > distance * kWidth) {
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
#pragma unroll 1
    for (int w = first; w < first + group; ++w) largest = max(largest, of_warp[w]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) peak[r] = largest;
  }

  // Turns x into codes that are not rounded yet. Neighbouring lanes are in one block, which has at
  // least 32 elements, so each of kRows neighbours computes the scale of one row for all of them.
  // Returns the scale of row `own_row()`.
  template <class Q>
  __device__ __forceinline__ Scale scale() {
    const Scale own = scale_of<Q>(own_peak());
    const bool zeros = __any_sync(kAllLanes, own.inverse == 0.0f);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float inverse = __shfl_sync(kAllLanes, own.inverse, r, kRows);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[r][k] *= inverse;
      if (zeros) {  // of an infinity or a NaN the product is not 0
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[r][k] = inverse == 0.0f ? 0.0f : x[r][k];
      }
    }
    return own;
  }

  __device__ __forceinline__ unsigned own_peak() const {
    unsigned of[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) of[r] = peak[r];
#pragma unroll
    for (int bit = 1; bit < kRows; bit *= 2) {
#pragma unroll
      for (int r = 0; r < kRows; r += 2 * bit) of[r] = own_row() & bit ? of[r + bit] : of[r];
    }
    return of[0];
  }

  static __device__ __forceinline__ int own_row() { return threadIdx.x % kRows; }

  template <class Q>
  __device__ __forceinline__ void store(Q* output) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) Pack<Q, kWidth>::from(x[r]).store(output + r * kPerRow);
  }

  template <class Q>
  __device__ __forceinline__ void store_elements(Q* output, long long left) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const int i = r * kPerRow + k;
        if (i < left) output[i] = narrow<Q>(x[r][k]);
      }
    }
  }
};

template <class S, class Q>
__device__ __forceinline__ void quantise(const QuantiseArguments& a) {
  using Held = Rows<S>;
  const long long tile = static_cast<long long>(blockIdx.x) * kThreads * kPerThread;
  const int place = threadIdx.x / 32 * kPerWarp + threadIdx.x % 32 * Held::kWidth;
  const S* source = static_cast<const S*>(a.source) + tile + place;
  Q* output = static_cast<Q*>(a.output) + tile + place;
  const long long left = a.numel - tile - place;
  const bool vectors =
      head_of<Held::kWidth>(source, output) == 0 && a.numel - tile >= kThreads * kPerThread;
  Held held;
  if (vectors) {
    held.load(source);
  } else {
    held.load_elements(source, left);
  }
  held.find_peaks(1 << a.log2_block);
  const Scale own = held.template scale<Q>();
  // Where the first of kRows neighbours is in the row whose scale this thread has.
  const int at = place + Held::own_row() * (Held::kPerRow - Held::kWidth);
  if ((at & ((1 << a.log2_block) - 1)) == 0 && tile + at < a.numel)
    a.scales[(tile + at) >> a.log2_block] = own.value;
  if (vectors) {
    held.store(output);
  } else {
    held.store_elements(output, left);
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

// A pack must not span two blocks, so there is no head here: either vectors are used from the first
// element on, or not at all.
template <class To, class Q>
__device__ __forceinline__ void dequantise(const DequantiseArguments& a) {
  using Work = Dequantise<To, Q>;
  Work work{static_cast<To*>(a.output), static_cast<const Q*>(a.source), a.scales, a.log2_block};
  const bool aligned = head_of<Work::kWidth>(work.output, work.source) == 0;
  run_tile(work, blockIdx.x, a.numel, aligned ? 0 : -1);
}

#define BLOCKWISE(T, Q)                                                   \
  KERNEL(quantise_##Q##_##T, QuantiseArguments, 6) { quantise<T, Q>(a); } \
  KERNEL(dequantise_##T##_##Q, DequantiseArguments, 5) { dequantise<T, Q>(a); }

BLOCKWISE(f32, s8)
BLOCKWISE(bf16, s8)
BLOCKWISE(f16, s8)
BLOCKWISE(f32, e4m3)
BLOCKWISE(bf16, e4m3)
BLOCKWISE(f16, e4m3)
