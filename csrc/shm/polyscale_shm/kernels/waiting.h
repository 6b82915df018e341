// Words in shared memory that processes wait for: a short spin, then a futex.
#pragma once

#include <stdint.h>

#include <atomic>
#include <functional>

namespace polyscale {

// A number that one process raises and others wait for; alone on its cache line.
struct alignas(64) Word {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};

// Whether a has reached b, for numbers that wrap.
inline bool reached(uint32_t a, uint32_t b) { return int32_t(a - b) >= 0; }

void raise_to(Word& word, uint32_t value);
void ring(Word& bell);

double now();  // seconds, monotonic

// How long to spin before sleeping: longer where that was of use, shorter where it was not.
class Patience {
   public:
    explicit Patience(double longest_s) : longest_(longest_s), current_(longest_s) {}
    // Spins until `met`, for the current patience. Returns whether it was met.
    template <class Met>
    bool spin(const Met& met) {
        if (met()) return true;
        if (longest_ <= 0) return false;
        const double until = now() + current_;
        do {
            for (int i = 0; i < 64; ++i) {
                if (met()) {
                    current_ = current_ * 2 < longest_ ? current_ * 2 : longest_;
                    return true;
                }
                pause();
            }
        } while (now() < until);
        current_ = current_ / 2 > longest_ / 16 ? current_ / 2 : longest_ / 16;
        return false;
    }

   private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    double longest_, current_;
};

// Sleeps until the word is no longer `seen`, somebody wakes its sleepers, or `seconds` are over.
void sleep_on(Word& word, uint32_t seen, double seconds);

}  // namespace polyscale
