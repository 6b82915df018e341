// What Python sees: plain numbers and addresses. The checks are in polyscale_standard.ops; nothing here looks at a tensor.
#include <pybind11/pybind11.h>

#include <math.h>

#include <stdexcept>

#include "ops.h"

namespace {

void check(const char* error) {
    if (error != nullptr) throw std::runtime_error(error);
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

void adam(uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, int grad_type, uintptr_t out,
          int out_type, int64_t count, double lr, double beta1, double beta2, double eps, double weight_decay,
          bool decoupled, int64_t step, double grad_scale, uintptr_t stream) {
    // A step of 0 leaves the moments as they are: no correction of their start at zero.
    const double bias1 = step > 0 ? 1.0 - pow(beta1, double(step)) : 1.0;
    const double bias2 = step > 0 ? 1.0 - pow(beta2, double(step)) : 1.0;
    AdamCall call;
    call.param = static_cast<float*>(pointer(param));
    call.exp_avg = static_cast<float*>(pointer(exp_avg));
    call.exp_avg_sq = static_cast<float*>(pointer(exp_avg_sq));
    call.grad = pointer(grad);
    call.out = pointer(out);
    call.grad_type = grad_type;
    call.out_type = out_type;
    call.decoupled = decoupled;
    call.grad_scale = float(grad_scale);
    call.one_minus_beta1 = float(1.0 - beta1);
    call.one_minus_beta2 = float(1.0 - beta2);
    call.step_size = float(lr / bias1);
    call.inverse_root_bias2 = float(1.0 / sqrt(bias2));
    call.eps = float(eps);
    call.decay = float(decoupled ? lr * weight_decay : weight_decay);
    check(polyscale_adam(&call, count, pointer(stream)));
}

void add_scaled(uintptr_t out, int out_type, uintptr_t x, int x_type, int64_t count, double alpha, double beta,
                uintptr_t stream) {
    check(polyscale_add_scaled(pointer(out), out_type, pointer(x), x_type, count, float(alpha), float(beta),
                               pointer(stream)));
}

void fill(uintptr_t out, int out_type, int64_t count, double value, uintptr_t stream) {
    check(polyscale_fill(pointer(out), out_type, count, float(value), pointer(stream)));
}

void partial_squares(uintptr_t data, int type, int64_t count, uintptr_t sums, uintptr_t finite, uintptr_t stream) {
    check(polyscale_partial_squares(pointer(data), type, count, static_cast<double*>(pointer(sums)),
                                    static_cast<int32_t*>(pointer(finite)), pointer(stream)));
}

void total_squares(uintptr_t sums, uintptr_t finite, int64_t count, uintptr_t sum, uintptr_t all, uintptr_t stream) {
    check(polyscale_total_squares(static_cast<const double*>(pointer(sums)), static_cast<int32_t*>(pointer(finite)),
                                  count, static_cast<double*>(pointer(sum)), static_cast<bool*>(pointer(all)),
                                  pointer(stream)));
}

}  // namespace

PYBIND11_MODULE(cuda_ops, module) {
    module.def("adam", &adam);
    module.def("add_scaled", &add_scaled);
    module.def("fill", &fill);
    module.def("partial_count", &polyscale_partial_count);
    module.def("partial_squares", &partial_squares);
    module.def("total_squares", &total_squares);
}
