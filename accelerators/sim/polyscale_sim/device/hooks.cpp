// What torch asks a device type that is not its own.

#include "hooks.h"

#include "devices.h"
#include "late.h"
#include "pinned.h"
#include "random.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(checked(index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(checked(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* held = storage.unsafeGetStorageImpl();
  TORCH_CHECK(held->resizable(), "This storage cannot be resized");
  const auto device = storage.device();
  auto fresh = allocate(device.index(), bytes, device);
  const auto kept = std::min(bytes, held->nbytes());
  if (kept > 0) {
    late::use(device.index());
    std::memcpy(fresh.get(), held->data(), kept);
  }
  held->set_data_ptr_noswap(std::move(fresh));
  held->set_nbytes(bytes);
}

void install_hooks() {
  static auto* made = new Hooks();
  at::RegisterPrivateUse1HooksInterface(made);
  install_pinned_allocator();
}

}  // namespace sim
