// One generator per device. Its numbers are those of the host's generator with the same seed.
#pragma once

#include "devices.h"

#include <ATen/core/Generator.h>

#include <mutex>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The host generator inside one of ours.
at::Generator host_generator(const at::Generator& generator);

// For operators that draw from the host's default generator without asking for one: in this scope it continues the
// device's sequence, and afterwards its own.
struct RandomScope {
  explicit RandomScope(c10::DeviceIndex index);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  void exchange();
  std::unique_lock<std::mutex> lock_;
  c10::DeviceIndex index_;
};

}  // namespace sim
