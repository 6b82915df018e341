// Operators on the CPU's kernels.
#pragma once

namespace sim {

// Sends operators that have a kernel for the CPU and one composed of others to the former: the composed one may compute
// otherwise (layer norm does), and results are to equal the CPU's bit by bit. Once per process.
void route_operators();

}  // namespace sim
