// The inner loops, compiled once per instruction set (ACCELZ_ISA names it, the compiler's flags choose it).
//
// Loops are plain, over tiles that stay in the L1 cache, and are vectorised by the compiler. No operation is
// fused or reordered (-ffp-contract=off), so every instruction set gives the same bits. Nothing here may
// instantiate an inline function of the standard library: the linker could keep this copy, with instructions
// that other processors lack, for the whole library.

#include <stddef.h>
#include <stdint.h>

#include "accelz_cpu.h"
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace accelz {
namespace ACCELZ_ISA {
namespace {

constexpr size_t TILE = 128;       // elements: scratch of 512 bytes, and frequent turns between the streams of memory
constexpr size_t AHEAD = 4 * TILE;  // optimizer steps read and write in up to five places, too many for hardware prefetch
constexpr size_t LINE = 64;        // bytes
constexpr size_t LANES = 64;       // partial sums of a norm, on every instruction set
constexpr size_t NORM_BLOCK = 4096;  // elements whose squares are added in fp32 before they join a double

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

template <class T> inline T smaller(T a, T b) { return a < b ? a : b; }

// ---- conversions ----

inline float widened(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

inline bf16 rounded(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : even)};
}

// fp16 has 10 bits of fraction and an exponent bias of 15, against 23 and 127 in fp32.
inline float widened(fp16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    const uint32_t normal = (rest << 13) + ((127 - 15) << 23);
    const uint32_t special = (rest << 13) | 0x7f800000u | (rest > 0x7c00u ? 0x400000u : 0u);
    const uint32_t subnormal = bit_cast<uint32_t>(float(int32_t(rest)) * 0x1p-24f);
    return bit_cast<float>(sign | (rest < 0x400u ? subnormal : rest < 0x7c00u ? normal : special));
}

inline fp16 rounded_to_fp16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    const uint32_t even = (rest - ((127 - 15) << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    // Next to 0.5, one unit in the last place of fp32 is the smallest fp16, so the addition rounds.
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
    const uint32_t special = rest > 0x7f800000u ? 0x7e00u | ((rest >> 13) & 0x3ffu) : 0x7c00u;
    const uint32_t small = rest < 0x38800000u ? subnormal : even;
    return {uint16_t(sign | (rest >= 0x47800000u ? special : small))};
}

// widen: n values as fp32, in `scratch` or, if they are fp32 already, where they are.
inline const float *widen(const float *source, float *, size_t) { return source; }

inline const float *widen(const bf16 *__restrict source, float *__restrict scratch, size_t n) {
    for (size_t i = 0; i < n; i++) scratch[i] = widened(source[i]);
    return scratch;
}

inline const float *widen(const fp16 *__restrict source, float *__restrict scratch, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(scratch + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + i))));
#endif
    for (; i < n; i++) scratch[i] = widened(source[i]);
    return scratch;
}

inline void narrow(float *__restrict output, const float *__restrict values, size_t n) {
    __builtin_memcpy(output, values, n * sizeof(float));
}

inline void narrow(bf16 *__restrict output, const float *__restrict values, size_t n) {
    for (size_t i = 0; i < n; i++) output[i] = rounded(values[i]);
}

inline void narrow(fp16 *__restrict output, const float *__restrict values, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(output + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) output[i] = rounded_to_fp16(values[i]);
}

// As bits, which order absolute values and put nonfinite ones on top.
inline uint32_t largest_size(const float *values, size_t n) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t size = bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
        most = most > size ? most : size;
    }
    return most;
}

// Call body with a null pointer of the dtype's type.
template <class Body>
inline void with_type(int dtype, Body body) {
    if (dtype == ACCELZ_FLOAT32) body((float *)nullptr);
    if (dtype == ACCELZ_BFLOAT16) body((bf16 *)nullptr);
    if (dtype == ACCELZ_FLOAT16) body((fp16 *)nullptr);
}

#include "steps.h"

// ---- norm, casts, sums ----

#if defined(__AVX512F__)
constexpr size_t WIDTH = 16;  // fp32 values in a register
#elif defined(__AVX2__)
constexpr size_t WIDTH = 8;
#else
constexpr size_t WIDTH = 4;
#endif
typedef float Register __attribute__((vector_size(WIDTH * sizeof(float))));

// n: a multiple of LANES
inline double block_squares(const float *values, size_t n) {
    Register sums[LANES / WIDTH] = {};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t k = 0; k < LANES / WIDTH; k++) {
            Register x;
            __builtin_memcpy(&x, values + i + k * WIDTH, sizeof(x));
            sums[k] += x * x;
        }
    float lanes[LANES];
    __builtin_memcpy(lanes, sums, sizeof(lanes));
    double total = 0;
    for (size_t i = 0; i < LANES; i++) total += double(lanes[i]);
    return total;
}

template <class T>
double squares(const T *values, size_t numel) {
    alignas(64) float scratch[NORM_BLOCK];
    double total = 0;
    for (size_t at = 0; at < numel; at += NORM_BLOCK) {
        const size_t n = smaller(NORM_BLOCK, numel - at);
        const float *wide = widen(values + at, scratch, n);
        const size_t padded = (n + LANES - 1) / LANES * LANES;
        if (padded != n) {
            if (wide != scratch) __builtin_memcpy(scratch, wide, n * sizeof(float));
            for (size_t i = n; i < padded; i++) scratch[i] = 0;
            wide = scratch;
        }
        total += block_squares(wide, padded);
    }
    return total;
}

double sum_of_squares(const void *values, int dtype, size_t numel) {
    double total = 0;
    with_type(dtype, [&](auto *type) { total = squares((const decltype(type))values, numel); });
    return total;
}

template <class To, class From>
void scaled(To *output, const From *source, float scale, size_t numel) {
    alignas(64) float wide[TILE], product[TILE];
    for (size_t at = 0; at < numel; at += TILE) {
        const size_t n = smaller(TILE, numel - at);
        const float *values = widen(source + at, wide, n);
        for (size_t i = 0; i < n; i++) product[i] = values[i] * scale;
        narrow(output + at, product, n);
    }
}

void scale_cast(void *output, int output_dtype, const void *source, int source_dtype, float scale, size_t numel) {
    with_type(output_dtype, [&](auto *to) {
        with_type(source_dtype, [&](auto *from) {
            scaled((decltype(to))output, (const decltype(from))source, scale, numel);
        });
    });
}

template <class To, class From>
void added(To *total, const From *addend, size_t numel) {
    alignas(64) float left[TILE], right[TILE], sum[TILE];
    for (size_t at = 0; at < numel; at += TILE) {
        const size_t n = smaller(TILE, numel - at);
        const float *a = widen(total + at, left, n), *b = widen(addend + at, right, n);
        for (size_t i = 0; i < n; i++) sum[i] = a[i] + b[i];
        narrow(total + at, sum, n);
    }
}

void accumulate(void *total, int total_dtype, const void *addend, int addend_dtype, size_t numel) {
    with_type(total_dtype, [&](auto *to) {
        with_type(addend_dtype, [&](auto *from) { added((decltype(to))total, (const decltype(from))addend, numel); });
    });
}

// ---- quantised values: a scale for each block ----

struct s8 { uint8_t bits; };
struct e4m3 { uint8_t bits; };  // no infinities: 0x7f is NaN, the largest value is 448

inline float largest(s8) { return 127.0f; }
inline float largest(e4m3) { return 448.0f; }

// Adding 1.5 * 2^23 leaves no bits below 1: this rounds to the nearest, ties to even, and the low byte is the integer.
inline s8 coded(float value, s8) { return {uint8_t(bit_cast<uint32_t>(value + 0x1.8p23f))}; }

// Below 2^-6 codes are multiples of 2^-9; above, the upper bits of an fp32 with an exponent bias of 7.
inline e4m3 coded(float value, e4m3) {
    const uint32_t bits = bit_cast<uint32_t>(value), sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
    const uint32_t even = ((rest + 0x7ffffu + ((rest >> 20) & 1u)) >> 20) - ((127 - 7) << 3);
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(rest) * 512.0f + 0x1.8p23f);
    return {uint8_t(sign | (rest < 0x3c800000u ? subnormal : even))};
}

inline float decoded(s8 code) { return float(int8_t(code.bits)); }

inline float decoded(e4m3 code) {
    const uint32_t sign = uint32_t(code.bits & 0x80u) << 24, rest = code.bits & 0x7fu;
    const uint32_t normal = (rest << 20) + ((127 - 7) << 23);
    const uint32_t subnormal = bit_cast<uint32_t>(float(int32_t(rest)) * 0x1p-9f);
    return bit_cast<float>(sign | (rest == 0x7fu ? 0x7fc00000u : rest < 8 ? subnormal : normal));
}

// Returns the scale: NaN for a block with nonfinite values, 0 for one so small that it has no reciprocal.
template <class Code>
float quantised_block(Code *__restrict codes, const float *__restrict values, size_t n) {
    const uint32_t most = largest_size(values, n);
    const bool finite = most < 0x7f800000u;
    float scale = finite ? bit_cast<float>(most) / largest(Code{}) : __builtin_nanf("");
    if (scale < 0x1p-126f) scale = 0;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (size_t i = 0; i < n; i++) {
        const float value = values[i] * inverse;
        codes[i] = coded(value == value ? value : 0.0f, Code{});  // an infinity times 0
    }
    return scale;
}

template <class Code, class From>
void quantised(Code *codes, float *scales, const From *source, size_t numel, size_t block) {
    alignas(64) float scratch[ACCELZ_MAX_BLOCK];
    for (size_t at = 0; at < numel; at += block) {
        const size_t n = smaller(block, numel - at);
        *scales++ = quantised_block(codes + at, widen(source + at, scratch, n), n);
    }
}

template <class To, class Code>
void dequantised(To *output, const Code *codes, const float *scales, size_t numel, size_t block) {
    alignas(64) float values[TILE];
    const size_t tile = smaller(TILE, block);
    for (size_t at = 0; at < numel; at += tile) {
        const size_t n = smaller(tile, numel - at);
        const float scale = scales[at / block];
        for (size_t i = 0; i < n; i++) values[i] = decoded(codes[at + i]) * scale;
        narrow(output + at, values, n);
    }
}

template <class Body>
inline void with_code(int dtype, Body body) {
    if (dtype == ACCELZ_INT8) body((s8 *)nullptr);
    if (dtype == ACCELZ_FLOAT8_E4M3) body((e4m3 *)nullptr);
}

void quantise(void *codes, int codes_dtype, float *scales, const void *source, int source_dtype, size_t numel,
              size_t block) {
    with_code(codes_dtype, [&](auto *code) {
        with_type(source_dtype, [&](auto *from) {
            quantised((decltype(code))codes, scales, (const decltype(from))source, numel, block);
        });
    });
}

void dequantise(void *output, int output_dtype, const void *codes, int codes_dtype, const float *scales, size_t numel,
                size_t block) {
    with_code(codes_dtype, [&](auto *code) {
        with_type(output_dtype, [&](auto *to) {
            dequantised((decltype(to))output, (const decltype(code))codes, scales, numel, block);
        });
    });
}

// ---- reduction over ranks ----

struct Sum {
    template <class T> static T of(T a, T b) { return T(a + b); }
};
struct Max {
    template <class T> static T of(T a, T b) { return a > b || a != a ? a : b; }
};
struct Min {
    template <class T> static T of(T a, T b) { return a < b || a != a ? a : b; }
};

template <class T>
inline const T *widen(const T *source, T *, size_t) { return source; }

template <class T>
inline void narrow(T *output, const T *values, size_t n) { __builtin_memcpy(output, values, n * sizeof(T)); }

// Sum: the type in which values of a type are added.
template <class T> struct Wide { using type = T; };
template <> struct Wide<bf16> { using type = float; };
template <> struct Wide<fp16> { using type = float; };

template <class Op, class A>
inline void combine(A *__restrict result, const A *__restrict addend, size_t n) {
    for (size_t i = 0; i < n; i++) result[i] = Op::of(result[i], addend[i]);
}

template <class Op, class A>
inline void combine_first(A *__restrict result, const A *__restrict a, const A *__restrict b, size_t n) {
    for (size_t i = 0; i < n; i++) result[i] = Op::of(a[i], b[i]);
}

template <class Op, class T>
void reduce_as(T *output, const void *const *inputs, int count, size_t numel) {
    using A = typename Wide<T>::type;
    alignas(64) A total[TILE], first[TILE], next[TILE];
    for (size_t at = 0; at < numel; at += TILE) {
        const size_t n = smaller(TILE, numel - at);
        const auto values = [&](int k, A *scratch) { return widen((const T *)inputs[k] + at, scratch, n); };
        combine_first<Op>(total, values(0, first), values(1, next), n);
        for (int k = 2; k < count; k++) combine<Op>(total, values(k, next), n);
        narrow(output + at, total, n);
    }
}

template <class T>
void reduce_typed(void *output, const void *const *inputs, int count, int op, size_t numel) {
    if (op == ACCELZ_SUM) reduce_as<Sum>((T *)output, inputs, count, numel);
    if (op == ACCELZ_MAX) reduce_as<Max>((T *)output, inputs, count, numel);
    if (op == ACCELZ_MIN) reduce_as<Min>((T *)output, inputs, count, numel);
}

void reduce(void *output, const void *const *inputs, int count, int dtype, int op, size_t numel) {
    switch (dtype) {
        case ACCELZ_FLOAT32: return reduce_typed<float>(output, inputs, count, op, numel);
        case ACCELZ_BFLOAT16: return reduce_typed<bf16>(output, inputs, count, op, numel);
        case ACCELZ_FLOAT16: return reduce_typed<fp16>(output, inputs, count, op, numel);
        case ACCELZ_FLOAT64: return reduce_typed<double>(output, inputs, count, op, numel);
        // Unsigned: sums wrap, as torch's do, where signed overflow would be undefined.
        case ACCELZ_INT64: return op == ACCELZ_SUM ? reduce_typed<uint64_t>(output, inputs, count, op, numel)
                                                   : reduce_typed<int64_t>(output, inputs, count, op, numel);
        case ACCELZ_INT32: return op == ACCELZ_SUM ? reduce_typed<uint32_t>(output, inputs, count, op, numel)
                                                   : reduce_typed<int32_t>(output, inputs, count, op, numel);
        case ACCELZ_UINT8: return reduce_typed<uint8_t>(output, inputs, count, op, numel);
    }
}

// ---- a copy past the cache ----

#if defined(__AVX512F__)
using Line = __m512i;
inline Line load_line(const char *from) { return _mm512_loadu_si512(from); }
inline void stream_line(char *to, Line line) { _mm512_stream_si512((Line *)to, line); }
#elif defined(__AVX2__)
using Line = __m256i;
inline Line load_line(const char *from) { return _mm256_loadu_si256((const Line *)from); }
inline void stream_line(char *to, Line line) { _mm256_stream_si256((Line *)to, line); }
#elif defined(__SSE2__)
using Line = __m128i;
inline Line load_line(const char *from) { return _mm_loadu_si128((const Line *)from); }
inline void stream_line(char *to, Line line) { _mm_stream_si128((Line *)to, line); }
#endif

void stream(void *output, const void *source, size_t bytes, void *second) {
#if defined(__SSE2__)
    constexpr size_t STEP = sizeof(Line);
    if (second && ((uintptr_t)output ^ (uintptr_t)second) % STEP) {  // the outputs are not aligned alike
        stream(second, source, bytes, nullptr);
        second = nullptr;
    }
    char *to = (char *)output, *also = (char *)second;
    const char *from = (const char *)source;
    const size_t head = smaller(bytes, (STEP - (uintptr_t)to % STEP) % STEP);
    const size_t end = head + (bytes - head) / STEP * STEP;
    __builtin_memcpy(to, from, head);
    __builtin_memcpy(to + end, from + end, bytes - end);
    if (also) {
        __builtin_memcpy(also, from, head);
        __builtin_memcpy(also + end, from + end, bytes - end);
        for (size_t i = head; i < end; i += STEP) {
            const Line line = load_line(from + i);
            stream_line(to + i, line);
            stream_line(also + i, line);
        }
    } else {
        for (size_t i = head; i < end; i += STEP) stream_line(to + i, load_line(from + i));
    }
    _mm_sfence();  // or the data could become visible after the note that announces it
#else
    __builtin_memcpy(output, source, bytes);
    if (second) __builtin_memcpy(second, source, bytes);
#endif
}

}  // namespace

extern const IsaKernels kernels;
#define ACCELZ_TEXT(name) #name
#define ACCELZ_NAME(name) ACCELZ_TEXT(name)
const IsaKernels kernels = {ACCELZ_NAME(ACCELZ_ISA), OPTIMIZERS, sum_of_squares, scale_cast, accumulate,
                            quantise, dequantise, reduce, stream};

}  // namespace ACCELZ_ISA
}  // namespace accelz
