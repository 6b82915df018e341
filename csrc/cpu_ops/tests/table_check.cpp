// Runs the kernels of one instruction set on numbers from a file, for a processor that the tests do not run on.
//
//     table_check <count> <in> <out>
//
// <in>: count floats each of param, exp_avg, exp_avg_sq and grad. Every function of the table is called; <out> gets
// param, exp_avg, exp_avg_sq, the gradient in bf16 and fp16 and each of these back in fp32, the sums of squares of the
// gradient in fp32, bf16 and fp16, and a buffer filled with 0.3.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "api.h"

#ifndef TABLE
#error "TABLE is not defined"
#endif

namespace {

template <class T>
void put(FILE* file, const std::vector<T>& values) {
    if (fwrite(values.data(), sizeof(T), values.size(), file) != values.size()) exit(2);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const long count = atol(argv[1]);
    std::vector<float> param(count), exp_avg(count), exp_avg_sq(count), grad(count), filled(count), back(count);
    FILE* in = fopen(argv[2], "rb");
    if (in == nullptr) return 2;
    for (auto* values : {&param, &exp_avg, &exp_avg_sq, &grad})
        if (fread(values->data(), sizeof(float), count, in) != size_t(count)) return 2;
    fclose(in);

    const KernelTable& table = TABLE;
    AdamCall adam = {param.data(), exp_avg.data(), exp_avg_sq.data(), grad.data(), nullptr, F32, NO_TYPE, 1, 0.5f,
                     0.1f, 0.001f, 0.0369f, 18.27f, 1e-8f, 1e-3f};
    table.adam(&adam, 0, count);
    FILE* out = fopen(argv[3], "wb");
    put(out, param);
    put(out, exp_avg);
    put(out, exp_avg_sq);
    std::vector<double> sums(3);
    int32_t finite = 0;
    table.sum_of_squares(grad.data(), F32, 0, count, &sums[0], &finite);
    for (int type : {BF16, F16}) {
        std::vector<uint16_t> halves(count);
        AddCall down = {halves.data(), grad.data(), type, F32, 1.0, 0.0}, up = {back.data(), halves.data(), F32, type, 1.0, 0.0};
        table.add_scaled(&down, 0, count);
        table.add_scaled(&up, 0, count);
        table.sum_of_squares(halves.data(), type, 0, count, &sums[type == BF16 ? 1 : 2], &finite);
        put(out, halves);
        put(out, back);
    }
    FillCall fill = {filled.data(), F32, 0.3};
    table.fill(&fill, 0, count);
    put(out, sums);
    put(out, filled);
    return fclose(out);
}
