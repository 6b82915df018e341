// Chooses the instruction set once, by what processor and system support, and divides the work.
#include "dispatch.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace polyscale {
namespace {

constexpr int64_t BLOCK = 65536;          // elements of one partial sum
constexpr int64_t SMALLEST_TASK = 16384;  // elements below which waking a thread costs more than it saves
constexpr int64_t TASKS_PER_THREAD = 4;   // so that a thread that is held up leaves work to the others

#if defined(__x86_64__)
struct Processor {
    bool avx2 = false, avx512 = false;

    Processor() {
        unsigned a, b, c, d, a7, b7, c7, d7;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return;
        const unsigned fma_osxsave_avx_f16c = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
        if ((c & fma_osxsave_avx_f16c) != fma_osxsave_avx_f16c) return;
        unsigned low, high;  // which registers the system saves when it switches between processes
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
        avx2 = (b7 & 1u << 5) && (low & 0x6) == 0x6;
        avx512 = avx2 && (b7 & f_dq_bw_vl) == f_dq_bw_vl && (low & 0xe6) == 0xe6;
    }
};
#endif

// Tables that this processor can run, best first.
struct Tables {
    const KernelTable* tables[4] = {};
    const char* names[5] = {};  // the last stays null
    int size = 0;

    Tables() {
#if defined(__x86_64__)
        const Processor processor;
        if (processor.avx512) put(&polyscale_kernels_avx512);
        if (processor.avx2) put(&polyscale_kernels_avx2);
#elif defined(__aarch64__)
        put(&polyscale_kernels_neon);
#endif
        put(&polyscale_kernels_scalar);
    }

    void put(const KernelTable* table) {
        tables[size] = table;
        names[size++] = table->name;
    }
};

const Tables& tables() {
    static const Tables found;
    return found;
}

std::atomic<const KernelTable*> forced{nullptr};

const KernelTable& chosen() {
    const KernelTable* table = forced.load(std::memory_order_relaxed);
    return table != nullptr ? *table : *tables().tables[0];
}

template <class Call>
struct Ranges {
    const Call* call;
    void (*kernel)(const Call*, int64_t, int64_t);
    int64_t count, step;
};

template <class Call>
void in_ranges(const Call& call, void (*kernel)(const Call*, int64_t, int64_t), int64_t count, int threads) {
    if (count == 0) return;
    const int64_t tasks = std::max<int64_t>(1, std::min(threads * TASKS_PER_THREAD, count / SMALLEST_TASK));
    if (threads <= 1 || tasks == 1) return kernel(&call, 0, count);
    const int64_t step = ((count + tasks - 1) / tasks + 63) / 64 * 64;
    Ranges<Call> ranges{&call, kernel, count, step};
    auto task = [](void* context, int64_t index) {
        const Ranges<Call>& r = *static_cast<const Ranges<Call>*>(context);
        r.kernel(r.call, index * r.step, std::min(r.count, (index + 1) * r.step));
    };
    run_tasks((count + step - 1) / step, threads, task, &ranges);
}

struct Blocks {
    const KernelTable* table;
    const Buffer* buffers;
    std::vector<int64_t> first;  // number of the first block of each buffer
    std::vector<double> sums;
    std::vector<int32_t> finite;
};

void sum_block(void* context, int64_t index) {
    Blocks& blocks = *static_cast<Blocks*>(context);
    const auto place = std::upper_bound(blocks.first.begin(), blocks.first.end(), index) - blocks.first.begin() - 1;
    const Buffer& buffer = blocks.buffers[place];
    const int64_t begin = (index - blocks.first[size_t(place)]) * BLOCK;
    const int64_t end = std::min(buffer.count, begin + BLOCK);
    blocks.table->sum_of_squares(buffer.data, int32_t(buffer.type), begin, end, &blocks.sums[size_t(index)],
                                 &blocks.finite[size_t(index)]);
}

}  // namespace

const char* const* instruction_sets() { return tables().names; }

const char* instruction_set() { return chosen().name; }

bool set_instruction_set(const char* name) {
    for (int i = 0; i < tables().size; ++i)
        if (strcmp(tables().names[i], name) == 0) {
            forced = tables().tables[i];
            return true;
        }
    return false;
}

void adam(const AdamCall& call, int64_t count, int threads) { in_ranges(call, chosen().adam, count, threads); }

void add_scaled(const AddCall& call, int64_t count, int threads) {
    in_ranges(call, chosen().add_scaled, count, threads);
}

void fill(const FillCall& call, int64_t count, int threads) { in_ranges(call, chosen().fill, count, threads); }

void sum_of_squares(const Buffer* buffers, int64_t count, int threads, double* sum, bool* finite) {
    Blocks blocks{&chosen(), buffers, {}, {}, {}};
    int64_t total = 0, elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        blocks.first.push_back(total);
        total += (buffers[i].count + BLOCK - 1) / BLOCK;
        elements += buffers[i].count;
    }
    blocks.sums.resize(size_t(total));
    blocks.finite.resize(size_t(total));
    run_tasks(total, elements < 2 * SMALLEST_TASK ? 1 : threads, sum_block, &blocks);
    *sum = 0.0;
    *finite = true;
    for (int64_t i = 0; i < total; ++i) {
        *sum += blocks.sums[size_t(i)];
        *finite = *finite && blocks.finite[size_t(i)] != 0;
    }
}

}  // namespace polyscale
