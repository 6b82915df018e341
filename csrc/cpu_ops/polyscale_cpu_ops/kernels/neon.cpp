// The kernels for the instruction set "neon".
#include "kernels.h"
#include "vec_neon.h"

extern "C" const KernelTable polyscale_kernels_neon = {
    "neon", adam<Neon>, sum_of_squares<Neon>, add_scaled<Neon>, fill<Neon>,
};
