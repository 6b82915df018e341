// The kernels, written once over a vector type V and compiled by one file per instruction set.
//
// Everything is in an unnamed namespace and no header of the C++ library is included: a function that two files share
// would be kept once by the linker, perhaps in the form that an older processor cannot run. A rest shorter than a
// vector goes through a padded buffer and the same instructions, so a result does not depend on where a range begins.
#pragma once

#include "api.h"

namespace {

// How elements of a type are read into and written from a vector of floats.
template <class V>
struct Float32 {
    typedef float T;
    static typename V::Reg load(const T* p) { return V::load(p); }
    static void store(T* p, typename V::Reg x) { V::store(p, x); }
};
template <class V>
struct BFloat16 {
    typedef uint16_t T;
    static typename V::Reg load(const T* p) { return V::load_bf16(p); }
    static void store(T* p, typename V::Reg x) { V::store_bf16(p, x); }
};
template <class V>
struct Float16 {
    typedef uint16_t T;
    static typename V::Reg load(const T* p) { return V::load_f16(p); }
    static void store(T* p, typename V::Reg x) { V::store_f16(p, x); }
};
template <class V>
struct Nothing {
    typedef uint16_t T;
    static void store(T*, typename V::Reg) {}
};

template <class V>
struct AdamScalars {
    typename V::Reg grad_scale, rest1, rest2, step_size, inverse_root, eps, decay;
    explicit AdamScalars(const AdamCall& call)
        : grad_scale(V::set(call.grad_scale)),
          rest1(V::set(call.one_minus_beta1)),
          rest2(V::set(call.one_minus_beta2)),
          step_size(V::set(call.step_size)),
          inverse_root(V::set(call.inverse_root_bias2)),
          eps(V::set(call.eps)),
          decay(V::set(call.decay)) {}
};

// One vector of elements. Moments move by a share of their distance from the new value, and a parameter takes its decay
// and its update in one rounding: betas near 1 and small decays lose less than in the form beta * old + (1 - beta) * new.
template <class V, class G, class O>
inline void adam_vector(const AdamScalars<V>& s, bool decoupled, float* param, float* exp_avg, float* exp_avg_sq,
                        const typename G::T* grad, typename O::T* out) {
    typename V::Reg p = V::load(param), m = V::load(exp_avg), v = V::load(exp_avg_sq);
    typename V::Reg g = V::mul(G::load(grad), s.grad_scale);
    if (!decoupled) g = V::fma(s.decay, p, g);
    m = V::fma(s.rest1, V::sub(g, m), m);
    v = V::fma(s.rest2, V::fma(g, g, V::sub(V::set(0.0f), v)), v);
    typename V::Reg update = V::mul(s.step_size, V::div(m, V::fma(V::sqrt(v), s.inverse_root, s.eps)));
    if (decoupled) update = V::fma(s.decay, p, update);
    p = V::sub(p, update);
    V::store(exp_avg, m);
    V::store(exp_avg_sq, v);
    V::store(param, p);
    O::store(out, p);
}

template <class V, class G, class O>
void adam_range(const AdamCall& call, int64_t begin, int64_t end) {
    const AdamScalars<V> s(call);
    const bool decoupled = call.decoupled != 0;
    const typename G::T* grad = static_cast<const typename G::T*>(call.grad);
    typename O::T* out = static_cast<typename O::T*>(call.out);
    int64_t i = begin;
    for (; i + V::W <= end; i += V::W)
        adam_vector<V, G, O>(s, decoupled, call.param + i, call.exp_avg + i, call.exp_avg_sq + i, grad + i, out + i);
    const size_t rest = size_t(end - i);
    if (rest == 0) return;
    float p[V::W] = {}, m[V::W] = {}, v[V::W] = {};
    typename G::T g[V::W] = {};
    typename O::T o[V::W];
    __builtin_memcpy(p, call.param + i, rest * sizeof(float));
    __builtin_memcpy(m, call.exp_avg + i, rest * sizeof(float));
    __builtin_memcpy(v, call.exp_avg_sq + i, rest * sizeof(float));
    __builtin_memcpy(g, grad + i, rest * sizeof(g[0]));
    adam_vector<V, G, O>(s, decoupled, p, m, v, g, o);
    __builtin_memcpy(call.param + i, p, rest * sizeof(float));
    __builtin_memcpy(call.exp_avg + i, m, rest * sizeof(float));
    __builtin_memcpy(call.exp_avg_sq + i, v, rest * sizeof(float));
    if (call.out_type != NO_TYPE) __builtin_memcpy(out + i, o, rest * sizeof(o[0]));
}

template <class V, class G>
void adam_into(const AdamCall& call, int64_t begin, int64_t end) {
    switch (call.out_type) {
        case F32: return adam_range<V, G, Float32<V>>(call, begin, end);
        case BF16: return adam_range<V, G, BFloat16<V>>(call, begin, end);
        case F16: return adam_range<V, G, Float16<V>>(call, begin, end);
        default: return adam_range<V, G, Nothing<V>>(call, begin, end);
    }
}

template <class V>
void adam(const AdamCall* call, int64_t begin, int64_t end) {
    switch (call->grad_type) {
        case BF16: return adam_into<V, BFloat16<V>>(*call, begin, end);
        case F16: return adam_into<V, Float16<V>>(*call, begin, end);
        default: return adam_into<V, Float32<V>>(*call, begin, end);
    }
}

// Squares of fp32 and narrower cannot leave the range of fp64, so the sum is finite just when every element is.
template <class V, class X>
double squares(const typename X::T* x, int64_t begin, int64_t end) {
    typename V::Sum sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = begin;
    for (; i + 4 * V::W <= end; i += 4 * V::W)
        for (int k = 0; k < 4; ++k) sums[k] = V::add_square(X::load(x + i + k * V::W), sums[k]);
    for (; i + V::W <= end; i += V::W) sums[0] = V::add_square(X::load(x + i), sums[0]);
    if (i < end) {
        typename X::T padded[V::W] = {};
        __builtin_memcpy(padded, x + i, size_t(end - i) * sizeof(padded[0]));
        sums[1] = V::add_square(X::load(padded), sums[1]);
    }
    return (V::total(sums[0]) + V::total(sums[1])) + (V::total(sums[2]) + V::total(sums[3]));
}

// Squares of fp64 may overflow though every element is finite: x - x is 0 for those and NaN for others.
inline double double_squares(const double* x, int64_t begin, int64_t end, int32_t* finite) {
    double sums[8] = {}, differences[8] = {};
    int64_t i = begin;
    for (; i + 8 <= end; i += 8)
        for (int k = 0; k < 8; ++k) {
            sums[k] += x[i + k] * x[i + k];
            differences[k] += x[i + k] - x[i + k];
        }
    for (; i < end; ++i) {
        sums[0] += x[i] * x[i];
        differences[0] += x[i] - x[i];
    }
    double sum = 0.0, difference = 0.0;
    for (int k = 0; k < 8; ++k) {
        sum += sums[k];
        difference += differences[k];
    }
    *finite = difference == 0.0;
    return sum;
}

template <class V>
void sum_of_squares(const void* data, int32_t type, int64_t begin, int64_t end, double* sum, int32_t* finite) {
    switch (type) {
        case BF16: *sum = squares<V, BFloat16<V>>(static_cast<const uint16_t*>(data), begin, end); break;
        case F16: *sum = squares<V, Float16<V>>(static_cast<const uint16_t*>(data), begin, end); break;
        case F64: *sum = double_squares(static_cast<const double*>(data), begin, end, finite); return;
        default: *sum = squares<V, Float32<V>>(static_cast<const float*>(data), begin, end); break;
    }
    *finite = *sum - *sum == 0.0;
}

template <class V, class O, class X, bool keep>
inline void add_vector(typename V::Reg alpha, typename V::Reg beta, typename O::T* out, const typename X::T* x) {
    typename V::Reg scaled = V::mul(X::load(x), alpha);
    O::store(out, keep ? V::fma(O::load(out), beta, scaled) : scaled);
}

template <class V, class O, class X, bool keep>
void add_range(const AddCall& call, int64_t begin, int64_t end) {
    typename O::T* out = static_cast<typename O::T*>(call.out);
    const typename X::T* x = static_cast<const typename X::T*>(call.x);
    const typename V::Reg alpha = V::set(float(call.alpha)), beta = V::set(float(call.beta));
    int64_t i = begin;
    for (; i + V::W <= end; i += V::W) add_vector<V, O, X, keep>(alpha, beta, out + i, x + i);
    const size_t rest = size_t(end - i);
    if (rest == 0) return;
    typename O::T o[V::W] = {};
    typename X::T padded[V::W] = {};
    if (keep) __builtin_memcpy(o, out + i, rest * sizeof(o[0]));
    __builtin_memcpy(padded, x + i, rest * sizeof(padded[0]));
    add_vector<V, O, X, keep>(alpha, beta, o, padded);
    __builtin_memcpy(out + i, o, rest * sizeof(o[0]));
}

template <class V, class O, class X>
void add_kept(const AddCall& call, int64_t begin, int64_t end) {
    if (call.beta == 0.0)
        add_range<V, O, X, false>(call, begin, end);
    else
        add_range<V, O, X, true>(call, begin, end);
}

template <class V, class O>
void add_from(const AddCall& call, int64_t begin, int64_t end) {
    switch (call.x_type) {
        case BF16: return add_kept<V, O, BFloat16<V>>(call, begin, end);
        case F16: return add_kept<V, O, Float16<V>>(call, begin, end);
        default: return add_kept<V, O, Float32<V>>(call, begin, end);
    }
}

template <class V>
void add_scaled(const AddCall* call, int64_t begin, int64_t end) {
    switch (call->out_type) {
        case BF16: return add_from<V, BFloat16<V>>(*call, begin, end);
        case F16: return add_from<V, Float16<V>>(*call, begin, end);
        default: return add_from<V, Float32<V>>(*call, begin, end);
    }
}

template <class V, class O>
void fill_range(const FillCall& call, int64_t begin, int64_t end) {
    typename O::T* out = static_cast<typename O::T*>(call.out);
    const typename V::Reg value = V::set(float(call.value));
    int64_t i = begin;
    for (; i + V::W <= end; i += V::W) O::store(out + i, value);
    typename O::T o[V::W];
    O::store(o, value);
    __builtin_memcpy(out + i, o, size_t(end - i) * sizeof(o[0]));
}

template <class V>
void fill(const FillCall* call, int64_t begin, int64_t end) {
    switch (call->out_type) {
        case BF16: return fill_range<V, BFloat16<V>>(*call, begin, end);
        case F16: return fill_range<V, Float16<V>>(*call, begin, end);
        default: return fill_range<V, Float32<V>>(*call, begin, end);
    }
}

}  // namespace
