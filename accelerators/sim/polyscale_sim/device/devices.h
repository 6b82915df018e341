// The simulated devices: how many, their memory, and the faults put on them.
//
// A block of device memory is host memory with a header in front of it, so that whoever frees it knows what to count.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

// Number of devices; set once, before the first tensor.
c10::DeviceIndex device_count() noexcept;
void set_device_count(int count);

// The device of `index`, or the current one of this thread for -1; an error names the count.
c10::DeviceIndex checked(c10::DeviceIndex index);
std::string name_of(c10::DeviceIndex index);

// The current device of this thread.
c10::DeviceIndex current_device() noexcept;
c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept;

// Makes `index` current for a scope.
struct DeviceScope {
  explicit DeviceScope(c10::DeviceIndex index) : before_(exchange_device(index)) {}
  ~DeviceScope() { exchange_device(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex before_;
};

// Charges what the host's allocator gives out in this scope, on this thread, to a device: results and temporary
// memory of the CPU kernels that compute for it.
struct ChargeScope {
  explicit ChargeScope(c10::DeviceIndex index) noexcept;
  ~ChargeScope();
  ChargeScope(const ChargeScope&) = delete;
  ChargeScope& operator=(const ChargeScope&) = delete;

 private:
  c10::DeviceIndex before_;
};

// Faults.
void set_memory_limit(c10::DeviceIndex index, int64_t bytes);
void fail_allocation(c10::DeviceIndex index, int64_t k);  // the k-th from now; 0: none
void set_dead(c10::DeviceIndex index, bool dead);
void check_alive(c10::DeviceIndex index);  // raises for a dead device

// Memory. `device` of the returned pointer is the simulated one, or the host where a CPU kernel is given it.
c10::DataPtr allocate(c10::DeviceIndex index, size_t bytes, c10::Device device);
bool is_block(const c10::DataPtr& pointer);
// Counts memory that a kernel took from elsewhere; `bytes` may be negative.
void count_foreign(c10::DeviceIndex index, int64_t bytes);
c10::DeviceAllocator* device_allocator();
// Routes the host's allocator through ours, for ChargeScope. Once per process.
void install_host_allocator();

}  // namespace sim
