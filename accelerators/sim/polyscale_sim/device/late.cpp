#include "late.h"

#include "aliases.h"
#include "devices.h"

#include <ATen/ops/empty_like.h>

#include <list>
#include <mutex>
#include <optional>
#include <set>

namespace sim::late {
namespace {

// A tensor whose memory is not kept alive: views of it are made on the host while the storage lives.
struct WeakTensor {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  void* base;
  Geometry geometry;

  explicit WeakTensor(const at::Tensor& tensor)
      : storage(tensor.storage().getWeakStorageImpl()), base(tensor.storage().mutable_data()), geometry(tensor) {}

  // Undefined when the storage is gone, or has other memory than it had.
  at::Tensor on_host() const {
    auto held = storage.lock();
    if (!held || held->mutable_data() != base) {
      return {};
    }
    return geometry.view_of(shared_storage(c10::Storage(std::move(held))));
  }
};

struct Write {
  StreamKey stream;
  uint64_t number;
  bool to_host;
  WeakTensor to;
  at::Tensor from;                       // host memory: read when the write is executed
  std::optional<WeakTensor> from_device; // device memory, if it is from there
  at::Tensor staged;                     // what a copy to the host read on the device
  bool lost = false;                     // the source was freed too early

  at::Tensor source() const {
    return from_device ? from_device->on_host() : from;
  }
  // Reads the source; writes the destination unless only the host's waiting may show it.
  void execute() {
    if (lost || staged.defined()) {
      return;
    }
    if (!to_host) {
      publish();
      return;
    }
    auto read = source();
    lost = !read.defined();
    if (!lost) {
      staged = read.clone();
    }
  }
  void publish() {
    auto target = to.on_host();
    auto read = staged.defined() ? staged : source();
    if (!lost && target.defined() && read.defined()) {
      target.copy_(read);
    }
  }
};

struct Queue {
  std::recursive_mutex mutex;  // copies may free memory, which comes back here
  std::list<Write> writes;     // in order of their numbers
  std::map<void*, std::set<StreamKey>> recorded;
};

Queue& queue() {
  static auto* made = new Queue();
  return *made;
}

std::atomic<bool> on{false};
std::atomic<int64_t> pending{0};

bool idle() noexcept {
  return pending.load(std::memory_order_acquire) == 0;
}

std::list<Write>::iterator finish(std::list<Write>::iterator at) {
  auto next = queue().writes.erase(at);
  pending--;
  return next;
}

void fill_with_nan(const at::Tensor& tensor) {
  static constexpr std::array<std::pair<size_t, at::ScalarType>, 4> integers{
      {{1, at::kChar}, {2, at::kShort}, {4, at::kInt}, {8, at::kLong}}};
  if (tensor.scalar_type() == at::kBool) {
    tensor.fill_(true);
    return;
  }
  for (const auto& [size, type] : integers) {
    if (tensor.element_size() == size) {
      Geometry bits(tensor);
      bits.dtype = c10::scalarTypeToTypeMeta(type);
      bits.view_of(tensor.storage()).fill_(-1);
      return;
    }
  }
  tensor.fill_(std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

bool enabled() noexcept {
  return on.load(std::memory_order_relaxed);
}

void set_enabled(bool value) {
  on = value;
  if (!value) {
    std::lock_guard<std::recursive_mutex> lock(queue().mutex);
    auto& writes = queue().writes;
    for (auto at = writes.begin(); at != writes.end(); at = finish(at)) {
      at->publish();
    }
    queue().recorded.clear();
  }
}

void write(const at::Tensor& to, const at::Tensor& from, const StreamKey& stream) {
  std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  const bool from_device = is_sim(from);
  Write made{
      stream,
      next_number(),
      !is_sim(to),
      WeakTensor(to),
      from_device ? at::Tensor() : from,
      from_device ? std::optional<WeakTensor>(WeakTensor(from)) : std::nullopt,
      {}};
  fill_with_nan(made.to.on_host());
  queue().writes.push_back(std::move(made));
  pending++;
}

void use(c10::DeviceIndex index) {
  if (idle()) {
    return;
  }
  const auto clock = clock_of(current_key(index));
  std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  auto& writes = queue().writes;
  for (auto at = writes.begin(); at != writes.end();) {
    if (!covers(clock, at->stream, at->number)) {
      ++at;
      continue;
    }
    at->execute();
    at = at->to_host ? std::next(at) : finish(at);
  }
}

void use_host_memory(c10::DeviceIndex index, const at::Tensor& read) {
  use(index);
  if (idle()) {
    return;
  }
  const auto clock = clock_of(current_key(index));
  std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  auto& writes = queue().writes;
  for (auto at = writes.begin(); at != writes.end();) {
    const bool same = at->to_host && at->to.base == read.storage().data();
    if (same && covers(clock, at->stream, at->number)) {
      at->publish();
      at = finish(at);
    } else {
      ++at;
    }
  }
}

void host_waits(const Clock& clock) {
  if (idle()) {
    return;
  }
  std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  auto& writes = queue().writes;
  for (auto at = writes.begin(); at != writes.end();) {
    if (covers(clock, at->stream, at->number)) {
      at->publish();
      at = finish(at);
    } else {
      ++at;
    }
  }
}

void host_waits_for_device(c10::DeviceIndex index) {
  if (idle()) {
    return;
  }
  Clock clock;
  {
    std::lock_guard<std::recursive_mutex> lock(queue().mutex);
    for (const auto& queued : queue().writes) {
      if (queued.stream.first == index) {
        for (const auto& [other, number] : clock_of(queued.stream)) {
          clock[other] = std::max(clock[other], number);
        }
      }
    }
  }
  host_waits(clock);
}

bool query(const Clock& clock) {
  if (idle()) {
    return true;
  }
  bool done = true;
  {
    std::lock_guard<std::recursive_mutex> lock(queue().mutex);
    for (const auto& queued : queue().writes) {
      done = done && !covers(clock, queued.stream, queued.number);
    }
  }
  host_waits(clock);
  return done;
}

void freed(void* data, c10::DeviceIndex index, c10::StreamId stream) {
  if (!enabled() && idle()) {
    return;
  }
  std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  auto allowed = std::move(queue().recorded[data]);
  queue().recorded.erase(data);
  allowed.insert({index, stream});
  for (auto& queued : queue().writes) {
    if (!queued.from_device || queued.from_device->base != data || queued.staged.defined() || queued.lost) {
      continue;
    }
    queued.lost = allowed.count(queued.stream) == 0;  // memory may be reused as soon as its own stream goes on
    if (!queued.lost) {
      queued.staged = queued.from_device->geometry.view_of_memory(data).clone();
    }
  }
}

void record_stream(void* data, const c10::Stream& stream) {
  if (enabled()) {
    std::lock_guard<std::recursive_mutex> lock(queue().mutex);
    queue().recorded[data].insert(key_of(stream));
  }
}

}  // namespace sim::late
