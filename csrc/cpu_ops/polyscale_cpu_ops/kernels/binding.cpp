// What Python sees: plain numbers and addresses. The checks are in polyscale_standard.ops; nothing here looks at a tensor.
#include <pybind11/pybind11.h>

#include <math.h>

#include "dispatch.h"

namespace py = pybind11;

namespace {

void adam(uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, int grad_type, uintptr_t out,
          int out_type, int64_t count, double lr, double beta1, double beta2, double eps, double weight_decay,
          bool decoupled, int64_t step, double grad_scale, int threads) {
    // A step of 0 leaves the moments as they are: no correction of their start at zero.
    const double bias1 = step > 0 ? 1.0 - pow(beta1, double(step)) : 1.0;
    const double bias2 = step > 0 ? 1.0 - pow(beta2, double(step)) : 1.0;
    AdamCall call;
    call.param = reinterpret_cast<float*>(param);
    call.exp_avg = reinterpret_cast<float*>(exp_avg);
    call.exp_avg_sq = reinterpret_cast<float*>(exp_avg_sq);
    call.grad = reinterpret_cast<const void*>(grad);
    call.out = reinterpret_cast<void*>(out);
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
    polyscale::adam(call, count, threads);
}

void add_scaled(uintptr_t out, int out_type, uintptr_t x, int x_type, int64_t count, double alpha, double beta,
                int threads) {
    const AddCall call = {reinterpret_cast<void*>(out), reinterpret_cast<const void*>(x), out_type, x_type, alpha, beta};
    polyscale::add_scaled(call, count, threads);
}

void fill(uintptr_t out, int out_type, int64_t count, double value, int threads) {
    const FillCall call = {reinterpret_cast<void*>(out), out_type, value};
    polyscale::fill(call, count, threads);
}

// `buffers`: address of `count` triples of 64-bit integers: address, elements, type.
py::tuple sum_of_squares(uintptr_t buffers, int64_t count, int threads) {
    double sum = 0.0;
    bool finite = true;
    {
        py::gil_scoped_release release;
        polyscale::sum_of_squares(reinterpret_cast<const polyscale::Buffer*>(buffers), count, threads, &sum, &finite);
    }
    return py::make_tuple(sum, finite);
}

py::list instruction_sets() {
    py::list names;
    for (const char* const* name = polyscale::instruction_sets(); *name != nullptr; ++name) names.append(*name);
    return names;
}

}  // namespace

PYBIND11_MODULE(cpu_ops, module) {
    static_assert(sizeof(polyscale::Buffer) == 24, "a triple of 64-bit integers");
    module.def("adam", &adam, py::call_guard<py::gil_scoped_release>());
    module.def("add_scaled", &add_scaled, py::call_guard<py::gil_scoped_release>());
    module.def("fill", &fill, py::call_guard<py::gil_scoped_release>());
    module.def("sum_of_squares", &sum_of_squares);
    module.def("instruction_sets", &instruction_sets);
    module.def("instruction_set", &polyscale::instruction_set);
    module.def("set_instruction_set", &polyscale::set_instruction_set);
}
