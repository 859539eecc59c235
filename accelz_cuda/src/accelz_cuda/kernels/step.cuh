// One optimizer step on a flat shard, in one pass: what all rules have in common.
//
// Rule has kMoments, a struct Constants of floats, as in accelz.updates, and
//   void begin(const Update&, const Rates&, const Constants&) computes what is the same for all elements
//   void update(const Rates&, const Constants&, float g, float& w, float (&m)[kMoments or 1]) const
//                                computes the new values of an element's weight and moments
#pragma once

#include "dynamic_map.cuh"
#include "tiles.cuh"

// decay: 1 - lr * weight_decay if weight decay is decoupled, else 1.
struct Rates {
  float lr, decay;
};

// Arrays have numel elements each; moments and weights that a kernel does not have are null. master:
// of fp32, or of remainders where masters are split. step,
// grad_scale and skip are single values on the device; the last two may be null. sign: -1 to
// maximise. rates: of a captured step, which each replay reads; null: lr and decay are. l2: weight
// decay if that is added to the gradient, else 0. stochastic: whether moments in bf16 are rounded up
// or down at random. scales: of moments in 8 bits, one for each of their blocks; else null.
struct Update {
  void* master;
  const void* grad;
  void* moments[2];
  float* scales[2];
  void* weights;
  const float* step;
  const float* grad_scale;
  const float* skip;
  const Rates* rates;
  long long numel;
  float lr, sign, decay, l2;
  float constants[8];
  int stochastic;
};

// As `noise_of` in accelz.updates: what is added to the bits of new moments before those that bf16
// lacks are dropped. moment: the first. number: the step's bits times a factor.
__device__ __forceinline__ unsigned noise_of(float moment, float master, unsigned number) {
  unsigned h = __float_as_uint(master) * 0x9e3779b1u + __float_as_uint(moment) + number;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h >> 16;
}

// Returns a value of bf16.
__device__ __forceinline__ float rounded_at_random(float moment, unsigned noise) {
  const unsigned bits = __float_as_uint(moment);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? __uint_as_float((bits + noise) & 0xffff0000u) : moment;
}

struct none {
  unsigned short bits;
};  // no 16-bit weights are kept
template <class W>
static constexpr bool kKept = true;
template <>
constexpr bool kKept<none> = false;

// Masters in fp32, with their copies in W.
template <class W>
struct Masters {
  f32* first;
  W* weights;

  __device__ __forceinline__ explicit Masters(const Update& u)
      : first(static_cast<f32*>(u.master)), weights(static_cast<W*>(u.weights)) {}

  __device__ __forceinline__ float get(long long i) const { return first[i]; }
  __device__ __forceinline__ void set(long long i, float w) const {
    first[i] = w;
    if constexpr (kKept<W>) weights[i] = narrow<W>(w);
  }

  template <int N>
  struct Packs {
    Pack<f32, N> master;

    __device__ __forceinline__ void load(const Masters& from, long long i) {
      master = Pack<f32, N>::load(from.first + i);
    }
    __device__ __forceinline__ void unpack(float (&w)[N]) const { master.unpack(w); }
    static __device__ __forceinline__ void store(const Masters& to, long long i,
                                                 const float (&w)[N]) {
      Pack<f32, N>::from(w).store(to.first + i);
      if constexpr (kKept<W>) Pack<W, N>::from(w).store(to.weights + i);
    }
  };
};

// What bf16 weights lack of their masters, as in accelz.updates.
struct split {
  unsigned short bits;
};

// What is left beside a weight that was overwritten by 0 must not become a NaN.
__device__ __forceinline__ float joined(unsigned high, unsigned low) {
  const int rest = static_cast<short>(low);
  return __uint_as_float((high << 16) +
                         static_cast<unsigned>((high & 0x7fffu) != 0 || rest > 0 ? rest : 0));
}

// The bits of a value, or of its neighbour, where a tie rounded down would have no remainder.
__device__ __forceinline__ unsigned untied(float w) {
  const unsigned bits = __float_as_uint(w);
  return bits - ((bits & 0x1ffffu) == 0x8000u ? 1u : 0u);
}

template <>
struct Masters<split> {
  split* first;
  bf16* weights;

  __device__ __forceinline__ explicit Masters(const Update& u)
      : first(static_cast<split*>(u.master)), weights(static_cast<bf16*>(u.weights)) {}

  __device__ __forceinline__ float get(long long i) const {
    return joined(weights[i].bits, first[i].bits);
  }
  __device__ __forceinline__ void set(long long i, float w) const {
    const unsigned bits = untied(w);
    weights[i] = narrow<bf16>(__uint_as_float(bits));
    first[i] = split{static_cast<unsigned short>(bits)};
  }

  template <int N>
  struct Packs {
    Pack<split, N> low;
    Pack<bf16, N> high;

    __device__ __forceinline__ void load(const Masters& from, long long i) {
      low = Pack<split, N>::load(from.first + i);
      high = Pack<bf16, N>::load(from.weights + i);
    }
    __device__ __forceinline__ void unpack(float (&w)[N]) const {
#pragma unroll
      for (int k = 0; k < N / 2; ++k) {
        w[2 * k] = joined(high.words[k] & 0xffffu, low.words[k]);
        w[2 * k + 1] = joined(high.words[k] >> 16, low.words[k] >> 16);
      }
    }
    static __device__ __forceinline__ void store(const Masters& to, long long i,
                                                 const float (&w)[N]) {
      Packs packs;
#pragma unroll
      for (int k = 0; k < N / 2; ++k) {
        const unsigned a = untied(w[2 * k]), b = untied(w[2 * k + 1]);
        packs.low.words[k] = (a & 0xffffu) | b << 16;
        packs.high.words[k] = bf16_pair(__uint_as_float(a), __uint_as_float(b));
      }
      packs.low.store(to.first + i);
      packs.high.store(to.weights + i);
    }
  };
};

// Whether moments are kept in fewer bits than they are computed in.
template <class M>
static constexpr bool kRounds = sizeof(M) < sizeof(float);

// Arrays have at least one element, even without moments.
template <class Rule>
static constexpr int kRoom = Rule::kMoments > 0 ? Rule::kMoments : 1;

template <class Rule, class G, class W, class M>
struct Step {
  static constexpr int kWidth = kWidthFor<f32>;
  static constexpr int kPacks = 1;  // more threads read before they write, rather than more per thread
  static constexpr int kMoments = Rule::kMoments;
  using MasterPacks = typename Masters<W>::template Packs<kWidth>;
  struct Loaded {
    Pack<G, kWidth> g;
    MasterPacks w;
    Pack<M, kWidth> m[kRoom<Rule>];
  };

  using Constants = typename Rule::Constants;

  const Update& u;
  const Constants& c;
  const G* grad;
  Masters<W> masters;
  Rule rule;
  Rates rates;
  float factor;
  unsigned number;

  __device__ __forceinline__ explicit Step(const Update& update)
      : u(update),
        c(*reinterpret_cast<const Constants*>(update.constants)),
        grad(static_cast<const G*>(u.grad)),
        masters(u) {
    static_assert(sizeof(Constants) <= sizeof(u.constants), "more constants than there is room for");
  }

  __device__ __forceinline__ M* moment(int j) const { return static_cast<M*>(u.moments[j]); }

  __device__ __forceinline__ int head() const {
    int head = head_of<kWidth>(masters.first, grad);
#pragma unroll
    for (int j = 0; j < kMoments; ++j)
      if (head_of<kWidth>(masters.first, moment(j)) < 0) head = -1;
    if constexpr (kKept<W>)
      if (head_of<kWidth>(masters.first, masters.weights) < 0) head = -1;
    return head;
  }

  __device__ __forceinline__ Loaded load(long long i) const {
    Loaded in;
    in.g = Pack<G, kWidth>::load(grad + i);
    in.w.load(masters, i);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) in.m[j] = Pack<M, kWidth>::load(moment(j) + i);
    return in;
  }

  __device__ __forceinline__ void begin() {
    rates = u.rates == nullptr ? Rates{u.lr, u.decay} : *u.rates;
    rule.begin(u, rates, c);
    factor = u.grad_scale == nullptr ? u.sign : *u.grad_scale * u.sign;
    if constexpr (kRounds<M>) number = u.step == nullptr ? 0 : __float_as_uint(*u.step) * 0x85ebca77u;
  }

  __device__ __forceinline__ void update(float g, float& w, float (&m)[kRoom<Rule>]) const {
    g *= factor;
    if (u.l2 != 0.0f) g = fmaf(u.l2, w, g);
    rule.update(rates, c, g, w, m);
    if constexpr (kRounds<M>)
      if (u.stochastic != 0) {
        const unsigned noise = noise_of(m[0], w, number);
#pragma unroll
        for (int j = 0; j < kMoments; ++j) m[j] = rounded_at_random(m[j], noise);
      }
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
    MasterPacks::store(masters, i, w);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) Pack<M, kWidth>::from(m[j]).store(moment(j) + i);
  }

  __device__ __forceinline__ void element(long long i) const {
    float w = masters.get(i), m[kRoom<Rule>];
#pragma unroll
    for (int j = 0; j < kMoments; ++j) m[j] = widen(moment(j)[i]);
    update(widen(grad[i]), w, m);
    masters.set(i, w);
#pragma unroll
    for (int j = 0; j < kMoments; ++j) moment(j)[i] = narrow<M>(m[j]);
  }
};

template <class Rule, class G, class W, class M>
__device__ __forceinline__ void make_step(const Update& u) {
  if (u.skip != nullptr && *u.skip != 0.0f) return;
  Step<Rule, G, W, M> work(u);
  run_tile(work, blockIdx.x, u.numel, work.head());
}

// The second moment is a sum of squares.
template <int kMoment>
static constexpr bool kSigned = kMoment == 0;

// A warp's block of elements with moments in 8 bits. A lane has every 32nd of them, so that a warp's
// accesses are to consecutive elements, wherever the block begins.
template <class Rule, class G, class W>
struct CodedBlock {
  static constexpr int kLanes = 32, kShare = kBlock / kLanes;
  static constexpr unsigned kAll = 0xffffffffu;

  const Update& u;
  long long block, first;  // the lane's first element
  float m[kRoom<Rule>][kShare];

  __device__ __forceinline__ u8* codes(int j) const { return static_cast<u8*>(u.moments[j]); }

  template <int j>
  __device__ __forceinline__ void open() {
    const float scale = u.scales[j][block];
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const long long i = first + k * kLanes;
      m[j][k] = i < u.numel ? decoded<kSigned<j>>(codes(j)[i], scale) : 0.0f;
    }
  }

  __device__ __forceinline__ void step() {
    Step<Rule, G, W, f32> work(u);
    work.begin();
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const long long i = first + k * kLanes;
      if (i < u.numel) {
        float w = work.masters.get(i), mine[kRoom<Rule>];
#pragma unroll
        for (int j = 0; j < Rule::kMoments; ++j) mine[j] = m[j][k];
        work.update(widen(work.grad[i]), w, mine);
#pragma unroll
        for (int j = 0; j < Rule::kMoments; ++j) m[j][k] = mine[j];
        work.masters.set(i, w);
      }
    }
  }

  template <int j>
  __device__ __forceinline__ void close() const {
    unsigned peak = 0;  // as bits, which order absolute values and put those that are not finite on top
#pragma unroll
    for (int k = 0; k < kShare; ++k) peak = max(peak, __float_as_uint(m[j][k]) & 0x7fffffffu);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      peak = max(peak, __shfl_xor_sync(kAll, peak, distance));
    const bool finite = peak < 0x7f800000u;
    const float size = __uint_as_float(peak), scale = size < kSmallestScale ? 0.0f : size;
    const float inverse = finite && scale > 0.0f ? 1.0f / scale : 0.0f;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const long long i = first + k * kLanes;
      if (i < u.numel) codes(j)[i] = coded<kSigned<j>>(m[j][k], inverse);
    }
    if (threadIdx.x % kLanes == 0)
      u.scales[j][block] = finite ? scale : __uint_as_float(0x7fffffffu);
  }
};

template <class Rule, class G, class W>
__device__ __forceinline__ void make_coded_step(const Update& u) {
  if (u.skip != nullptr && *u.skip != 0.0f) return;
  const long long block =
      (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / CodedBlock<Rule, G, W>::kLanes;
  if (block * kBlock >= u.numel) return;
  CodedBlock<Rule, G, W> work{u, block, block * kBlock + threadIdx.x % 32};
  work.template open<0>();
  if constexpr (Rule::kMoments == 2) work.template open<1>();
  work.step();
  work.template close<0>();
  if constexpr (Rule::kMoments == 2) work.template close<1>();
}

#define STEP(NAME, RULE, G, W, M) \
  KERNEL(NAME##_##G##_##W##_##M, Update, 8) { make_step<RULE, G, W, M>(a); }

// Instantiates a rule for all dtypes of the gradient and of the weights, and for split masters.
#define STEPS_OF(NAME, RULE, M)    \
  STEP(NAME, RULE, f32, none, M)   \
  STEP(NAME, RULE, f32, bf16, M)   \
  STEP(NAME, RULE, f32, f16, M)    \
  STEP(NAME, RULE, f32, split, M)  \
  STEP(NAME, RULE, bf16, none, M)  \
  STEP(NAME, RULE, bf16, bf16, M)  \
  STEP(NAME, RULE, bf16, f16, M)   \
  STEP(NAME, RULE, bf16, split, M) \
  STEP(NAME, RULE, f16, none, M)   \
  STEP(NAME, RULE, f16, bf16, M)   \
  STEP(NAME, RULE, f16, f16, M)    \
  STEP(NAME, RULE, f16, split, M)

#define CODED_STEP(NAME, RULE, G, W) \
  KERNEL(NAME##_##G##_##W##_u8, Update, 4) { make_coded_step<RULE, G, W>(a); }

// The same, and for all dtypes of the moments.
#define STEPS(NAME, RULE)           \
  STEPS_OF(NAME, RULE, f32)         \
  STEPS_OF(NAME, RULE, bf16)        \
  CODED_STEP(NAME, RULE, f32, none)   \
  CODED_STEP(NAME, RULE, f32, bf16)   \
  CODED_STEP(NAME, RULE, f32, f16)    \
  CODED_STEP(NAME, RULE, f32, split)  \
  CODED_STEP(NAME, RULE, bf16, none)  \
  CODED_STEP(NAME, RULE, bf16, bf16)  \
  CODED_STEP(NAME, RULE, bf16, f16)   \
  CODED_STEP(NAME, RULE, bf16, split) \
  CODED_STEP(NAME, RULE, f16, none)   \
  CODED_STEP(NAME, RULE, f16, bf16)   \
  CODED_STEP(NAME, RULE, f16, f16)    \
  CODED_STEP(NAME, RULE, f16, split)
