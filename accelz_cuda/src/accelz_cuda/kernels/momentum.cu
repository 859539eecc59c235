// One step of stochastic gradient descent with momentum: Sutskever et al., 2013.
#include "step.cuh"

struct Momentum {
  static constexpr int kMoments = 1;
  struct Constants {
    float momentum, nesterov;
  };

  __device__ __forceinline__ void begin(const Update&, const Rates&, const Constants&) {}

  __device__ __forceinline__ void update(const Rates& r, const Constants& c, float g, float& w,
                                         float (&m)[1]) const {
    m[0] = fmaf(c.momentum, m[0], g);
    w = fmaf(-r.lr, c.nesterov != 0.0f ? fmaf(c.momentum, m[0], g) : m[0], w);
  }
};

STEPS(momentum, Momentum)
