// Threads of this module's own: torch brings an OpenMP of its own, and two of them in one process fight for the cores.
#pragma once

#include <stdint.h>

namespace polyscale {

// Runs task(context, i) for each i below count, on up to `threads` threads, the calling one included; returns when all
// are done. Tasks must not throw. A call that finds the threads busy with another call does its tasks by itself.
void run_tasks(int64_t count, int threads, void (*task)(void* context, int64_t index), void* context);

}  // namespace polyscale
