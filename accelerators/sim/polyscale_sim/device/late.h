// Late work: writes whose destination holds NaN until whoever reads it has waited.
//
// A late write belongs to a stream and has a number. It is executed when an operation that is ordered behind it starts,
// and published to the host (where its destination is host memory) only when the host waits. Destinations and sources
// on the device are held weakly, so that lateness changes no memory figure.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <atomic>

namespace sim::late {

void set_enabled(bool on);  // off: delivers everything first
bool enabled() noexcept;

// Queues `to.copy_(from)` on a stream and fills `to` with NaN. Device tensors, or pinned host ones.
void write(const at::Tensor& to, const at::Tensor& from, const StreamKey& stream);

// An operation of the current stream of `index` starts now.
void use(c10::DeviceIndex index);
// The same, reading this host memory.
void use_host_memory(c10::DeviceIndex index, const at::Tensor& read);
void host_waits(const Clock& clock);
void host_waits_for_device(c10::DeviceIndex index);
bool query(const Clock& clock);  // whether all is done; what is not is done by the next query

// A block is about to be freed / is used on another stream than that of its allocation.
void freed(void* data, c10::DeviceIndex index, c10::StreamId stream);
void record_stream(void* data, const c10::Stream& stream);

}  // namespace sim::late
