// How a flat range is spread over the grid: one tile per block, in vectors where the operands allow
// it.
//
// A *pack* is what a thread reads of one operand at a time: kWidth elements, chosen so that the
// widest operand takes 16 bytes and a warp's lanes access consecutive bytes of every operand. A
// thread first reads kPacks packs, so that enough bytes are in flight, and only then computes and
// writes.
//
// Vector accesses need aligned addresses. *head* is the number of elements before the first one at
// which all operands are aligned to their pack; if there is none (the operands are shifted against
// each other), all elements are processed one at a time.
#pragma once

#include "formats.cuh"

constexpr int kThreads = 256;

// Kernels take one argument struct by value, which keeps addresses and sizes in one place.
// MIN_BLOCKS: blocks that a multiprocessor must be able to hold, which bounds the registers of a
// thread.
#ifndef KERNEL
#define KERNEL(NAME, ARGUMENTS, MIN_BLOCKS)                          \
  extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) \
      NAME(const __grid_constant__ ARGUMENTS a)
#endif

// The width of packs in a kernel whose widest operand is T.
template <class T>
static constexpr int kWidthFor = 16 / static_cast<int>(sizeof(T));

#ifdef __CUDA_ARCH__
template <class Vector>
__device__ __forceinline__ Vector load_vector(const void* from) {
  return *static_cast<const Vector*>(from);
}

// In assembly, because the compiler splits some of these vectors in two if they are written in C++.
__device__ __forceinline__ void store_vector(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_vector(void* to, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
#endif

template <class T, int N>
struct Pack {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "a pack is 4, 8 or 16 bytes");

  unsigned words[kWords];

  // No hints to evict first, here or in `store`: on an H200 they cost AdamW 7 % of its bandwidth.
  static __device__ __forceinline__ Pack load(const T* from) {
    if constexpr (kWords == 4) {
      const uint4 v = load_vector<uint4>(from);
      return {{v.x, v.y, v.z, v.w}};
    } else if constexpr (kWords == 2) {
      const uint2 v = load_vector<uint2>(from);
      return {{v.x, v.y}};
    } else {
      return {{load_vector<unsigned>(from)}};
    }
  }

  __device__ __forceinline__ void unpack(float (&values)[N]) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) Packing<T>::unpack(words[k], values + k * kPerWord);
  }

  static __device__ __forceinline__ Pack from(const float (&values)[N]) {
    Pack pack;
#pragma unroll
    for (int k = 0; k < kWords; ++k) pack.words[k] = Packing<T>::pack(values + k * kPerWord);
    return pack;
  }

  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kWords == 4) {
      store_vector(to, make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (kWords == 2) {
      store_vector(to, make_uint2(words[0], words[1]));
    } else {
      *reinterpret_cast<unsigned*>(to) = words[0];
    }
  }
};

// The number of elements by which an address is past an aligned pack of N.
template <int N, class T>
__device__ __forceinline__ int past(const T* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) / sizeof(T)) & (N - 1);
}

// The head (see the top of this file); -1 if there is no aligned element.
template <int N, class First, class... Rest>
__device__ __forceinline__ int head_of(const First* first, const Rest*... rest) {
  const int shift = past<N>(first);
  return (true && ... && (past<N>(rest) == shift)) ? (N - shift) & (N - 1) : -1;
}

// Work has kWidth, kPacks, a struct Loaded, and
//   Loaded load(long long i)     reads the pack that starts at element i
//   void begin()                 loads what only computing needs, once the reads are in flight
//   void finish(int u, long long i, const Loaded&)
//                                computes and writes a pack; u numbers the packs of a thread
//   void element(long long i)    does all of this for one element
template <class Work>
static constexpr int kTile = kThreads * Work::kPacks * Work::kWidth;

// Processes tile number `tile` of `numel` elements. The head belongs to the first tile; an
// incomplete tile is processed element by element.
template <class Work>
__device__ __forceinline__ void run_tile(Work& work, long long tile, long long numel, int head) {
  const long long low = tile * kTile<Work> + (head > 0 ? head : 0);
  long long from = tile == 0 ? 0 : low;
  long long to = low + kTile<Work> < numel ? low + kTile<Work> : numel;
  const bool vectors = head >= 0 && low + kTile<Work> <= numel;
  const long long first = low + static_cast<int>(threadIdx.x) * Work::kWidth;
  constexpr int kStride = kThreads * Work::kWidth;
  typename Work::Loaded loaded[Work::kPacks];
  if (vectors) {
#pragma unroll
    for (int u = 0; u < Work::kPacks; ++u) loaded[u] = work.load(first + u * kStride);
  }
  work.begin();
  if (vectors) {
#pragma unroll
    for (int u = 0; u < Work::kPacks; ++u) work.finish(u, first + u * kStride, loaded[u]);
    to = tile == 0 ? head : from;
  }
#pragma unroll 1
  for (long long i = from + threadIdx.x; i < to; i += kThreads) work.element(i);
}
