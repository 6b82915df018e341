#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace sim {
namespace {

// A generator of the device: a host generator with another device in its name.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex index, at::Generator host)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), host.clone());
  }

  at::Generator host;
};

at::CPUGeneratorImpl* implementation(const at::Generator& host) {
  return at::check_generator<at::CPUGeneratorImpl>(host);
}

std::mutex& exchanging() {
  static auto* made = new std::mutex();
  return *made;
}

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(checked(index), at::make_generator<at::CPUGeneratorImpl>());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(new_generator(i));
    }
    return made;
  }();
  return (*all)[static_cast<size_t>(checked(index))];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a generator of device type ", c10::DeviceTypeName(kType, true),
      " but found one of ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

RandomScope::RandomScope(c10::DeviceIndex index) : lock_(exchanging()), index_(index) {
  exchange();
}

RandomScope::~RandomScope() {
  exchange();
}

void RandomScope::exchange() {
  auto* host = implementation(at::detail::getDefaultCPUGenerator());
  const auto held = host_generator(default_generator(index_));
  auto* device = implementation(held);
  const auto engine = host->engine();
  const auto float_sample = host->next_float_normal_sample();
  const auto double_sample = host->next_double_normal_sample();
  host->set_engine(device->engine());
  host->set_next_float_normal_sample(device->next_float_normal_sample());
  host->set_next_double_normal_sample(device->next_double_normal_sample());
  device->set_engine(engine);
  device->set_next_float_normal_sample(float_sample);
  device->set_next_double_normal_sample(double_sample);
}

}  // namespace sim
