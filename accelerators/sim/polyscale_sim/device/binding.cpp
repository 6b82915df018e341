// What Python sees of the device.

#include "aliases.h"
#include "devices.h"
#include "fallback.h"
#include "hooks.h"
#include "late.h"
#include "pinned.h"
#include "random.h"
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace {

void install(int devices) {
  sim::set_device_count(devices);
  c10::SetAllocator(sim::kType, sim::device_allocator());
  sim::install_guard();
  sim::install_hooks();
  sim::install_host_allocator();
  sim::route_operators();
}

at::Tensor cpu_view(const at::Tensor& tensor) {
  if (!sim::is_sim(tensor)) {
    return tensor;
  }
  sim::check_alive(tensor.device().index());
  sim::late::use(tensor.device().index());
  return sim::share(tensor);
}

void late_write(const at::Tensor& to, const at::Tensor& from, c10::StreamId stream) {
  TORCH_CHECK(sim::is_sim(to), "Late writes go to the device, not to ", to.device());
  TORCH_CHECK(to.sizes() == from.sizes(), "Sizes differ: ", to.sizes(), " and ", from.sizes());
  const auto index = to.device().index();
  sim::check_alive(index);
  sim::late::use(index);
  if (sim::late::enabled() && to.numel() > 0) {
    sim::late::write(to, from, {index, stream});
  } else {
    sim::borrow(to).copy_(sim::is_sim(from) ? sim::borrow(from) : from);
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The simulated device.";
  m.def("install", &install, py::arg("devices"), "Claim torch's slot for out-of-tree devices; once per process.");
  m.def("device_count", [] { return static_cast<int>(sim::device_count()); });
  m.def("set_memory_limit", &sim::set_memory_limit, py::arg("index"), py::arg("bytes"));
  m.def("fail_allocation", &sim::fail_allocation, py::arg("index"), py::arg("k"));
  m.def("set_dead", &sim::set_dead, py::arg("index"), py::arg("dead"));
  m.def("set_late", &sim::late::set_enabled, py::arg("on"));
  m.def("is_late", &sim::late::enabled);
  m.def("default_generator", [](int index) { return sim::default_generator(static_cast<c10::DeviceIndex>(index)); });
  // Both may wait for the lock of late work, whose holder may let go of a tensor that Python knows: without the GIL.
  m.def(
      "cpu_view", &cpu_view, py::call_guard<py::gil_scoped_release>(),
      "A host tensor over the same memory, behind the current stream's late work.");
  m.def(
      "late_write", &late_write, py::arg("to"), py::arg("from"), py::arg("stream_id"),
      py::call_guard<py::gil_scoped_release>(), "Copy on a stream of the destination's device; late where late is on.");
  m.def("pinned_bytes", &sim::pinned_bytes);
}
