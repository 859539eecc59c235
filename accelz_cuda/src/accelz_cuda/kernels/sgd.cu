// One step of stochastic gradient descent.
#include "step.cuh"

struct Sgd {
  static constexpr int kMoments = 0;
  struct Constants {};

  __device__ __forceinline__ void begin(const Update&, const Rates&, const Constants&) {}

  __device__ __forceinline__ void update(const Rates& r, const Constants&, float g, float& w,
                                         float (&)[1]) const {
    w = fmaf(-r.lr, g, w);
  }
};

STEPS_OF(sgd, Sgd, f32)
