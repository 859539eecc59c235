// What isa_kernels.cpp provides once per instruction set, and the choice between them at run time.
#pragma once

#include <cstddef>

#include "accelz_cpu.h"

namespace accelz {

struct Optimizer {
    const char *name;
    void (*step)(const accelz_update &update, size_t begin, size_t end);
};

struct IsaKernels {
    const char *name;
    const Optimizer *optimizers;  // up to one without a name
    double (*sum_of_squares)(const void *values, int dtype, size_t numel);
    void (*scale_cast)(void *output, int output_dtype, const void *source, int source_dtype, float scale,
                       size_t numel);
    void (*accumulate)(void *total, int total_dtype, const void *addend, int addend_dtype, size_t numel);
    // Whole blocks, except for the last.
    void (*quantise)(void *codes, int codes_dtype, float *scales, const void *source, int source_dtype, size_t numel,
                     size_t block);
    void (*dequantise)(void *output, int output_dtype, const void *codes, int codes_dtype, const float *scales,
                       size_t numel, size_t block);
    // output[i] = inputs[0][i] op inputs[1][i] op …, in this order; 16-bit values are added in fp32.
    // output may be one of the inputs. max and min keep NaN.
    void (*reduce)(void *output, const void *const *inputs, int count, int dtype, int op, size_t numel);
    // A copy that bypasses the cache, for data that is not read soon. second: another output, or null.
    void (*stream)(void *output, const void *source, size_t bytes, void *second);
};

const IsaKernels &isa();

size_t element_size(int dtype);

}  // namespace accelz
