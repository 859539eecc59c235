// The kernels of the C interface: they hand loops to the pool in pieces.
//
// Pieces have a fixed size, so results do not depend on the number of threads.

#include <vector>

#include "accelz_cpu.h"
#include "isa.h"
#include "pool.h"

namespace {

using accelz::isa;

constexpr size_t PIECE = size_t(1) << 16;       // elements, in whole blocks; a quarter of a megabyte of fp32
constexpr size_t NORM_PIECE = size_t(1) << 18;  // a multiple of isa_kernels.cpp's block

const char *at(const void *base, int dtype, size_t index) {
    return static_cast<const char *>(base) + index * accelz::element_size(dtype);
}

char *at(void *base, int dtype, size_t index) {
    return static_cast<char *>(base) + index * accelz::element_size(dtype);
}

}  // namespace

extern "C" {

const char *accelz_optimizer(int number) { return isa().optimizers[number].name; }

void accelz_step(int optimizer, const accelz_update *update, int threads) {
    const accelz_update &u = *update;
    if (u.skip && *u.skip != 0) {
        if (u.weights && u.master)
            accelz_scale_cast(u.weights, u.weights_dtype, u.master, ACCELZ_FLOAT32, nullptr, u.numel, threads);
        return;
    }
    const auto step = isa().optimizers[optimizer].step;
    accelz::run_pieces(u.numel, PIECE, threads, [&](size_t begin, size_t end) { step(u, begin, end); });
}

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
