// The kernels of the C interface: they prepare arguments once and hand loops to the pool in pieces.
//
// Pieces have a fixed size, so results do not depend on the number of threads.

#include <cmath>
#include <vector>

#include "accelz_cpu.h"
#include "isa.h"
#include "pool.h"

namespace {

using accelz::isa;

constexpr size_t PIECE = size_t(1) << 16;       // elements, in whole blocks; a quarter of a megabyte of fp32
constexpr size_t NORM_PIECE = size_t(1) << 18;  // a multiple of isa_kernels.cpp's block

template <class AnyStep>
AnyStep with_common(const accelz_step_arguments &a) {
    const float scale = a.grad_scale ? *a.grad_scale : 1.0f;
    AnyStep s{};
    s.master = a.master;
    s.grad = a.grad;
    s.weights = a.weights;
    s.grad_dtype = a.grad_dtype;
    s.weights_dtype = a.weights_dtype;
    s.grad_factor = a.maximize ? -scale : scale;
    return s;
}

accelz::AdamStep prepared(const accelz_adamw_arguments &a) {
    const double count = *a.step, lr = a.common.lr, weight_decay = a.common.weight_decay;
    // 1 - beta ** step without cancellation; beta 0 gives exactly 1
    const double correction1 = -std::expm1(count * std::log(a.beta1));
    const double correction2 = -std::expm1(count * std::log(a.beta2));
    auto s = with_common<accelz::AdamStep>(a.common);
    s.exp_avg = a.exp_avg;
    s.exp_avg_sq = a.exp_avg_sq;
    s.decoupled = a.decoupled || weight_decay == 0;
    s.decay = float(s.decoupled ? (a.decoupled ? 1 - lr * weight_decay : 1) : weight_decay);
    s.weight1 = float(1 - a.beta1);
    s.beta2 = float(a.beta2);
    s.weight2 = float(1 - a.beta2);
    s.step_size = float(lr / correction1);
    s.inverse_root = float(1 / std::sqrt(correction2));
    s.eps = float(a.eps);
    return s;
}

accelz::SgdStep prepared(const accelz_sgd_arguments &a) {
    auto s = with_common<accelz::SgdStep>(a.common);
    s.momentum_buffer = a.momentum_buffer;
    s.nesterov = a.nesterov;
    s.decay = float(a.common.weight_decay);
    s.momentum = float(a.momentum);
    s.lr = float(a.common.lr);
    return s;
}

accelz::LionStep prepared(const accelz_lion_arguments &a) {
    auto s = with_common<accelz::LionStep>(a.common);
    s.exp_avg = a.exp_avg;
    s.kept = float(1 - a.common.lr * a.common.weight_decay);
    s.weight1 = float(1 - a.beta1);
    s.weight2 = float(1 - a.beta2);
    s.lr = float(a.common.lr);
    return s;
}

// The step, or with `skip` only the weights.
template <class Arguments, class AnyStep>
void run_step(const Arguments &arguments, void (*kernel)(const AnyStep &, size_t, size_t), int threads) {
    const accelz_step_arguments &a = arguments.common;
    if (a.skip && *a.skip != 0) {
        if (a.weights)
            accelz_scale_cast(a.weights, a.weights_dtype, a.master, ACCELZ_FLOAT32, nullptr, a.numel, threads);
        return;
    }
    const AnyStep step = prepared(arguments);
    accelz::run_pieces(a.numel, PIECE, threads, [&](size_t begin, size_t end) { kernel(step, begin, end); });
}

const char *at(const void *base, int dtype, size_t index) {
    return static_cast<const char *>(base) + index * accelz::element_size(dtype);
}

char *at(void *base, int dtype, size_t index) {
    return static_cast<char *>(base) + index * accelz::element_size(dtype);
}

}  // namespace

extern "C" {

void accelz_adamw(const accelz_adamw_arguments *a, int threads) { run_step(*a, isa().adamw, threads); }

void accelz_sgd(const accelz_sgd_arguments *a, int threads) { run_step(*a, isa().sgd, threads); }

void accelz_lion(const accelz_lion_arguments *a, int threads) { run_step(*a, isa().lion, threads); }

double accelz_sum_of_squares(const void *values, int dtype, size_t numel, int threads) {
    std::vector<double> parts((numel + NORM_PIECE - 1) / NORM_PIECE);
    accelz::run_pieces(numel, NORM_PIECE, threads, [&](size_t begin, size_t end) {
        parts[begin / NORM_PIECE] = isa().sum_of_squares(at(values, dtype, begin), dtype, end - begin);
    });
    double total = 0;
    for (const double part : parts) total += part;
    return total;
}

void accelz_scale_cast(void *output, int output_dtype, const void *source, int source_dtype, const float *scale,
                       size_t numel, int threads) {
    const float factor = scale ? *scale : 1.0f;
    accelz::run_pieces(numel, PIECE, threads, [&](size_t begin, size_t end) {
        isa().scale_cast(at(output, output_dtype, begin), output_dtype, at(source, source_dtype, begin),
                         source_dtype, factor, end - begin);
    });
}

void accelz_accumulate(void *total, int total_dtype, const void *addend, int addend_dtype, size_t numel,
                       int threads) {
    accelz::run_pieces(numel, PIECE, threads, [&](size_t begin, size_t end) {
        isa().accumulate(at(total, total_dtype, begin), total_dtype, at(addend, addend_dtype, begin), addend_dtype,
                         end - begin);
    });
}

void accelz_quantise(void *codes, int codes_dtype, float *scales, const void *source, int source_dtype, size_t numel,
                     size_t block, int threads) {
    accelz::run_pieces(numel, PIECE, threads, [&](size_t begin, size_t end) {
        isa().quantise(at(codes, codes_dtype, begin), codes_dtype, scales + begin / block,
                       at(source, source_dtype, begin), source_dtype, end - begin, block);
    });
}

void accelz_dequantise(void *output, int output_dtype, const void *codes, int codes_dtype, const float *scales,
                       size_t numel, size_t block, int threads) {
    accelz::run_pieces(numel, PIECE, threads, [&](size_t begin, size_t end) {
        isa().dequantise(at(output, output_dtype, begin), output_dtype, at(codes, codes_dtype, begin), codes_dtype,
                         scales + begin / block, end - begin, block);
    });
}

}
