// What every instruction set provides, in plain C types: the one thing that kernels, dispatch and binding share.
//
// Ranges are half open, in elements. Pointers need the alignment of their type only.
#pragma once

#include <stddef.h>
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

struct AddCall {
    void* out;
    const void* x;
    int32_t out_type;
    int32_t x_type;
    double alpha;
    double beta;
};

struct FillCall {
    void* out;
    int32_t out_type;
    double value;
};

struct KernelTable {
    const char* name;
    void (*adam)(const AdamCall* call, int64_t begin, int64_t end);
    // Writes the sum of squares into *sum, and into *finite whether every element is finite.
    void (*sum_of_squares)(const void* data, int32_t type, int64_t begin, int64_t end, double* sum, int32_t* finite);
    void (*add_scaled)(const AddCall* call, int64_t begin, int64_t end);
    void (*fill)(const FillCall* call, int64_t begin, int64_t end);
};

extern "C" {
extern const KernelTable polyscale_kernels_scalar;
extern const KernelTable polyscale_kernels_avx2;
extern const KernelTable polyscale_kernels_avx512;
extern const KernelTable polyscale_kernels_neon;
}
