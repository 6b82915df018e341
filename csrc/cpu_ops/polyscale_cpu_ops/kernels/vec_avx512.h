// Sixteen floats in a register of AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "api.h"

namespace {

struct Avx512 {
    typedef __m512 Reg;
    struct Sum {
        __m512d low, high;
    };
    static constexpr int W = 16;

    static Reg set(float x) { return _mm512_set1_ps(x); }
    static Reg load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
    static Reg load_bf16(const uint16_t* p) {
        __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    // The instruction that converts to bf16 flushes subnormal numbers to zero, so the rounding is done by hand.
    static void store_bf16(uint16_t* p, Reg x) {
        __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        __m512i words = _mm512_mask_or_epi32(_mm512_srli_epi32(rounded, 16), is_nan, high, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
    }
    static Reg load_f16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_f16(uint16_t* p, Reg x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }
    static Sum zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    static Sum add_square(Reg x, Sum sum) {
        __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
    }
    static double total(Sum sum) {
        double lanes[8], result = 0.0;
        _mm512_storeu_pd(lanes, _mm512_add_pd(sum.low, sum.high));
        for (int i = 0; i < 8; ++i) result += lanes[i];
        return result;
    }
};

}  // namespace
