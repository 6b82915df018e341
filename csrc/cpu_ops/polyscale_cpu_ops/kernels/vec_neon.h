// Four floats in a register of NEON, which every 64-bit Arm processor has.
#pragma once

#include <arm_neon.h>

#include "api.h"

namespace {

struct Neon {
    typedef float32x4_t Reg;
    struct Sum {
        float64x2_t low, high;
    };
    static constexpr int W = 4;

    static Reg set(float x) { return vdupq_n_f32(x); }
    static Reg load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, Reg x) { vst1q_f32(p, x); }
    static Reg load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static void store_bf16(uint16_t* p, Reg x) {
        uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16);
        uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));  // NaN stays NaN
        vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), vshrq_n_u32(rounded, 16), quiet)));
    }
    static Reg load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static void store_f16(uint16_t* p, Reg x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
    static Reg sub(Reg a, Reg b) { return vsubq_f32(a, b); }
    static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
    static Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
    static Reg sqrt(Reg a) { return vsqrtq_f32(a); }
    static Sum zero() { return {vdupq_n_f64(0.0), vdupq_n_f64(0.0)}; }
    static Sum add_square(Reg x, Sum sum) {
        float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
        return {vfmaq_f64(sum.low, low, low), vfmaq_f64(sum.high, high, high)};
    }
    static double total(Sum sum) { return vaddvq_f64(vaddq_f64(sum.low, sum.high)); }
};

}  // namespace
