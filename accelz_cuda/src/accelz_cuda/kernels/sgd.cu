// One step of stochastic gradient descent, with and without momentum: Sutskever et al., 2013.
#include "step.cuh"

struct Sgd {
  static constexpr int kMoments = 0;
  struct Arguments {
    StepArguments on;
    float momentum;
    int nesterov;
  };

  __device__ __forceinline__ void begin(const Arguments&) {}

  __device__ __forceinline__ void update(const Arguments& a, float g, float& w, float (&)[1]) const {
    w = fmaf(-a.on.lr, g, w);
  }
};

struct Momentum {
  static constexpr int kMoments = 1;
  using Arguments = Sgd::Arguments;

  __device__ __forceinline__ void begin(const Arguments&) {}

  __device__ __forceinline__ void update(const Arguments& a, float g, float& w,
                                         float (&m)[1]) const {
    m[0] = fmaf(a.momentum, m[0], g);
    w = fmaf(-a.on.lr, a.nesterov ? fmaf(a.momentum, m[0], g) : m[0], w);
  }
};

STEPS(sgd, Sgd)
STEPS(momentum, Momentum)
