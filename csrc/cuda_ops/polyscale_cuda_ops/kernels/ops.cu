// The kernels. Memory-bound, so each is a loop over the grid in which neighbouring threads touch neighbouring elements.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops.h"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = 1 << 16;
constexpr int64_t MOST_PARTIALS = 1024;
constexpr int64_t ELEMENTS_PER_THREAD = 16;  // of a sum, before another block is worth it

struct Nothing {};

__device__ float widen(float x) { return x; }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widen(__half x) { return __half2float(x); }
__device__ void narrow(float* p, float x) { *p = x; }
__device__ void narrow(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ void narrow(__half* p, float x) { *p = __float2half_rn(x); }
__device__ void narrow(Nothing*, float) {}

__device__ int64_t first() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t stride() { return int64_t(gridDim.x) * blockDim.x; }

int blocks_for(int64_t count) {
    const int64_t wanted = (count + THREADS - 1) / THREADS;
    return int(wanted < MOST_BLOCKS ? wanted : MOST_BLOCKS);
}

const char* outcome() {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

cudaStream_t queue(void* stream) { return static_cast<cudaStream_t>(stream); }

// Moments move by a share of their distance from the new value, and a parameter takes its decay and its update in one
// rounding: betas near 1 and small decays lose less than in the form beta * old + (1 - beta) * new.
template <class G, class O>
__global__ void adam_kernel(const AdamCall call, int64_t count) {
    const G* grad = static_cast<const G*>(call.grad);
    O* out = static_cast<O*>(call.out);
    for (int64_t i = first(); i < count; i += stride()) {
        const float p = call.param[i];
        float m = call.exp_avg[i], v = call.exp_avg_sq[i], g = widen(grad[i]) * call.grad_scale;
        if (!call.decoupled) g = fmaf(call.decay, p, g);
        m = fmaf(call.one_minus_beta1, g - m, m);
        v = fmaf(call.one_minus_beta2, fmaf(g, g, -v), v);
        float update = call.step_size * __fdiv_rn(m, fmaf(__fsqrt_rn(v), call.inverse_root_bias2, call.eps));
        if (call.decoupled) update = fmaf(call.decay, p, update);
        call.exp_avg[i] = m;
        call.exp_avg_sq[i] = v;
        call.param[i] = p - update;
        narrow(out + i, p - update);
    }
}

template <class G>
void adam_into(const AdamCall& call, int64_t count, cudaStream_t stream) {
    const int blocks = blocks_for(count);
    switch (call.out_type) {
        case F32: adam_kernel<G, float><<<blocks, THREADS, 0, stream>>>(call, count); break;
        case BF16: adam_kernel<G, __nv_bfloat16><<<blocks, THREADS, 0, stream>>>(call, count); break;
        case F16: adam_kernel<G, __half><<<blocks, THREADS, 0, stream>>>(call, count); break;
        default: adam_kernel<G, Nothing><<<blocks, THREADS, 0, stream>>>(call, count); break;
    }
}

template <class O, class X>
__global__ void add_kernel(O* out, const X* x, int64_t count, float alpha, float beta) {
    for (int64_t i = first(); i < count; i += stride()) {
        const float scaled = widen(x[i]) * alpha;
        narrow(out + i, beta == 0.0f ? scaled : fmaf(widen(out[i]), beta, scaled));
    }
}

template <class O>
void add_into(O* out, const void* x, int32_t x_type, int64_t count, float alpha, float beta, cudaStream_t stream) {
    const int blocks = blocks_for(count);
    switch (x_type) {
        case BF16:
            add_kernel<<<blocks, THREADS, 0, stream>>>(out, static_cast<const __nv_bfloat16*>(x), count, alpha, beta);
            break;
        case F16:
            add_kernel<<<blocks, THREADS, 0, stream>>>(out, static_cast<const __half*>(x), count, alpha, beta);
            break;
        default:
            add_kernel<<<blocks, THREADS, 0, stream>>>(out, static_cast<const float*>(x), count, alpha, beta);
            break;
    }
}

template <class O>
__global__ void fill_kernel(O* out, int64_t count, float value) {
    for (int64_t i = first(); i < count; i += stride()) narrow(out + i, value);
}

// Sums over a block in a fixed order, so a result is the same at every run. Thread 0 has it.
__device__ void reduce(double& sum, int& finite) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    finite = __syncthreads_and(finite);
    for (int width = THREADS / 2; width > 0; width /= 2) {
        if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
        __syncthreads();
    }
    sum = sums[0];
}

__device__ double exact(double x) { return x; }
template <class X>
__device__ double exact(X x) {
    return double(widen(x));
}

template <class X>
__global__ void partial_kernel(const X* data, int64_t count, double* sums, int32_t* finite) {
    double sum = 0.0;
    int all = 1;
    for (int64_t i = first(); i < count; i += stride()) {
        const double x = exact(data[i]);
        sum = fma(x, x, sum);
        all &= isfinite(x) ? 1 : 0;
    }
    reduce(sum, all);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        finite[blockIdx.x] = all;
    }
}

__global__ void total_kernel(const double* sums, const int32_t* finite, int64_t count, double* sum, bool* all) {
    double own = 0.0;
    int fine = 1;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) {
        own += sums[i];
        fine &= finite[i];
    }
    reduce(own, fine);
    if (threadIdx.x == 0) {
        *sum = own;
        *all = fine != 0;
    }
}

template <class X>
void partial(const void* data, int64_t count, double* sums, int32_t* finite, cudaStream_t stream) {
    partial_kernel<<<int(polyscale_partial_count(count)), THREADS, 0, stream>>>(static_cast<const X*>(data), count, sums,
                                                                              finite);
}

}  // namespace

const char* polyscale_adam(const AdamCall* call, int64_t count, void* stream) {
    if (count == 0) return nullptr;
    switch (call->grad_type) {
        case BF16: adam_into<__nv_bfloat16>(*call, count, queue(stream)); break;
        case F16: adam_into<__half>(*call, count, queue(stream)); break;
        default: adam_into<float>(*call, count, queue(stream)); break;
    }
    return outcome();
}

const char* polyscale_add_scaled(void* out, int32_t out_type, const void* x, int32_t x_type, int64_t count, float alpha,
                                 float beta, void* stream) {
    if (count == 0) return nullptr;
    switch (out_type) {
        case BF16:
            add_into(static_cast<__nv_bfloat16*>(out), x, x_type, count, alpha, beta, queue(stream));
            break;
        case F16: add_into(static_cast<__half*>(out), x, x_type, count, alpha, beta, queue(stream)); break;
        default: add_into(static_cast<float*>(out), x, x_type, count, alpha, beta, queue(stream)); break;
    }
    return outcome();
}

const char* polyscale_fill(void* out, int32_t out_type, int64_t count, float value, void* stream) {
    if (count == 0) return nullptr;
    const int blocks = blocks_for(count);
    const cudaStream_t s = queue(stream);
    switch (out_type) {
        case BF16: fill_kernel<<<blocks, THREADS, 0, s>>>(static_cast<__nv_bfloat16*>(out), count, value); break;
        case F16: fill_kernel<<<blocks, THREADS, 0, s>>>(static_cast<__half*>(out), count, value); break;
        default: fill_kernel<<<blocks, THREADS, 0, s>>>(static_cast<float*>(out), count, value); break;
    }
    return outcome();
}

int64_t polyscale_partial_count(int64_t count) {
    const int64_t share = THREADS * ELEMENTS_PER_THREAD, wanted = (count + share - 1) / share;
    return wanted < MOST_PARTIALS ? wanted : MOST_PARTIALS;
}

const char* polyscale_partial_squares(const void* data, int32_t type, int64_t count, double* sums, int32_t* finite,
                                      void* stream) {
    if (count == 0) return nullptr;
    switch (type) {
        case BF16: partial<__nv_bfloat16>(data, count, sums, finite, queue(stream)); break;
        case F16: partial<__half>(data, count, sums, finite, queue(stream)); break;
        case F64: partial<double>(data, count, sums, finite, queue(stream)); break;
        default: partial<float>(data, count, sums, finite, queue(stream)); break;
    }
    return outcome();
}

const char* polyscale_total_squares(const double* sums, const int32_t* finite, int64_t count, double* sum, bool* all,
                                    void* stream) {
    total_kernel<<<1, THREADS, 0, queue(stream)>>>(sums, finite, count, sum, all);
    return outcome();
}
