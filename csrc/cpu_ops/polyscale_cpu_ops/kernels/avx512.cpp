// The kernels for the instruction set "avx512".
#include "kernels.h"
#include "vec_avx512.h"

extern "C" const KernelTable polyscale_kernels_avx512 = {
    "avx512", adam<Avx512>, sum_of_squares<Avx512>, add_scaled<Avx512>, fill<Avx512>,
};
