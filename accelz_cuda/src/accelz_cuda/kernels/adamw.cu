// One Adam or AdamW step on a flat shard, in one pass: Kingma & Ba, 2015; Loshchilov & Hutter,
// 2019.
#include "tiles.cuh"

// numel elements each. step, grad_scale and skip are single values on the device; the last two may
// be null. sign: -1 to maximise. decay: 1 - lr * weight_decay, or 1. l2: weight decay added to the
// gradient, or 0.
struct Arguments {
  float* master;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* weights;
  const float* step;
  const float* grad_scale;
  const float* skip;
  long long numel;
  float lr, sign, decay, l2;
  float beta1, one_minus_beta1, log_beta1;
  float beta2, one_minus_beta2, log_beta2;
  float eps;
};

struct Coefficients {
  float grad_scale;
  float step_size;        // lr / (1 - beta1^step)
  float inverse_sqrt_c2;  // 1 / sqrt(1 - beta2^step)
};

// 1 - beta^step = -expm1(step * log(beta)), which loses no digits for beta near 1.
__device__ __forceinline__ Coefficients coefficients(const Arguments& a) {
  const float step = *a.step, grad_scale = a.grad_scale == nullptr ? 1.0f : *a.grad_scale;
  return {grad_scale * a.sign, a.lr / -expm1f(step * a.log_beta1),
          1.0f / sqrtf(-expm1f(step * a.log_beta2))};
}

// The root and the quotient are within two units in the last place. The exact ones take a slow
// branch for zeros, which is what all elements are whose gradient has been 0 so far.
__device__ __forceinline__ void update(const Arguments& a, const Coefficients& c, float g, float& w,
                                       float& m, float& v) {
  g *= c.grad_scale;
  if (a.l2 != 0.0f) g = fmaf(a.l2, w, g);
  m = fmaf(a.beta1, m, a.one_minus_beta1 * g);
  v = fmaf(a.beta2, v, a.one_minus_beta2 * g * g);
  const float denominator = fmaf(approximate_sqrt(v), c.inverse_sqrt_c2, a.eps);
  w = fmaf(-c.step_size, __fdividef(m, denominator), w * a.decay);
}

struct none {
  unsigned short bits;
};  // no 16-bit weights are kept
template <class W>
static constexpr bool kKept = true;
template <>
constexpr bool kKept<none> = false;

template <class G, class W>
struct AdamW {
  static constexpr int kWidth = kWidthFor<f32>;
  static constexpr int kPacks = 2;
  using Wide = Pack<f32, kWidth>;
  struct Loaded {
    Pack<G, kWidth> g;
    Wide w, m, v;
  };

  const Arguments& a;
  float* master;
  const G* grad;
  float* exp_avg;
  float* exp_avg_sq;
  W* weights;
  Coefficients c;

  __device__ __forceinline__ explicit AdamW(const Arguments& arguments)
      : a(arguments),
        master(a.master),
        grad(static_cast<const G*>(a.grad)),
        exp_avg(a.exp_avg),
        exp_avg_sq(a.exp_avg_sq),
        weights(static_cast<W*>(a.weights)) {}

  __device__ __forceinline__ int head() const {
    if constexpr (kKept<W>) return head_of<kWidth>(master, grad, exp_avg, exp_avg_sq, weights);
    return head_of<kWidth>(master, grad, exp_avg, exp_avg_sq);
  }

  __device__ __forceinline__ Loaded load(long long i) const {
    return {Pack<G, kWidth>::load(grad + i), Wide::load(master + i), Wide::load(exp_avg + i),
            Wide::load(exp_avg_sq + i)};
  }

  __device__ __forceinline__ void begin() { c = coefficients(a); }

  __device__ __forceinline__ void finish(int, long long i, const Loaded& in) const {
    float g[kWidth], w[kWidth], m[kWidth], v[kWidth];
    in.g.unpack(g);
    in.w.unpack(w);
    in.m.unpack(m);
    in.v.unpack(v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) update(a, c, g[k], w[k], m[k], v[k]);
    Wide::from(w).stream(master + i);
    Wide::from(m).stream(exp_avg + i);
    Wide::from(v).stream(exp_avg_sq + i);
    if constexpr (kKept<W>) Pack<W, kWidth>::from(w).store(weights + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    float w = master[i], m = exp_avg[i], v = exp_avg_sq[i];
    update(a, c, widen(grad[i]), w, m, v);
    master[i] = w;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (kKept<W>) weights[i] = narrow<W>(w);
  }
};

template <class G, class W>
__device__ __forceinline__ void adamw(const Arguments& a) {
  if (a.skip != nullptr && *a.skip != 0.0f) return;
  AdamW<G, W> work(a);
  run_tile(work, blockIdx.x, a.numel, work.head());
}

#define ADAMW(G, W) \
  KERNEL(adamw_##G##_##W, Arguments, 4) { adamw<G, W>(a); }

ADAMW(f32, none)
ADAMW(f32, bf16)
ADAMW(f32, f16)
ADAMW(bf16, none)
ADAMW(bf16, bf16)
ADAMW(bf16, f16)
ADAMW(f16, none)
ADAMW(f16, bf16)
ADAMW(f16, f16)
