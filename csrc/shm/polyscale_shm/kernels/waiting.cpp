#include "waiting.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace polyscale {
namespace {

// Not FUTEX_PRIVATE: the word lies in memory that processes share.
void wake(Word& word) {
    if (word.sleepers.load(std::memory_order_seq_cst) != 0)
        syscall(SYS_futex, &word.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void raise_to(Word& word, uint32_t value) {
    word.value.store(value, std::memory_order_seq_cst);
    wake(word);
}

void ring(Word& bell) {
    bell.value.fetch_add(1, std::memory_order_seq_cst);
    wake(bell);
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void sleep_on(Word& word, uint32_t seen, double seconds) {
    timespec time;
    time.tv_sec = time_t(seconds);
    time.tv_nsec = long((seconds - double(time.tv_sec)) * 1e9);
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (word.value.load(std::memory_order_seq_cst) == seen)
        syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &time, nullptr, 0);
    word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace polyscale
