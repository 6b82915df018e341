// What every instruction set provides.
#pragma once

#include "sums.h"

extern "C" {
polyscale::Reduce polyscale_sums_base(uint32_t type, uint32_t operation);
polyscale::Reduce polyscale_sums_avx2(uint32_t type, uint32_t operation);
}
