// Steps of optimizers, as part of isa_kernels.cpp: one function for each, and their list at the end.
//
// accelz.updates says what an optimizer's moments and constants are. A step prepares what is the same for all
// elements and chooses the tile: the loop over a few elements.
#pragma once

// From a towards b by weight, computed from the nearer end as torch.lerp does.
template <bool near>
inline float lerp(float a, float b, float weight) {
    return near ? a + weight * (b - a) : b + (weight - 1.0f) * (b - a);
}

inline bool is_near(float weight) { return weight < 0.5f; }

// The factor on the gradient.
inline float factor_of(const accelz_update &u) { return float(u.sign) * (u.grad_scale ? *u.grad_scale : 1.0f); }

template <size_t SIZE = TILE, class T>
inline void prefetch_tile(const T *from) {
    for (size_t i = 0; i < SIZE; i += LINE / sizeof(T)) __builtin_prefetch(from + i);
}

// As `noise_of` in accelz.updates: what is added to the bits of new moments before those that bf16 lacks are dropped.
// moment: the first. number: the step's bits times a factor.
inline uint32_t noise_of(float moment, float master, uint32_t number) {
    uint32_t h = bit_cast<uint32_t>(master) * 0x9e3779b1u + bit_cast<uint32_t>(moment) + number;
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h >> 16;
}

inline void narrow_at_random(bf16 *__restrict output, const float *__restrict values, const uint32_t *__restrict noise,
                             size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = bit_cast<uint32_t>(values[i]), size = bits & 0x7fffffffu;
        const uint32_t special = size > 0x7f800000u ? 0x7fc00000u : bits;  // NaN, infinities
        output[i] = {uint16_t((size < 0x7f800000u ? bits + noise[i] : special) >> 16)};
    }
}

// Moments as a step has them, a tile at a time, in fp32. begin: of the tile, which has n elements.

// fp32: they are stepped where they are.
struct Exact {
    float *values;

    void prefetch(size_t begin) const { prefetch_tile(values + begin); }
    float *open(size_t begin, size_t) { return values + begin; }
};

// bf16: they are widened, and rounded once when the tile is stepped.
struct Rounded {
    bf16 *values;
    alignas(64) float wide[TILE];

    void prefetch(size_t begin) const { prefetch_tile(values + begin); }
    float *open(size_t begin, size_t n) {
        for (size_t i = 0; i < n; i++) wide[i] = widened(values[begin + i]);
        return wide;
    }
};

// 8 bits: codes of a dynamic map, as in accelz.dynamic_map, whose tiles are blocks.
//
// A decade's codes are evenly spaced, so the size of a code is piecewise linear in its number: the largest of the
// pieces one way, the smallest the other way.
template <bool sign>
struct DynamicMap {
    static constexpr int DECADES = 7;
    float values[256];                       // by code
    float slopes[DECADES], starts[DECADES];  // of a code's number, by its size
};

template <bool sign>
constexpr DynamicMap<sign> dynamic_map() {
    DynamicMap<sign> map{};
    double top = 1;
    int codes = sign ? 64 : 128;
    for (int decade = 0; decade < map.DECADES; decade++, top /= 10, codes /= 2) {
        const double step = 0.9 * top / codes;
        const int last = 2 * codes - 1;
        map.slopes[decade] = float(1 / step);
        map.starts[decade] = float(last - top / step);
        for (int code = 1; code < 256; code++) {
            const int number = sign ? code & 127 : code;
            const float size = float(number - last) * float(step) + float(top);
            const bool negative = code != number;
            const float value = negative ? -map.values[code] : map.values[code];
            if (number && size > value) map.values[code] = negative ? -size : size;
        }
    }
    return map;
}

template <bool sign>
constexpr DynamicMap<sign> MAP = dynamic_map<sign>();

// A code's number by its size, before it is rounded. Recursive, since the compiler vectorises no loop around a loop.
template <bool sign, int decade = 0>
inline float number_of(float size) {
    constexpr float slope = MAP<sign>.slopes[decade], start = MAP<sign>.starts[decade];
    const float piece = size * slope + start;
    if constexpr (decade + 1 == MAP<sign>.DECADES)
        return piece;
    else
        return smaller(piece, number_of<sign, decade + 1>(size));
}

// Returns the scale: NaN for a block with nonfinite values, 0 for one so small that it has no reciprocal.
template <bool sign>
float coded_block(uint8_t *__restrict codes, const float *__restrict values, size_t n) {
    const uint32_t most = largest_size(values, n);
    float scale = most < 0x7f800000u ? bit_cast<float>(most) : __builtin_nanf("");
    if (scale < 0x1p-126f) scale = 0;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float product = __builtin_fabsf(values[i]) * inverse;
        const float size = product == product ? product : 0.0f;  // an infinity times 0
        float number = number_of<sign>(size);
        number = number > 0 ? number : 0.0f;
        number = size > 0 ? number : 0.0f;
        // Adding 2^23 leaves no bits below 1: this rounds to the nearest, ties to even.
        const uint32_t code = bit_cast<uint32_t>(number + 0x1p23f) & 0xffu;
        const uint32_t negative = (bit_cast<uint32_t>(values[i]) >> 24) & (sign && code ? 0x80u : 0u);
        codes[i] = uint8_t(code | negative);
    }
    return scale;
}

template <bool sign>
struct Coded {
    uint8_t *codes;
    float *scales;
    alignas(64) float wide[ACCELZ_MOMENTS_BLOCK];

    void prefetch(size_t begin) const { prefetch_tile<ACCELZ_MOMENTS_BLOCK>(codes + begin); }
    float *open(size_t begin, size_t n) {
        const float scale = scales[begin / ACCELZ_MOMENTS_BLOCK];
        for (size_t i = 0; i < n; i++) {
            asm("" : "+r"(i));  // not to be vectorised: loads one by one take half of the time of a gather
            wide[i] = MAP<sign>.values[codes[begin + i]] * scale;
        }
        return wide;
    }
    void close(size_t begin, size_t n) const {
        scales[begin / ACCELZ_MOMENTS_BLOCK] = coded_block<sign>(codes + begin, wide, n);
    }
};

// After a step of a tile: keep its moments. master: its new values.
inline void keep(const accelz_update &, const float *, size_t, size_t) {}

template <class... Rest>
inline void keep(const accelz_update &, const float *, size_t, size_t, const Exact &, const Rest &...) {}

template <bool sign, class... Rest>
inline void keep(const accelz_update &, const float *, size_t begin, size_t n, const Coded<sign> &first,
                 const Rest &...rest) {
    first.close(begin, n);
    (rest.close(begin, n), ...);
}

template <class... Rest>
inline void keep(const accelz_update &u, const float *__restrict master, size_t begin, size_t n, const Rounded &first,
                 const Rest &...rest) {
    if (!u.stochastic) {
        narrow(first.values + begin, first.wide, n);
        (narrow(rest.values + begin, rest.wide, n), ...);
        return;
    }
    alignas(64) uint32_t noise[TILE];
    const uint32_t number = u.step ? bit_cast<uint32_t>(*u.step) * 0x85ebca77u : 0;
    for (size_t i = 0; i < n; i++) noise[i] = noise_of(first.wide[i], master[i], number);
    narrow_at_random(first.values + begin, first.wide, noise, n);
    (narrow_at_random(rest.values + begin, rest.wide, noise, n), ...);
}

// Masters as a step has them, a tile at a time, in fp32: where they are, or joined of weights and remainders, as in
// accelz.updates.

struct Whole {
    const accelz_update &u;

    template <size_t SIZE>
    void prefetch(size_t begin) const {
        prefetch_tile<SIZE>(u.master + begin);
        if (u.weights) prefetch_tile<SIZE>((const uint16_t *)u.weights + begin);
    }
    float *open(size_t begin, size_t) const { return u.master + begin; }
    void close(size_t begin, size_t n) const {
        if (!u.weights) return;
        with_type(u.weights_dtype, [&](auto *type) { narrow((decltype(type))u.weights + begin, u.master + begin, n); });
    }
};

template <size_t SIZE>
struct Split {
    uint16_t *weights;
    int16_t *remainder;
    alignas(64) float wide[SIZE];

    template <size_t>
    void prefetch(size_t begin) const {
        prefetch_tile<SIZE>(weights + begin);
        prefetch_tile<SIZE>(remainder + begin);
    }
    float *open(size_t begin, size_t n) {
        const uint16_t *__restrict upper = weights + begin;
        const int16_t *__restrict rest = remainder + begin;
        for (size_t i = 0; i < n; i++) {
            // What is left beside a weight that was overwritten by 0 must not become a NaN.
            const int32_t low = (upper[i] & 0x7fffu) || rest[i] > 0 ? rest[i] : 0;
            wide[i] = bit_cast<float>((uint32_t(upper[i]) << 16) + uint32_t(low));
        }
        return wide;
    }
    void close(size_t begin, size_t n) const {
        uint16_t *__restrict upper = weights + begin;
        int16_t *__restrict rest = remainder + begin;
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = bit_cast<uint32_t>(wide[i]);
            bits -= (bits & 0x1ffffu) == 0x8000u ? 1 : 0;
            upper[i] = rounded(bit_cast<float>(bits)).bits;
            rest[i] = int16_t(uint16_t(bits));
        }
    }
};

// For every tile of the shard call tile(prepared, master, gradient in fp32, moments…, n), then write its weights.
template <size_t SIZE, class Master, class Grad, class Prepared, class Tile, class... Moments>
void step_tiles(const accelz_update &u, Master master, const Grad *grad, size_t begin, size_t end,
                const Prepared &prepared, Tile tile, Moments... moments) {
    alignas(64) float scratch[SIZE];
    for (size_t at = begin; at < end; at += SIZE) {
        const size_t n = smaller(SIZE, end - at);
        master.template prefetch<SIZE>(at + AHEAD);
        (moments.prefetch(at + AHEAD), ...);
        prefetch_tile<SIZE>(grad + at + AHEAD);
        float *values = master.open(at, n);
        tile(prepared, values, widen(grad + at, scratch, n), moments.open(at, n)..., n);
        keep(u, values, at, n, moments...);
        master.close(at, n);
    }
}

template <size_t SIZE, class Grad, class Prepared, class Tile, class... Moments>
void step_range(const accelz_update &u, const Grad *grad, size_t begin, size_t end, const Prepared &prepared, Tile tile,
                Moments... moments) {
    if (u.remainder)
        step_tiles<SIZE>(u, Split<SIZE>{(uint16_t *)u.weights, u.remainder, {}}, grad, begin, end, prepared, tile,
                         moments...);
    else
        step_tiles<SIZE>(u, Whole{u}, grad, begin, end, prepared, tile, moments...);
}

template <class Grad, class Prepared, class Tile>
void step_coded(const accelz_update &u, const Grad *grad, size_t begin, size_t end, const Prepared &prepared, Tile tile,
                void *first) {
    step_range<ACCELZ_MOMENTS_BLOCK>(u, grad, begin, end, prepared, tile,
                                     Coded<true>{(uint8_t *)first, u.scales[0], {}});
}

// What a second moment is an average of is never negative.
template <class Grad, class Prepared, class Tile>
void step_coded(const accelz_update &u, const Grad *grad, size_t begin, size_t end, const Prepared &prepared, Tile tile,
                void *first, void *second) {
    step_range<ACCELZ_MOMENTS_BLOCK>(u, grad, begin, end, prepared, tile,
                                     Coded<true>{(uint8_t *)first, u.scales[0], {}},
                                     Coded<false>{(uint8_t *)second, u.scales[1], {}});
}

// moments: pointers to them.
template <class Prepared, class Tile, class... Moments>
void run_step(const accelz_update &u, size_t begin, size_t end, const Prepared &prepared, Tile tile,
              Moments... moments) {
    with_type(u.grad_dtype, [&](auto *type) {
        const auto grad = (const decltype(type))u.grad;
        if (sizeof...(moments) && u.moments_dtype == ACCELZ_BFLOAT16)
            return step_range<TILE>(u, grad, begin, end, prepared, tile, Rounded{(bf16 *)moments, {}}...);
        if constexpr (sizeof...(moments) > 0)
            if (u.moments_dtype == ACCELZ_UINT8)
                return step_coded(u, grad, begin, end, prepared, tile, moments...);
        step_range<TILE>(u, grad, begin, end, prepared, tile, Exact{(float *)moments}...);
    });
}

// ---- adamw ----

struct AdamW {
    float factor, decay, l2, weight1, beta2, weight2;
    float step_size;     // lr / (1 - beta1 ** step)
    float inverse_root;  // 1 / sqrt(1 - beta2 ** step)
    float eps;
};

template <bool decoupled, bool near>
void adamw_tile(const AdamW &s, float *__restrict w, const float *__restrict grad, float *__restrict m,
                float *__restrict v, size_t n) {
    const float factor = s.factor, decay = s.decay, l2 = s.l2, beta2 = s.beta2, weight1 = s.weight1;
    const float weight2 = s.weight2, step_size = s.step_size, inverse_root = s.inverse_root, eps = s.eps;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * factor;
        if (!decoupled) g = g + w[i] * l2;
        const float decayed = decoupled ? w[i] * decay : w[i];
        const float average = lerp<near>(m[i], g, weight1);
        const float square = v[i] * beta2 + weight2 * g * g;
        const float denominator = __builtin_sqrtf(square) * inverse_root + eps;
        w[i] = decayed - step_size * average / denominator;
        m[i] = average;
        v[i] = square;
    }
}

void adamw(const accelz_update &u, size_t begin, size_t end) {
    const double *c = u.constants;  // beta1, 1 - beta1, log(beta1), the same of beta2, eps
    // 1 - beta ** step without cancellation; beta 0 gives exactly 1
    const double correction1 = -__builtin_expm1(*u.step * c[2]), correction2 = -__builtin_expm1(*u.step * c[5]);
    const AdamW s{factor_of(u), float(u.decay), float(u.l2), float(c[1]), float(c[3]), float(c[4]),
                  float(u.lr / correction1), float(1 / __builtin_sqrt(correction2)), float(c[6])};
    const auto tile = u.l2 == 0 ? (is_near(s.weight1) ? adamw_tile<true, true> : adamw_tile<true, false>)
                                : (is_near(s.weight1) ? adamw_tile<false, true> : adamw_tile<false, false>);
    run_step(u, begin, end, s, tile, u.moments[0], u.moments[1]);
}

// ---- sgd, momentum ----

struct Sgd {
    float factor, l2, lr, momentum;
};

// Without decay, not even an infinite weight may add anything to the gradient.
template <bool decays>
void sgd_tile(const Sgd &s, float *__restrict w, const float *__restrict grad, size_t n) {
    const float factor = s.factor, l2 = s.l2, lr = s.lr;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * factor;
        if (decays) g = g + w[i] * l2;
        w[i] = w[i] - lr * g;
    }
}

void sgd(const accelz_update &u, size_t begin, size_t end) {
    const Sgd s{factor_of(u), float(u.l2), float(u.lr), 0};
    run_step(u, begin, end, s, s.l2 != 0 ? sgd_tile<true> : sgd_tile<false>);
}

template <bool decays, bool nesterov>
void momentum_tile(const Sgd &s, float *__restrict w, const float *__restrict grad, float *__restrict m, size_t n) {
    const float factor = s.factor, l2 = s.l2, lr = s.lr, momentum = s.momentum;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * factor;
        if (decays) g = g + w[i] * l2;
        const float buffer = m[i] * momentum + g;
        w[i] = w[i] - lr * (nesterov ? g + momentum * buffer : buffer);
        m[i] = buffer;
    }
}

void momentum(const accelz_update &u, size_t begin, size_t end) {
    const Sgd s{factor_of(u), float(u.l2), float(u.lr), float(u.constants[0])};
    const bool nesterov = u.constants[1] != 0;
    const auto tile = s.l2 != 0 ? (nesterov ? momentum_tile<true, true> : momentum_tile<true, false>)
                                : (nesterov ? momentum_tile<false, true> : momentum_tile<false, false>);
    run_step(u, begin, end, s, tile, u.moments[0]);
}

// ---- lion ----

struct Lion {
    float factor, decay, weight1, weight2, lr;
};

template <bool near1, bool near2>
void lion_tile(const Lion &s, float *__restrict w, const float *__restrict grad, float *__restrict m, size_t n) {
    const float factor = s.factor, decay = s.decay, weight1 = s.weight1, weight2 = s.weight2, lr = s.lr;
    for (size_t i = 0; i < n; i++) {
        const float g = grad[i] * factor;
        const float direction = lerp<near1>(m[i], g, weight1);
        w[i] = w[i] * decay - (direction > 0 ? lr : direction < 0 ? -lr : 0.0f);
        m[i] = lerp<near2>(m[i], g, weight2);
    }
}

void lion(const accelz_update &u, size_t begin, size_t end) {
    const Lion s{factor_of(u), float(u.decay), float(u.constants[0]), float(u.constants[1]), float(u.lr)};
    const auto tile = is_near(s.weight1) ? (is_near(s.weight2) ? lion_tile<true, true> : lion_tile<true, false>)
                                         : (is_near(s.weight2) ? lion_tile<false, true> : lion_tile<false, false>);
    run_step(u, begin, end, s, tile, u.moments[0]);
}

// By the names of accelz.updates.
const Optimizer OPTIMIZERS[] = {
    {"adamw", adamw}, {"sgd", sgd}, {"momentum", momentum}, {"lion", lion}, {nullptr, nullptr}};
