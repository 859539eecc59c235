// The sum of squares over several tensors of several dtypes, in one pass and in a fixed order.
//
// Each block adds up the tiles with its number modulo the grid's size and writes one partial sum; a
// second, small kernel adds the partial sums. There are no atomics, so the same input on the same
// kind of device gives the same bits. A NaN or an infinity anywhere, or an overflow, makes the sum
// nonfinite, since squares cannot cancel.
#include "tiles.cuh"

constexpr int kSpans = 128;
constexpr int kWarps = kThreads / 32;

// One tensor. first_tile: the number of tiles in the spans before it. format: see `add_tile`.
struct Span {
  const void* data;
  long long numel;
  int first_tile;
  int format;
};

struct PartialArguments {
  float* partials;  // one per block
  int spans;
  int tiles;
  Span span[kSpans];
};

struct TotalArguments {
  const float* partials;
  float* output;  // the sum, and 1 if it is nonfinite, else 0
  long long count;
};

template <class T>
struct Squares {
  static constexpr int kWidth = kWidthFor<T>;
  static constexpr int kPacks = 4;
  using Loaded = Pack<T, kWidth>;

  const T* data;
  float (&sums)[kPacks];  // one for each of a thread's packs, so that additions do not wait for
                          // each other

  __device__ __forceinline__ Loaded load(long long i) const { return Loaded::load(data + i); }

  __device__ __forceinline__ void begin() {}

  __device__ __forceinline__ void finish(int u, long long, const Loaded& in) const {
    float x[kWidth];
    in.unpack(x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[u] = fmaf(x[k], x[k], sums[u]);
  }

  __device__ __forceinline__ void element(long long i) const {
    const float x = widen(data[i]);
    sums[0] = fmaf(x, x, sums[0]);
  }
};

template <class T>
__device__ __forceinline__ void add_squares(const Span& span, int tile, float (&sums)[4]) {
  Squares<T> work{static_cast<const T*>(span.data), sums};
  run_tile(work, tile - span.first_tile, span.numel, head_of<Squares<T>::kWidth>(work.data));
}

__device__ __forceinline__ void add_tile(const Span& span, int tile, float (&sums)[4]) {
  if (span.format == 0) {
    add_squares<f32>(span, tile, sums);
  } else if (span.format == 1) {
    add_squares<bf16>(span, tile, sums);
  } else {
    add_squares<f16>(span, tile, sums);
  }
}

// Returns the sum over the block's threads, in thread 0.
__device__ __forceinline__ float block_sum(float sum) {
  __shared__ float of_warp[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += of_warp[warp];
  }
  return total;
}

KERNEL(norm_partials, PartialArguments, 6) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  int at = 0;
  for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    while (at + 1 < a.spans && tile >= a.span[at + 1].first_tile) ++at;
    add_tile(a.span[at], tile, sums);
  }
  const float sum = block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (threadIdx.x == 0) a.partials[blockIdx.x] = sum;
}

KERNEL(norm_total, TotalArguments, 1) {
  float sum = 0.0f;
  for (long long i = threadIdx.x; i < a.count; i += kThreads) sum += a.partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    constexpr float kLargest = 0x1.fffffep127f;
    a.output[0] = sum;
    a.output[1] = sum <= kLargest ? 0.0f : 1.0f;
  }
}
