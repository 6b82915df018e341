// Streams and events. Work is done when it is queued; streams and events only say what is ordered before what.
//
// Each stream has a vector clock: for every other stream, up to which number its late work is ordered before this
// stream's next operation. An event is a copy of a stream's clock; waiting for it merges the copy.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <utility>

namespace sim {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<StreamKey, uint64_t>;

inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

// The current stream of this thread on a device; 0 is the device's default one.
c10::StreamId current_stream(c10::DeviceIndex index) noexcept;
inline StreamKey current_key(c10::DeviceIndex index) noexcept {
  return {index, current_stream(index)};
}

// Numbers of late work, over all streams.
uint64_t next_number();
// What is ordered before the next operation of a stream, its own work included.
Clock clock_of(const StreamKey& stream);
// Orders all of `clock` before the next operation of `stream`.
void merge(const StreamKey& stream, const Clock& clock);
bool covers(const Clock& clock, const StreamKey& stream, uint64_t number);

void install_guard();

}  // namespace sim
