#include "aliases.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

namespace sim {
namespace {

// Keeps the host storage of adopted memory, and what was counted for it.
struct Adopted {
  c10::Storage host;
  c10::DeviceIndex index;
  int64_t foreign;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  if (adopted->foreign > 0) {
    count_foreign(adopted->index, -adopted->foreign);
  }
  delete adopted;
}

void release_shared(void* context) {
  delete static_cast<c10::Storage*>(context);
}

c10::Storage host_storage(size_t bytes, c10::DataPtr pointer) {
  return {c10::Storage::use_byte_size_t(), bytes, std::move(pointer), c10::GetCPUAllocator(), /*resizable=*/true};
}

at::Tensor bare(c10::Storage storage, caffe2::TypeMeta dtype) {
  const auto key = storage.device_type() == kType ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}

}  // namespace

Geometry::Geometry(const at::Tensor& tensor)
    : sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()),
      dtype(tensor.dtype()),
      conjugate(tensor.is_conj()),
      negative(tensor.is_neg()) {}

at::Tensor Geometry::view_of(const c10::Storage& storage) const {
  auto made = bare(storage, dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  made._set_conj(conjugate);
  made._set_neg(negative);
  return made;
}

at::Tensor Geometry::view_of_memory(void* data) const {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    last += (sizes[i] - 1) * strides[i];
  }
  const auto bytes = static_cast<size_t>(last + 1) * dtype.itemsize();
  return view_of(host_storage(bytes, c10::DataPtr(data, c10::Device(c10::kCPU))));
}

at::Tensor over(c10::Storage storage, const at::Tensor& like) {
  auto made = bare(std::move(storage), like.dtype());
  auto* to = made.unsafeGetTensorImpl();
  const auto* from = like.unsafeGetTensorImpl();
  to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  if (like.is_conj()) {
    made._set_conj(true);
  }
  if (like.is_neg()) {
    made._set_neg(true);
  }
  if (from->is_wrapped_number()) {
    to->set_wrapped_number(true);
  }
  return made;
}

c10::Storage borrowed_storage(const c10::Storage& storage) {
  return host_storage(storage.nbytes(), c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)));
}

at::Tensor borrow(const at::Tensor& tensor) {
  return over(borrowed_storage(tensor.storage()), tensor);
}

c10::Storage shared_storage(const c10::Storage& storage) {
  auto pointer = c10::DataPtr(
      storage.mutable_data(), new c10::Storage(storage), &release_shared, c10::Device(c10::kCPU));
  return host_storage(storage.nbytes(), std::move(pointer));
}

at::Tensor share(const at::Tensor& tensor) {
  return over(shared_storage(tensor.storage()), tensor);
}

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  const auto foreign = is_block(host.data_ptr()) ? 0 : bytes;
  if (foreign > 0) {
    count_foreign(index, foreign);
  }
  auto pointer = c10::DataPtr(
      host.mutable_data(), new Adopted{host, index, foreign}, &release_adopted, c10::Device(kType, index));
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(pointer), device_allocator(), /*resizable=*/true};
}

}  // namespace sim
