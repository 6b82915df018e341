// Reductions over the inputs of all ranks, in the order of ranks; the best instruction set of this processor.
#pragma once

#include <stdint.h>

namespace polyscale {

// The numbers are those of DTYPES in polyscale_communication.numbers; from BOOL on there is no arithmetic.
enum Type : uint32_t { U8, I8, I16, I32, I64, F16, BF16, F32, F64, BOOL };
enum Operation : uint32_t { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG, PREMUL_SUM, NO_OPERATION };

// out[i] = operation over k of inputs[k][i]; `out` may be one of the inputs. Factors are those of PREMUL_SUM.
// 16-bit floats are reduced in fp32 and rounded once; averages of 8 and 16-bit integers are taken of sums in 32 bits.
typedef void (*Reduce)(const void* const* inputs, const double* factors, int ranks, void* out, int64_t count);

// Null where there is no such reduction of the type.
Reduce reduction(uint32_t type, uint32_t operation);
// Bytes of an element, and the type's name as torch writes it.
uint64_t size_of(uint32_t type);
const char* name_of(uint32_t type);

const char* instruction_set();
bool set_instruction_set(const char* name);

}  // namespace polyscale
