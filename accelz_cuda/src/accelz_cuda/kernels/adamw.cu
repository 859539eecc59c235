// One Adam or AdamW step: Kingma & Ba, 2015; Loshchilov & Hutter, 2019.
#include "step.cuh"

struct AdamW {
  static constexpr int kMoments = 2;
  struct Constants {
    float beta1, one_minus_beta1, log_beta1;
    float beta2, one_minus_beta2, log_beta2;
    float eps;
  };

  float step_size;        // lr / (1 - beta1^step)
  float inverse_sqrt_c2;  // 1 / sqrt(1 - beta2^step)

  // 1 - beta^step = -expm1(step * log(beta)), which loses no digits for beta near 1.
  __device__ __forceinline__ void begin(const Update& u, const Rates& r, const Constants& c) {
    const float step = *u.step;
    step_size = r.lr / -expm1f(step * c.log_beta1);
    inverse_sqrt_c2 = 1.0f / sqrtf(-expm1f(step * c.log_beta2));
  }

  // The root and the quotient are within two units in the last place. The exact ones take a slow
  // branch for zeros, and elements whose gradient has been 0 so far are all zeros.
  __device__ __forceinline__ void update(const Rates& r, const Constants& c, float g,
                                         float& w, float (&m)[2]) const {
    m[0] = fmaf(c.beta1, m[0], c.one_minus_beta1 * g);
    m[1] = fmaf(c.beta2, m[1], c.one_minus_beta2 * g * g);
    const float denominator = fmaf(approximate_sqrt(m[1]), inverse_sqrt_c2, c.eps);
    w = fmaf(-step_size, __fdividef(m[0], denominator), w * r.decay);
  }
};

STEPS(adamw, AdamW)
