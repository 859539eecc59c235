// One Lion step: Chen et al., 2023, arXiv:2302.06675.
#include "step.cuh"

// Interpolates between `from` (at 0) and `to` (at 1); exact at the end that `at` is near.
__device__ __forceinline__ float between(float from, float to, float at) {
  return at < 0.5f ? fmaf(at, to - from, from) : fmaf(at - 1.0f, to - from, to);
}

struct Lion {
  static constexpr int kMoments = 1;
  struct Constants {
    float one_minus_beta1, one_minus_beta2;
  };

  __device__ __forceinline__ void begin(const Update&, const Rates&, const Constants&) {}

  __device__ __forceinline__ void update(const Rates& r, const Constants& c, float g,
                                         float& w, float (&m)[1]) const {
    const float towards = between(m[0], g, c.one_minus_beta1);
    const float direction = static_cast<float>((towards > 0.0f) - (towards < 0.0f));
    w = fmaf(-r.lr, direction, w * r.decay);
    m[0] = between(m[0], g, c.one_minus_beta2);
  }
};

STEPS(lion, Lion)
