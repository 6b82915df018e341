#include "streams.h"

#include "devices.h"
#include "late.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace sim {
namespace {

thread_local std::array<c10::StreamId, kMaxDevices> current{};
std::atomic<c10::StreamId> last_stream{0};
std::atomic<uint64_t> last_number{0};

struct Clocks {
  std::mutex mutex;
  std::map<StreamKey, Clock> known;
};

Clocks& clocks() {
  static auto* made = new Clocks();
  return *made;
}

struct Event {
  c10::DeviceIndex index;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(checked(device.index()))};
  }
  c10::Device getDevice() const override {
    return {kType, current_device()};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(checked(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = checked(device.index());
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(checked(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const auto index = checked(device.index());
    check_alive(index);
    return stream_of(index, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = checked(stream.device_index());
    const auto before = std::exchange(current[static_cast<size_t>(index)], stream.id());
    return stream_of(index, before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_alive(stream.device_index());
    return late::query(clock_of(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_alive(stream.device_index());
    late::host_waits(clock_of(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    check_alive(checked(index));
    late::host_waits_for_device(checked(index));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    late::record_stream(pointer.get(), stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    check_alive(stream.device_index());
    if (*event == nullptr) {
      *event = new Event();
    }
    *static_cast<Event*>(*event) = {
        stream.device_index(), clock_of(key_of(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_alive(stream.device_index());
    if (event != nullptr) {
      merge(key_of(stream), static_cast<Event*>(event)->clock);
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    check_alive(static_cast<Event*>(event)->index);
    return late::query(static_cast<Event*>(event)->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      check_alive(static_cast<Event*>(event)->index);
      late::host_waits(static_cast<Event*>(event)->clock);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before their time is asked for");
    const std::chrono::duration<double, std::milli> between =
        static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return between.count();
  }
};

}  // namespace

c10::StreamId current_stream(c10::DeviceIndex index) noexcept {
  return current[static_cast<size_t>(index)];
}

uint64_t next_number() {
  return ++last_number;
}

Clock clock_of(const StreamKey& stream) {
  auto& all = clocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  Clock clock = all.known[stream];
  clock[stream] = last_number.load();
  return clock;
}

void merge(const StreamKey& stream, const Clock& clock) {
  auto& all = clocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& known = all.known[stream];
  for (const auto& [other, number] : clock) {
    auto& entry = known[other];
    entry = std::max(entry, number);
  }
}

bool covers(const Clock& clock, const StreamKey& stream, uint64_t number) {
  const auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

void install_guard() {
  static const auto* made = new Guard();
  c10::impl::registerDeviceGuard(kType, made);
}

}  // namespace sim
