// One optimizer step on a flat shard, in one pass: what all rules have in common.
//
// Rule has kMoments, a struct Arguments whose first member is a StepArguments, and
//   void begin(const Arguments&) computes what is the same for all elements
//   void update(const Arguments&, float g, float& w, float (&m)[kMoments, at least 1]) const
//                                computes the new values of an element's weight and moments
#pragma once

#include "tiles.cuh"

// Arrays have numel elements each; moments and weights that a kernel does not have are null. step,
// grad_scale and skip are single values on the device; the last two may be null. sign: -1 to
// maximise. decay: 1 - lr * weight_decay if weight decay is decoupled, else 1. l2: weight decay if
// that is added to the gradient, else 0.
struct StepArguments {
  float* master;
  const void* grad;
  float* moments[2];
  void* weights;
  const float* step;
  const float* grad_scale;
  const float* skip;
  long long numel;
  float lr, sign, decay, l2;
};

struct none {
  unsigned short bits;
};  // no 16-bit weights are kept
template <class W>
static constexpr bool kKept = true;
template <>
constexpr bool kKept<none> = false;

// Arrays have at least one element, even without moments.
template <class Rule>
static constexpr int kRoom = Rule::kMoments > 0 ? Rule::kMoments : 1;

template <class Rule, class G, class W>
struct Step {
  static constexpr int kWidth = kWidthFor<f32>;
  static constexpr int kPacks = 1;  // more threads read before they write, rather than more per thread
  static constexpr int kMoments = Rule::kMoments;
  using Wide = Pack<f32, kWidth>;
  struct Loaded {
    Pack<G, kWidth> g;
    Wide w, m[kRoom<Rule>];
  };

  const typename Rule::Arguments& a;
  const StepArguments& on;
  const G* grad;
  W* weights;
  Rule rule;
  float factor;

  __device__ __forceinline__ explicit Step(const typename Rule::Arguments& arguments)
      : a(arguments),
        on(arguments.on),
        grad(static_cast<const G*>(on.grad)),
        weights(static_cast<W*>(on.weights)) {}

  __device__ __forceinline__ int head() const {
    int head = head_of<kWidth>(on.master, grad);
#pragma unroll
    for (int j = 0; j < kMoments; ++j)
      if (head_of<kWidth>(on.master, on.moments[j]) < 0) head = -1;
    if constexpr (kKept<W>)
      if (head_of<kWidth>(on.master, weights) < 0) head = -1;
    return head;
  }

  __device__ __forceinline__ Loaded load(long long i) const {
    Loaded in;
    in.g = Pack<G, kWidth>::load(grad + i);
    in.w = Wide::load(on.master + i);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) in.m[j] = Wide::load(on.moments[j] + i);
    return in;
  }

  __device__ __forceinline__ void begin() {
    rule.begin(a);
    factor = on.grad_scale == nullptr ? on.sign : *on.grad_scale * on.sign;
  }

  __device__ __forceinline__ void update(float g, float& w, float (&m)[kRoom<Rule>]) const {
    g *= factor;
    if (on.l2 != 0.0f) g = fmaf(on.l2, w, g);
    rule.update(a, g, w, m);
  }

  __device__ __forceinline__ void finish(int, long long i, const Loaded& in) const {
    float g[kWidth], w[kWidth], m[kRoom<Rule>][kWidth];
    in.g.unpack(g);
    in.w.unpack(w);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) in.m[j].unpack(m[j]);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float mine[kRoom<Rule>];
#pragma unroll
      for (int j = 0; j < kMoments; ++j) mine[j] = m[j][k];
      update(g[k], w[k], mine);
#pragma unroll
      for (int j = 0; j < kMoments; ++j) m[j][k] = mine[j];
    }
    Wide::from(w).store(on.master + i);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) Wide::from(m[j]).store(on.moments[j] + i);
    if constexpr (kKept<W>) Pack<W, kWidth>::from(w).store(weights + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    float w = on.master[i], m[kRoom<Rule>];
#pragma unroll
    for (int j = 0; j < kMoments; ++j) m[j] = on.moments[j][i];
    update(widen(grad[i]), w, m);
    on.master[i] = w;
#pragma unroll
    for (int j = 0; j < kMoments; ++j) on.moments[j][i] = m[j];
    if constexpr (kKept<W>) weights[i] = narrow<W>(w);
  }
};

template <class Rule, class G, class W>
__device__ __forceinline__ void make_step(const typename Rule::Arguments& a) {
  if (a.on.skip != nullptr && *a.on.skip != 0.0f) return;
  Step<Rule, G, W> work(a);
  run_tile(work, blockIdx.x, a.on.numel, work.head());
}

#define STEP(NAME, RULE, G, W) \
  KERNEL(NAME##_##G##_##W, RULE::Arguments, 8) { make_step<RULE, G, W>(a); }

// Instantiates a rule for all dtypes of the gradient and of the weights.
#define STEPS(NAME, RULE)      \
  STEP(NAME, RULE, f32, none)  \
  STEP(NAME, RULE, f32, bf16)  \
  STEP(NAME, RULE, f32, f16)   \
  STEP(NAME, RULE, bf16, none) \
  STEP(NAME, RULE, bf16, bf16) \
  STEP(NAME, RULE, bf16, f16)  \
  STEP(NAME, RULE, f16, none)  \
  STEP(NAME, RULE, f16, bf16)  \
  STEP(NAME, RULE, f16, f16)
