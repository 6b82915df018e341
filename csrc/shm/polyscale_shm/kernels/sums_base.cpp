#include "sums_kernels.h"

extern "C" polyscale::Reduce polyscale_sums_base(uint32_t type, uint32_t operation) { return find(type, operation); }
