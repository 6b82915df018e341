// What the binding knows of the kernels: plain C types. Every function queues work on `stream` (a cudaStream_t) of the
// current device and returns null, or what went wrong.
#pragma once

#include <stdint.h>

// Element types of buffers; the numbers are those of TYPES in polyscale_standard.ops.raw.
enum ElementType { F32 = 0, BF16 = 1, F16 = 2, F64 = 3, NO_TYPE = -1 };

struct AdamCall {
    float* param;
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    void* out;  // receives the new parameter; null where out_type is NO_TYPE
    int32_t grad_type;
    int32_t out_type;
    int32_t decoupled;
    float grad_scale;
    float one_minus_beta1;
    float one_minus_beta2;
    float step_size;           // lr / (1 - beta1^t)
    float inverse_root_bias2;  // 1 / sqrt(1 - beta2^t)
    float eps;
    float decay;  // lr * weight_decay where decoupled, else weight_decay
};

extern "C" {
const char* polyscale_adam(const AdamCall* call, int64_t count, void* stream);
const char* polyscale_add_scaled(void* out, int32_t out_type, const void* x, int32_t x_type, int64_t count, float alpha,
                                 float beta, void* stream);
const char* polyscale_fill(void* out, int32_t out_type, int64_t count, float value, void* stream);
// Blocks of threads that sum `count` elements: how many partial results polyscale_partial_squares writes.
int64_t polyscale_partial_count(int64_t count);
const char* polyscale_partial_squares(const void* data, int32_t type, int64_t count, double* sums, int32_t* finite,
                                      void* stream);
const char* polyscale_total_squares(const double* sums, const int32_t* finite, int64_t count, double* sum, bool* all,
                                    void* stream);
}
