// One element at a time, in what every processor has. The compiler may vectorize it for the baseline.
#pragma once

#include "api.h"

namespace {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);  // NaN stays NaN
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_f16(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));  // infinity, NaN
    if (rest >= 0x400u) return float_of(sign | ((rest << 13) + 0x38000000u));
    float magnitude = float(int32_t(rest)) * 0x1p-24f;  // subnormal: exact
    return float_of(sign | bits_of(magnitude));
}

inline uint16_t to_f16(float x) {
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
    if (rest >= 0x38800000u) return uint16_t(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
    // Subnormal: adding 0.5 aligns the last bit of fp32 with that of fp16, so the sum rounds as it must.
    return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
}

struct Scalar {
    typedef float Reg;
    typedef double Sum;
    static constexpr int W = 1;

    static Reg set(float x) { return x; }
    static Reg load(const float* p) { return *p; }
    static void store(float* p, Reg x) { *p = x; }
    static Reg load_bf16(const uint16_t* p) { return float_of(uint32_t(*p) << 16); }
    static void store_bf16(uint16_t* p, Reg x) { *p = to_bf16(x); }
    static Reg load_f16(const uint16_t* p) { return from_f16(*p); }
    static void store_f16(uint16_t* p, Reg x) { *p = to_f16(x); }
    static Reg sub(Reg a, Reg b) { return a - b; }
    static Reg mul(Reg a, Reg b) { return a * b; }
    static Reg div(Reg a, Reg b) { return a / b; }
    static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
    static Reg sqrt(Reg a) { return __builtin_sqrtf(a); }
    static Sum zero() { return 0.0; }
    static Sum add_square(Reg x, Sum sum) { return double(x) * double(x) + sum; }
    static double total(Sum sum) { return sum; }
};

}  // namespace
