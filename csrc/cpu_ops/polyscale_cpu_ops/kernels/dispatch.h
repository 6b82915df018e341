// The operations over whole buffers, on the best instruction set of this processor, by several threads.
#pragma once

#include "api.h"

namespace polyscale {

struct Buffer {
    const void* data;
    int64_t count;
    int64_t type;
};

// Names of the instruction sets that this build has and this processor can run, best first; ends with null.
const char* const* instruction_sets();
// The one in use, and a change of it; false where it is not one of instruction_sets().
const char* instruction_set();
bool set_instruction_set(const char* name);

void adam(const AdamCall& call, int64_t count, int threads);
void add_scaled(const AddCall& call, int64_t count, int threads);
void fill(const FillCall& call, int64_t count, int threads);
// Sums are taken in blocks of fixed size and added in their order, so they do not depend on the number of threads.
void sum_of_squares(const Buffer* buffers, int64_t count, int threads, double* sum, bool* finite);

}  // namespace polyscale
