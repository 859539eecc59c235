// output = source * scale, rounded once to output's dtype. output may be source itself.
#include "tiles.cuh"

// scale: one value on the device, or null for 1.
struct Arguments {
  void* output;
  const void* source;
  const float* scale;
  long long numel;
};

template <class To, class From>
struct ScaleCast {
  static constexpr int kWidth = sizeof(To) > sizeof(From) ? kWidthFor<To> : kWidthFor<From>;
  static constexpr int kPacks = 4;
  using Loaded = Pack<From, kWidth>;

  To* output;
  const From* source;
  const float* given;
  float scale;

  __device__ __forceinline__ Loaded load(long long i) const { return Loaded::load(source + i); }

  __device__ __forceinline__ void begin() { scale = given == nullptr ? 1.0f : *given; }

  __device__ __forceinline__ void finish(int, long long i, const Loaded& in) const {
    float x[kWidth];
    in.unpack(x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] *= scale;
    Pack<To, kWidth>::from(x).store(output + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    output[i] = narrow<To>(widen(source[i]) * scale);
  }
};

template <class To, class From>
__device__ __forceinline__ void scale_cast(const Arguments& a) {
  using Work = ScaleCast<To, From>;
  Work work{static_cast<To*>(a.output), static_cast<const From*>(a.source), a.scale};
  run_tile(work, blockIdx.x, a.numel, head_of<Work::kWidth>(work.output, work.source));
}

#define SCALE_CAST(TO, FROM) \
  KERNEL(scale_cast_##TO##_##FROM, Arguments, 6) { scale_cast<TO, FROM>(a); }

SCALE_CAST(f32, f32)
SCALE_CAST(f32, bf16)
SCALE_CAST(f32, f16)
SCALE_CAST(bf16, f32)
SCALE_CAST(bf16, bf16)
SCALE_CAST(bf16, f16)
SCALE_CAST(f16, f32)
SCALE_CAST(f16, bf16)
SCALE_CAST(f16, f16)
