#include "pinned.h"

#include "devices.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {
namespace {

struct Blocks {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
  c10::CachingAllocator::Stat count, bytes;
};

Blocks& blocks() {
  static auto* made = new Blocks();
  return *made;
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  {
    auto& all = blocks();
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.sizes.find(static_cast<const char*>(data));
    all.count.decrease(1);
    all.bytes.decrease(found->second);
    all.sizes.erase(found);
  }
  std::free(data);
}

struct Allocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    void* data = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, posix_memalign(&data, 4096, bytes) == 0, "The host has no ", bytes, " bytes to pin");
    auto& all = blocks();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.sizes[static_cast<const char*>(data)] = bytes;
    all.count.increase(1);
    all.bytes.increase(bytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    auto& all = blocks();
    std::lock_guard<std::mutex> lock(all.mutex);
    at::HostStats stats;
    stats.allocations = all.count;
    stats.allocated_bytes = all.bytes;
    return stats;
  }
  void reset_accumulated_stats() override {
    auto& all = blocks();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.count.reset_accumulated();
    all.bytes.reset_accumulated();
  }
  void reset_peak_stats() override {
    auto& all = blocks();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.count.reset_peak();
    all.bytes.reset_peak();
  }
};

Allocator* instance() {
  static auto* made = new Allocator();
  return made;
}

}  // namespace

c10::Allocator* pinned_allocator() {
  return instance();
}

void install_pinned_allocator() {
  at::setHostAllocator(kType, instance(), 0);
}

int64_t pinned_bytes() {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.bytes.current;
}

bool is_pinned(const void* pointer) {
  auto& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto* address = static_cast<const char*>(pointer);
  auto next = all.sizes.upper_bound(address);
  if (next == all.sizes.begin()) {
    return false;
  }
  --next;
  return address < next->first + next->second;
}

}  // namespace sim
