// Accounting and allocation. Bytes are counted as requested, with no rounding and no cache: reserved equals allocated.

#include "devices.h"
#include "late.h"
#include "streams.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kHeader = 64;  // keeps the data aligned as the host's allocator aligns it

struct Header {
  size_t bytes;
  c10::DeviceIndex device;
  c10::StreamId stream;
};
static_assert(sizeof(Header) <= kHeader);

struct DeviceMemory {
  std::mutex mutex;
  Stat blocks, bytes;
  int64_t limit = 0;
  int64_t fail_in = 0;
  int64_t out_of_memory = 0;
  std::atomic<bool> dead{false};
};

std::array<DeviceMemory, kMaxDevices>& all() {
  static auto* made = new std::array<DeviceMemory, kMaxDevices>();  // lives on: blocks are freed at exit, too
  return *made;
}

DeviceMemory& memory(c10::DeviceIndex index) {
  return all()[static_cast<size_t>(index)];
}

int count = 0;
thread_local c10::DeviceIndex current = 0;
thread_local c10::DeviceIndex charged = -1;

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader);
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto* header = header_of(data);
  late::freed(data, header->device, header->stream);
  {
    auto& device = memory(header->device);
    std::lock_guard<std::mutex> lock(device.mutex);
    device.blocks.decrease(1);
    device.bytes.decrease(header->bytes);
  }
  std::free(header);
}

void reserve(c10::DeviceIndex index, size_t bytes) {
  auto& device = memory(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  const bool injected = device.fail_in > 0 && --device.fail_in == 0;
  const auto in_use = device.bytes.current;
  if (injected || in_use + static_cast<int64_t>(bytes) > device.limit) {
    device.out_of_memory++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, name_of(index), " is out of memory",
        injected ? " (this allocation was told to fail)" : "", ": tried to allocate ", bytes, " bytes with ", in_use,
        " of ", device.limit, " in use");
  }
  device.blocks.increase(1);
  device.bytes.increase(bytes);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return sim::allocate(current, bytes, c10::Device(kType, current));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override {
    return count > 0;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    late::record_stream(pointer.get(), stream);
  }
  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto& device = memory(checked(index));
    std::lock_guard<std::mutex> lock(device.mutex);
    DeviceStats stats;
    stats.allocation[0] = stats.active[0] = stats.segment[0] = device.blocks;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] =
        device.bytes;
    stats.num_ooms = device.out_of_memory;
    stats.num_device_alloc = device.blocks.allocated;
    stats.num_device_free = device.blocks.freed;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    auto& device = memory(checked(index));
    std::lock_guard<std::mutex> lock(device.mutex);
    device.blocks.reset_accumulated();
    device.bytes.reset_accumulated();
    device.out_of_memory = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    auto& device = memory(checked(index));
    std::lock_guard<std::mutex> lock(device.mutex);
    device.blocks.reset_peak();
    device.bytes.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    auto& device = memory(checked(index));
    std::lock_guard<std::mutex> lock(device.mutex);
    const auto free = device.limit - device.bytes.current;
    return {static_cast<size_t>(free > 0 ? free : 0), static_cast<size_t>(device.limit)};
  }
};

// In a ChargeScope gives out blocks of the device; otherwise it is the allocator that was there before.
struct HostAllocator final : c10::Allocator {
  explicit HostAllocator(c10::Allocator* base) : base_(base) {}
  c10::DataPtr allocate(size_t bytes) override {
    return charged < 0 ? base_->allocate(bytes) : sim::allocate(charged, bytes, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return charged < 0 ? base_->raw_deleter() : &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    base_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* base_;
};

}  // namespace

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(count);
}

void set_device_count(int value) {
  TORCH_CHECK(value >= 1 && value <= kMaxDevices, "1 to ", kMaxDevices, " devices can be simulated, not ", value);
  count = value;
}

c10::DeviceIndex checked(c10::DeviceIndex index) {
  if (index == -1) {
    return current;
  }
  TORCH_CHECK(
      index >= 0 && index < count, name_of(index), " does not exist: there ", count == 1 ? "is " : "are ", count,
      count == 1 ? " device" : " devices", ", 0 to ", count - 1);
  return index;
}

std::string name_of(c10::DeviceIndex index) {
  return c10::DeviceTypeName(kType, true) + ":" + std::to_string(static_cast<int>(index));
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept {
  const auto before = current;
  if (index >= 0) {
    current = index;
  }
  return before;
}

ChargeScope::ChargeScope(c10::DeviceIndex index) noexcept : before_(charged) {
  charged = index;
}

ChargeScope::~ChargeScope() {
  charged = before_;
}

void set_memory_limit(c10::DeviceIndex index, int64_t bytes) {
  TORCH_CHECK(bytes >= 0, "A device's memory cannot be ", bytes, " bytes");
  auto& device = memory(checked(index));
  std::lock_guard<std::mutex> lock(device.mutex);
  device.limit = bytes;
}

void fail_allocation(c10::DeviceIndex index, int64_t k) {
  TORCH_CHECK(k >= 0, "Allocations are counted from 1, not ", k);
  auto& device = memory(checked(index));
  std::lock_guard<std::mutex> lock(device.mutex);
  device.fail_in = k;
}

void set_dead(c10::DeviceIndex index, bool dead) {
  memory(checked(index)).dead.store(dead);
}

void check_alive(c10::DeviceIndex index) {
  TORCH_CHECK(
      !memory(index).dead.load(std::memory_order_relaxed), name_of(index),
      " is dead: it answers no call (a fault that was asked for)");
}

c10::DataPtr allocate(c10::DeviceIndex index, size_t bytes, c10::Device device) {
  check_alive(index);
  if (bytes == 0) {
    return {nullptr, nullptr, &release, device};
  }
  reserve(index, bytes);
  void* memory_of_host = nullptr;
  if (posix_memalign(&memory_of_host, kHeader, bytes + kHeader) != 0) {
    count_foreign(index, -static_cast<int64_t>(bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "The host has no ", bytes, " bytes for ", name_of(index));
  }
  auto* header = new (memory_of_host) Header{bytes, index, current_stream(index)};
  void* data = reinterpret_cast<char*>(header) + kHeader;
  return {data, data, &release, device};
}

bool is_block(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release;
}

void count_foreign(c10::DeviceIndex index, int64_t bytes) {
  auto& device = memory(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (bytes >= 0) {
    device.blocks.increase(1);
    device.bytes.increase(static_cast<size_t>(bytes));
  } else {
    device.blocks.decrease(1);
    device.bytes.decrease(static_cast<size_t>(-bytes));
  }
}

c10::DeviceAllocator* device_allocator() {
  static auto* made = new Allocator();
  return made;
}

void install_host_allocator() {
  static auto* made = new HostAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(made, 1);
}

}  // namespace sim
