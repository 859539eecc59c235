// What isa_kernels.cpp provides once per instruction set, and the choice between them at run time.
#pragma once

#include <cstddef>

namespace accelz {

// Arguments of optimizer steps, with everything that is the same for all elements computed beforehand.
struct Step {
    float *master;
    const void *grad;
    void *weights;
    int grad_dtype, weights_dtype;
    float grad_factor;       // grad_scale, with the sign of maximize
};

struct AdamStep : Step {
    float *exp_avg, *exp_avg_sq;
    bool decoupled;
    float decay;             // decoupled: the factor on master; else the share of master added to the gradient
    float weight1;           // 1 - beta1
    float beta2, weight2;    // weight2: 1 - beta2
    float step_size;         // lr / (1 - beta1 ** step)
    float inverse_root;      // 1 / sqrt(1 - beta2 ** step)
    float eps;
};

struct SgdStep : Step {
    float *momentum_buffer;  // null: no momentum
    bool nesterov;
    float decay;             // the share of master added to the gradient
    float momentum, lr;
};

struct LionStep : Step {
    float *exp_avg;
    float kept;              // 1 - lr * weight_decay
    float weight1, weight2;  // 1 - beta1, 1 - beta2
    float lr;
};

struct IsaKernels {
    const char *name;
    void (*adamw)(const AdamStep &step, size_t begin, size_t end);
    void (*sgd)(const SgdStep &step, size_t begin, size_t end);
    void (*lion)(const LionStep &step, size_t begin, size_t end);
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
