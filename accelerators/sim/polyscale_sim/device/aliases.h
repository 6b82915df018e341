// Tensors of the host over memory of the device, and back, with no copy.
#pragma once

#include "devices.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace sim {

inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Refuses what is not a plain tensor over one memory ("sparse", "quantized", ...).
[[noreturn]] inline void refuse_kind(const char* kind) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "There are no ", kind, " tensors on ", c10::DeviceTypeName(kType, true));
}

// What a tensor says about its storage.
struct Geometry {
  c10::DimVector sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  bool conjugate, negative;

  explicit Geometry(const at::Tensor& tensor);
  at::Tensor view_of(const c10::Storage& storage) const;
  at::Tensor view_of_memory(void* data) const;  // host memory that the caller keeps
};

// A tensor with the geometry of `like` over `storage`, on the storage's device.
at::Tensor over(c10::Storage storage, const at::Tensor& like);

// A host storage over the memory of a storage, which must outlive it (borrowed) or is kept by it (shared).
c10::Storage borrowed_storage(const c10::Storage& storage);
c10::Storage shared_storage(const c10::Storage& storage);
// A host tensor over the memory of a device tensor; it must not outlive the tensor ...
at::Tensor borrow(const at::Tensor& tensor);
// ... or it keeps the memory alive.
at::Tensor share(const at::Tensor& tensor);

// A storage of a device that takes over memory that a CPU kernel made for it.
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);

}  // namespace sim
