// The kernels for the instruction set "scalar".
#include "kernels.h"
#include "vec_scalar.h"

extern "C" const KernelTable polyscale_kernels_scalar = {
    "scalar", adam<Scalar>, sum_of_squares<Scalar>, add_scaled<Scalar>, fill<Scalar>,
};
