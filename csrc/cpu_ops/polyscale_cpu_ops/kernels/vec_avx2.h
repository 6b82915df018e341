// Eight floats in a register of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "api.h"

namespace {

struct Avx2 {
    typedef __m256 Reg;
    struct Sum {
        __m256d low, high;
    };
    static constexpr int W = 8;

    static Reg set(float x) { return _mm256_set1_ps(x); }
    static Reg load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
    static Reg load_bf16(const uint16_t* p) {
        __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static void store_bf16(uint16_t* p, Reg x) {
        __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));  // NaN stays NaN
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan);
        words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
    }
    static Reg load_f16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_f16(uint16_t* p, Reg x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }
    static Sum zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    static Sum add_square(Reg x, Sum sum) {
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        return {_mm256_fmadd_pd(low, low, sum.low), _mm256_fmadd_pd(high, high, sum.high)};
    }
    static double total(Sum sum) {
        double lanes[4];
        _mm256_storeu_pd(lanes, _mm256_add_pd(sum.low, sum.high));
        return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
};

}  // namespace
