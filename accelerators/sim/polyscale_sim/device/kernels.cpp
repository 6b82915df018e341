// Operators that need the device itself: making tensors, copying, storages, views, and choices made per device type.

#include "aliases.h"
#include "hooks.h"
#include "late.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex wanted(std::optional<at::Device> device) {
  return checked(device ? device->index() : static_cast<c10::DeviceIndex>(-1));
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "Only strided tensors can be made on ", name_of(0));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only memory of the host can be pinned");
  DeviceScope scope(wanted(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only memory of the host can be pinned");
  DeviceScope scope(wanted(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kKeys,
      c10::dtype_or_default(dtype));
}

// What autograd makes of undefined gradients of complex operators: torch's own has no memory, and would be read.
Tensor zeros(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  return empty(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

// Copies, on the current stream of the source's device, else of the destination's.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool reads = is_sim(from), writes = is_sim(to);
  const auto index = reads ? from.device().index() : to.device().index();
  const auto stream = current_key(index);
  for (const auto& tensor : {from, to}) {
    if (is_sim(tensor)) {
      check_alive(tensor.device().index());
      late::use(tensor.device().index());
    }
  }
  if (!reads) {
    late::use_host_memory(index, from);
  }
  const bool host_takes_part = !reads || !writes;
  const bool pinned = host_takes_part && non_blocking && late::enabled() && (reads ? to : from).is_pinned();
  const bool queued = non_blocking && late::enabled() && (!host_takes_part || pinned);
  if (queued && to.numel() > 0) {
    late::write(to, from, stream);
    if (reads && writes && from.device() != to.device()) {
      merge(current_key(to.device().index()), clock_of(stream));
    }
    return to;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ChargeScope charge(index);
  (writes ? borrow(to) : to).copy_(reads ? borrow(from) : from);
  if (host_takes_part) {
    late::host_waits(clock_of(stream));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  const auto index = tensor.device().index();
  check_alive(index);
  late::use(index);
  late::host_waits(clock_of(current_key(index)));
  return at::native::_local_scalar_dense_cpu(borrow(tensor));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* held = self.unsafeGetTensorImpl();
  held->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) {
    held->empty_tensor_restride(*format);
  }
  const auto needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), static_cast<size_t>(self.storage_offset()));
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    resize_storage(self.storage(), needed);
  }
  return self;
}

Tensor& set_place(
    Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(
      storage.device() == self.device(), "A tensor on ", self.device(), " cannot use a storage on ", storage.device());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* held = self.unsafeGetTensorImpl();
  held->set_storage_keep_dtype(std::move(storage));
  held->set_storage_offset(offset.expect_int());
  if (stride.empty() && !sizes.empty()) {
    held->set_sizes_contiguous(sizes);
  } else {
    held->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_place(self, std::move(storage), 0, {c10::SymInt(length)}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_place(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  const auto device = self.device();
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0, allocate(device.index(), 0, device), device_allocator(), true);
  return set_place(self, std::move(none), 0, {c10::SymInt(0)}, {});
}

void record_stream(Tensor& self, at::Stream stream) {
  late::record_stream(self.storage().mutable_data(), stream);
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

// Lets `parameter.data = tensor_of_the_device` and `Module.to` keep the parameter, as they do on torch's own devices.
bool same_kind(const Tensor& self, const Tensor& from) {
  const auto dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_sim(tensor));
  };
  return dense(self) && dense(from);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
Tensor view(const Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor as_strided(
    const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> storage_offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, storage_offset);
}

// Its result is no tensor over the device's memory, and frees what it has by rules of its own.
Tensor to_mkldnn(const Tensor& /*self*/, std::optional<at::ScalarType> /*dtype*/) {
  refuse_kind("mkldnn");
}

// Convolutions: torch sends them to a kernel of the device's own, so here is the way to the CPU's.

Tensor borrow_optional(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? borrow(*tensor) : Tensor();
}

// The device on which all operands are, ready for work.
c10::DeviceIndex start(std::initializer_list<Tensor> operands) {
  const auto device = operands.begin()->device();
  for (const auto& operand : operands) {
    TORCH_CHECK(
        !operand.defined() || operand.device() == device,
        "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
        operand.device(), "! (in a convolution)");
  }
  check_alive(device.index());
  late::use(device.index());
  return device.index();
}

Tensor back(const Tensor& made, c10::DeviceIndex index) {
  return made.defined() ? over(adopt(made.storage(), index), made) : made;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  const auto index = start({input, weight, bias.value_or(Tensor())});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ChargeScope charge(index);
  return back(
      at::convolution(
          borrow(input), borrow(weight), borrow_optional(bias), stride, padding, dilation, transposed, output_padding,
          groups),
      index);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const auto index = start({input, weight, gradient});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ChargeScope charge(index);
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      borrow(gradient), borrow(input), borrow(weight), at::IntArrayRef(&channels, 1), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {back(of_input, index), back(of_weight, index), back(of_bias, index)};
}

// The same choice of attention kernel as on the CPU, so that results are the same.
int64_t attention_kernel(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  const auto host_mask =
      mask && is_sim(*mask) ? std::optional<Tensor>(borrow(*mask)) : mask;
  return at::_fused_sdp_choice(
      borrow(query), borrow(key), borrow(value), host_mask, dropout, causal, scale, grouped);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_kernel)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("_efficientzerotensor", sim::zeros);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar_dense);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage_storage_offset", sim::set_place);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_", sim::set_empty);
  m.impl("record_stream", sim::record_stream);
  m.impl("is_set_to", sim::is_set_to);
  m.impl("_has_compatible_shallow_copy_type", sim::same_kind);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("as_strided", sim::as_strided);
  m.impl("unfold", sim::unfold);
  m.impl("to_mkldnn", sim::to_mkldnn);
  m.impl("convolution_overrideable", sim::convolution);
  m.impl("convolution_backward_overrideable", sim::convolution_backward);
}

// Copies from conjugated and negated views conjugate and negate themselves; torch would resolve the source by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
