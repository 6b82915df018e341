// The loops of the reductions, compiled by one file per instruction set.
//
// Everything is in an unnamed namespace and no header of the C++ library is included: a function that two files share
// would be kept once by the linker, perhaps in the form that an older processor cannot run. Elements go through a block
// of accumulators that stays in the first cache: each input is read once and the result written once.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "sums_table.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int BLOCK = 1024;
constexpr int64_t LARGE_BYTES = 4 << 20;

// Past the caches, where the processor would else read what it is going to overwrite. `to` at a multiple of 32 bytes.
inline void stream(const void* from, void* to, int64_t bytes) {
    int64_t i = 0;
#if defined(__AVX2__)
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    for (; i + 32 <= bytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
#endif
    __builtin_memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, size_t(bytes - i));
}

// How elements of a type become accumulators, and back. `view`: the accumulators of n elements, in `space` or in place.
template <class T>
struct Plain {
    typedef T Element;
    typedef T Accumulator;
    static const T* view(const T* from, T*, int) { return from; }
    static void store(const T* from, T* to, int n, bool past_caches) {
        if (past_caches)
            stream(from, to, int64_t(n) * int64_t(sizeof(T)));
        else
            __builtin_memcpy(to, from, size_t(n) * sizeof(T));
    }
};

// Integers whose sum over the ranks may leave their range, although what is made of it does not.
template <class T>
struct Widened {
    typedef T Element;
    typedef int32_t Accumulator;
    static const int32_t* view(const T* from, int32_t* to, int n) {
        for (int i = 0; i < n; ++i) to[i] = from[i];
        return to;
    }
    static void store(const int32_t* from, T* to, int n, bool) {
        for (int i = 0; i < n; ++i) to[i] = T(from[i]);
    }
};

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

struct BFloat16 {
    typedef uint16_t Element;
    typedef float Accumulator;
    static const float* view(const uint16_t* from, float* to, int n) {
        for (int i = 0; i < n; ++i) to[i] = float_of(uint32_t(from[i]) << 16);
        return to;
    }
    static void store(const float* from, uint16_t* to, int n, bool) {
        for (int i = 0; i < n; ++i) {
            const uint32_t bits = bits_of(from[i]);
            const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // ties to even
            const uint32_t nan = bits >> 16 | 0x40u;
            to[i] = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest);
        }
    }
};

struct Float16 {
    typedef uint16_t Element;
    typedef float Accumulator;
    static float wide(uint16_t half) {
        const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
        if (exponent == 0x1f) return float_of(sign | 0x7f800000u | mantissa << 13);
        if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
        const float small = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        return float_of(sign | bits_of(small));
    }
    static uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
        if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
        if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
        if (rest < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the last bits
            return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
        }
        return uint16_t(sign | ((rest + 0xfffu + (rest >> 13 & 1u)) - 0x38000000u) >> 13);
    }
    static const float* view(const uint16_t* from, float* to, int n) {
        int i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
        for (; i < n; ++i) to[i] = wide(from[i]);
        return to;
    }
    static void store(const float* from, uint16_t* to, int n, bool) {
        int i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
        for (; i < n; ++i) to[i] = narrow(from[i]);
    }
};

struct Sum {
    template <class A>
    static A of(A a, A b) {
        return A(a + b);
    }
};
struct Product {
    template <class A>
    static A of(A a, A b) {
        return A(a * b);
    }
};
template <>
inline uint16_t Product::of<uint16_t>(uint16_t a, uint16_t b) {  // promoted to int, the product could leave its range
    return uint16_t(uint32_t(a) * uint32_t(b));
}
// A NaN of any rank stays: a != a holds for nothing else.
struct Least {
    template <class A>
    static A of(A a, A b) {
        return a < b || a != a ? a : b;
    }
};
struct Greatest {
    template <class A>
    static A of(A a, A b) {
        return a > b || a != a ? a : b;
    }
};
struct And {
    template <class A>
    static A of(A a, A b) {
        return A(a & b);
    }
};
struct Or {
    template <class A>
    static A of(A a, A b) {
        return A(a | b);
    }
};
struct Xor {
    template <class A>
    static A of(A a, A b) {
        return A(a ^ b);
    }
};

template <class A>
struct Division {  // of integers: towards minus infinity, as torch's floor_divide
    static A of(A sum, int ranks) {
        const A divisor = A(ranks), quotient = A(sum / divisor);
        return A(quotient - (sum % divisor != 0 && (sum < 0) != (divisor < 0)));
    }
};
template <>
struct Division<float> {
    static float of(float sum, int ranks) { return sum / float(ranks); }
};
template <>
struct Division<double> {
    static double of(double sum, int ranks) { return sum / double(ranks); }
};

enum Extra { NOTHING, DIVIDE, SCALE };

template <class L, class Op, Extra extra>
void reduce(const void* const* inputs, const double* factors, int ranks, void* out, int64_t count) {
    typedef typename L::Element T;
    typedef typename L::Accumulator A;
    alignas(64) A total[BLOCK];
    alignas(64) A space[2][BLOCK];
    T* target = static_cast<T*>(out);
    bool past_caches = count * int64_t(sizeof(T)) >= LARGE_BYTES && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    for (int rank = 0; rank < ranks; ++rank)
        past_caches = past_caches && inputs[rank] != out;  // that is in the cache by then
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int n = count - begin < BLOCK ? int(count - begin) : BLOCK;
        const auto view = [&](int rank) {
            return L::view(static_cast<const T*>(inputs[rank]) + begin, space[rank & 1], n);
        };
        const A* first = view(0);
        int next = 1;
        if (extra != SCALE && ranks > 1) {
            const A* second = view(next++);
            for (int i = 0; i < n; ++i) total[i] = Op::of(first[i], second[i]);
        } else {
            for (int i = 0; i < n; ++i) total[i] = extra == SCALE ? A(first[i] * A(factors[0])) : first[i];
        }
        for (; next < ranks; ++next) {
            const A* more = view(next);
            if (extra == SCALE)
                for (int i = 0; i < n; ++i) total[i] = Op::of(total[i], A(more[i] * A(factors[next])));
            else
                for (int i = 0; i < n; ++i) total[i] = Op::of(total[i], more[i]);
        }
        if (extra == DIVIDE)
            for (int i = 0; i < n; ++i) total[i] = Division<A>::of(total[i], ranks);
        L::store(total, target + begin, n, past_caches);
    }
#if defined(__AVX2__)
    if (past_caches) _mm_sfence();  // other processes read it after the next word that is raised
#endif
}

template <class L>
polyscale::Reduce floating(uint32_t operation) {
    switch (operation) {
        case polyscale::SUM: return reduce<L, Sum, NOTHING>;
        case polyscale::PRODUCT: return reduce<L, Product, NOTHING>;
        case polyscale::MIN: return reduce<L, Least, NOTHING>;
        case polyscale::MAX: return reduce<L, Greatest, NOTHING>;
        case polyscale::AVG: return reduce<L, Sum, DIVIDE>;
        case polyscale::PREMUL_SUM: return reduce<L, Sum, SCALE>;
        default: return nullptr;
    }
}

// U: unsigned, which wraps by definition; W: how averages are taken. No PREMUL_SUM: a factor is no integer.
template <class T, class U, class W>
polyscale::Reduce integral(uint32_t operation) {
    switch (operation) {
        case polyscale::SUM: return reduce<Plain<U>, Sum, NOTHING>;
        case polyscale::PRODUCT: return reduce<Plain<U>, Product, NOTHING>;
        case polyscale::BAND: return reduce<Plain<U>, And, NOTHING>;
        case polyscale::BOR: return reduce<Plain<U>, Or, NOTHING>;
        case polyscale::BXOR: return reduce<Plain<U>, Xor, NOTHING>;
        case polyscale::MIN: return reduce<Plain<T>, Least, NOTHING>;
        case polyscale::MAX: return reduce<Plain<T>, Greatest, NOTHING>;
        case polyscale::AVG: return reduce<W, Sum, DIVIDE>;
        default: return nullptr;
    }
}

polyscale::Reduce find(uint32_t type, uint32_t operation) {
    switch (type) {
        case polyscale::U8: return integral<uint8_t, uint8_t, Widened<uint8_t>>(operation);
        case polyscale::I8: return integral<int8_t, uint8_t, Widened<int8_t>>(operation);
        case polyscale::I16: return integral<int16_t, uint16_t, Widened<int16_t>>(operation);
        case polyscale::I32: return integral<int32_t, uint32_t, Plain<int32_t>>(operation);
        case polyscale::I64: return integral<int64_t, uint64_t, Plain<int64_t>>(operation);
        case polyscale::F16: return floating<Float16>(operation);
        case polyscale::BF16: return floating<BFloat16>(operation);
        case polyscale::F32: return floating<Plain<float>>(operation);
        case polyscale::F64: return floating<Plain<double>>(operation);
        default: return nullptr;
    }
}

}  // namespace
