// Chooses the instruction set once, by what processor and system support.
#include "sums.h"

#include <string.h>

#include <atomic>

#include "sums_table.h"

namespace polyscale {
namespace {

struct Set {
    const char* name;
    Reduce (*find)(uint32_t, uint32_t);
};

struct Sets {
    Set sets[2];
    int size = 0;

    Sets() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        if (avx2) sets[size++] = {"avx2", polyscale_sums_avx2};
#endif
        sets[size++] = {"base", polyscale_sums_base};
    }
};

const Sets& all() {
    static const Sets found;
    return found;
}

struct Named {
    const char* name;
    uint64_t size;
};

const Named& named(uint32_t type) {
    static const Named types[] = {
        {"uint8", 1},       {"int8", 1},          {"int16", 2},          {"int32", 4},         {"int64", 8},
        {"float16", 2},     {"bfloat16", 2},      {"float32", 4},        {"float64", 8},       {"bool", 1},
        {"complex64", 8},   {"complex128", 16},   {"uint16", 2},         {"uint32", 4},        {"uint64", 8},
        {"complex32", 4},   {"float8_e4m3fn", 1}, {"float8_e5m2", 1},    {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
        {"float8_e8m0fnu", 1}, {"another dtype, as bytes", 1}};
    constexpr uint32_t last = sizeof types / sizeof types[0] - 1;
    return types[type < last ? type : last];
}

std::atomic<const Set*> forced{nullptr};

const Set& chosen() {
    const Set* set = forced.load(std::memory_order_relaxed);
    return set != nullptr ? *set : all().sets[0];
}

}  // namespace

Reduce reduction(uint32_t type, uint32_t operation) {
    if (type != BOOL) return chosen().find(type, operation);
    switch (operation) {
        case SUM:
        case MAX: return chosen().find(U8, BOR);
        case PRODUCT:
        case MIN: return chosen().find(U8, BAND);
        case BAND:
        case BOR:
        case BXOR: return chosen().find(U8, operation);
        default: return nullptr;
    }
}

uint64_t size_of(uint32_t type) { return named(type).size; }

const char* name_of(uint32_t type) { return named(type).name; }

const char* instruction_set() { return chosen().name; }

bool set_instruction_set(const char* name) {
    for (int i = 0; i < all().size; ++i)
        if (strcmp(all().sets[i].name, name) == 0) {
            forced = &all().sets[i];
            return true;
        }
    return false;
}

}  // namespace polyscale
