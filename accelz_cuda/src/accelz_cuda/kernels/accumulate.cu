// total += addend, in fp32, rounded once to total's dtype.
#include "tiles.cuh"

struct Arguments {
  void* total;
  const void* addend;
  long long numel;
};

template <class Total, class Addend>
struct Accumulate {
  static constexpr int kWidth = kWidthFor<Total>;
  static constexpr int kPacks = 2;
  struct Loaded {
    Pack<Total, kWidth> total;
    Pack<Addend, kWidth> addend;
  };

  Total* total;
  const Addend* addend;

  __device__ __forceinline__ Loaded load(long long i) const {
    return {Pack<Total, kWidth>::load(total + i), Pack<Addend, kWidth>::load(addend + i)};
  }

  __device__ __forceinline__ void begin() {}

  __device__ __forceinline__ void finish(int, long long i, const Loaded& in) const {
    float t[kWidth], x[kWidth];
    in.total.unpack(t);
    in.addend.unpack(x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) t[k] += x[k];
    Pack<Total, kWidth>::from(t).store(total + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    total[i] = narrow<Total>(widen(total[i]) + widen(addend[i]));
  }
};

template <class Total, class Addend>
__device__ __forceinline__ void accumulate(const Arguments& a) {
  using Work = Accumulate<Total, Addend>;
  Work work{static_cast<Total*>(a.total), static_cast<const Addend*>(a.addend)};
  run_tile(work, blockIdx.x, a.numel, head_of<Work::kWidth>(work.total, work.addend));
}

#define ACCUMULATE(TOTAL, ADDEND) \
  KERNEL(accumulate_##TOTAL##_##ADDEND, Arguments, 6) { accumulate<TOTAL, ADDEND>(a); }

ACCUMULATE(f32, f32)
ACCUMULATE(f32, bf16)
ACCUMULATE(f32, f16)
ACCUMULATE(bf16, bf16)
ACCUMULATE(f16, f16)
