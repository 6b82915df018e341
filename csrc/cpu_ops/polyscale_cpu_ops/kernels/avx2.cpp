// The kernels for the instruction set "avx2".
#include "kernels.h"
#include "vec_avx2.h"

extern "C" const KernelTable polyscale_kernels_avx2 = {
    "avx2", adam<Avx2>, sum_of_squares<Avx2>, add_scaled<Avx2>, fill<Avx2>,
};
