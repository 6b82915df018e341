// Every operator without a kernel of its own runs the CPU's, on tensors over the same memory.
//
// Results that are views come back on the storage they are views of; fresh ones are adopted. What a kernel resized is
// given back to the device's tensor. No bytes are copied.

#include "fallback.h"

#include "aliases.h"
#include "late.h"
#include "random.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <unordered_map>

namespace sim {
namespace {

using c10::IValue;

// What of an operator's schema every call needs.
struct Facts {
  c10::OperatorName name;
  bool draws_silently = false;   // random, without a generator among its arguments
  bool takes_host_indices = false;
  bool tells_host = false;       // returns numbers, so that the host waits
  std::vector<bool> written;     // per argument
  std::vector<int> returned;     // per return: the argument it is, or -1

  explicit Facts(const c10::OperatorHandle& op) : name(op.operator_name()) {
    const auto& schema = op.schema();
    bool has_generator = false;
    for (const auto& argument : schema.arguments()) {
      const auto* alias = argument.alias_info();
      written.push_back(alias != nullptr && alias->isWrite());
      has_generator = has_generator || argument.type()->str().find("Generator") != std::string::npos;
    }
    for (const auto& result : schema.returns()) {
      returned.push_back(argument_of(schema, result));
      const auto type = result.type()->str();
      tells_host = tells_host || type.find("Tensor") == std::string::npos;
    }
    draws_silently = !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
    const auto& name = schema.name();
    takes_host_indices = name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
        name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
  }

  static int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
    const auto* alias = result.alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      return -1;
    }
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }
};

const Facts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Facts> known;
  const auto* schema = &op.schema();
  auto found = known.find(schema);
  if (found == known.end() || found->second.name != op.operator_name()) {  // the address of one that was taken away
    found = known.insert_or_assign(schema, Facts(op)).first;
  }
  return found->second;
}

// Calls `visit(tensor)` for the tensors of a value.
template <class Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) {
        visit(element.toTensor());
      }
    }
  }
}

// One call: its arguments, the host tensors made for them, and the way back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), facts_(facts_of(op)), stack_(stack), first_(stack->size() - facts_.written.size()),
        arguments_(stack->begin() + static_cast<std::ptrdiff_t>(first_), stack->end()) {}

  void run() {
    find_device();
    check_alive(index_);
    late::use(index_);
    if (facts_.tells_host) {
      late::host_waits(clock_of(current_key(index_)));
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      to_host(i);
    }
    compute();
    for (const auto& [device, host] : written_) {
      give_back(device, host);
    }
    const auto start = stack_->size() - facts_.returned.size();
    for (size_t i = 0; i < facts_.returned.size(); ++i) {
      auto& value = (*stack_)[start + i];
      value = facts_.returned[i] >= 0 ? arguments_[static_cast<size_t>(facts_.returned[i])] : to_device(value);
    }
  }

 private:
  [[noreturn]] void refuse(const c10::Device& other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", name_of(index_),
        " and ", other, "! (in ", op_.schema().name(), ")");
  }

  // The device of the tensors, else the one that is asked for, else the current one. Raises for a mix.
  void find_device() {
    for (const auto& value : arguments_) {
      visit_tensors(value, [&](const at::Tensor& tensor) {
        if (is_sim(tensor)) {
          const auto index = tensor.device().index();
          if (index_ >= 0 && index != index_) {
            refuse(tensor.device());
          }
          index_ = index;
        }
      });
    }
    const bool from_tensors = index_ >= 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& value = arguments_[i];
      if (from_tensors) {
        const bool indices = facts_.takes_host_indices && value.isOptionalTensorList();
        visit_tensors(value, [&](const at::Tensor& tensor) {
          const bool allowed = !tensor.defined() || is_sim(tensor) || indices ||
              (tensor.is_cpu() && tensor.dim() == 0 && !facts_.written[i]);
          if (!allowed) {
            refuse(tensor.device());
          }
        });
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        index_ = checked(value.toDevice().index());
      }
    }
    if (index_ < 0) {
      index_ = current_device();
    }
  }

  at::Tensor host_of(const at::Tensor& tensor, bool written) {
    if (!is_sim(tensor)) {
      return tensor;
    }
    const auto& storage = tensor.storage();
    c10::Storage host;
    for (const auto& [device, alias] : storages_) {
      if (device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        host = alias;
        break;
      }
    }
    if (!host) {
      host = borrowed_storage(storage);
      storages_.emplace_back(storage, host);
    }
    auto made = over(std::move(host), tensor);
    if (written) {
      written_.emplace_back(tensor, made);
    }
    return made;
  }

  void to_host(size_t i) {
    const auto& value = arguments_[i];
    auto& place = (*stack_)[first_ + i];
    if (value.isTensor()) {
      place = host_of(value.toTensor(), facts_.written[i]);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      made.reserve(value.toListRef().size());
      for (const auto& element : value.toListRef()) {
        made.push_back(host_of(element.toTensor(), facts_.written[i]));
      }
      place = std::move(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const auto& element : value.toListRef()) {
        made.push_back(
            element.isNone() ? std::nullopt
                             : std::optional<at::Tensor>(host_of(element.toTensor(), facts_.written[i])));
      }
      place = std::move(made);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      place = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      place = host_generator(value.toGenerator());
    } else if (value.isNone() && takes_generator(i)) {
      place = host_generator(default_generator(index_));
    }
  }

  bool takes_generator(size_t i) const {
    const auto& type = op_.schema().arguments()[i].type();
    return type->kind() == c10::TypeKind::OptionalType &&
        type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  void compute() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastCPU));
    ChargeScope charge(index_);
    std::optional<RandomScope> random;
    if (facts_.draws_silently) {
      random.emplace(index_);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }

  // The storage of the device that a host storage of this call stands for.
  const c10::Storage* device_storage(const c10::Storage& host) const {
    for (const auto& [device, alias] : storages_) {
      if (alias.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
        return &device;
      }
    }
    return nullptr;
  }

  void give_back(const at::Tensor& device, const at::Tensor& host) const {
    auto* to = device.unsafeGetTensorImpl();
    const auto& storage = device.storage();
    if (const auto* known = device_storage(host.storage())) {
      if (known->unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
        to->set_storage_keep_dtype(*known);  // the kernel made it use another operand's memory
      }
    }
    if (host.storage().data() != storage.data() || host.storage().nbytes() != storage.nbytes()) {
      auto adopted = adopt(host.storage(), index_);
      auto* held = storage.unsafeGetStorageImpl();
      held->set_nbytes(adopted.nbytes());
      held->set_data_ptr_noswap(adopted.set_data_ptr(c10::DataPtr(nullptr, adopted.device())));
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
        host.storage_offset() != device.storage_offset()) {
      to->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  at::Tensor device_of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) {
      return tensor;
    }
    if (tensor.is_nested() || tensor.is_quantized() || tensor.layout() != at::kStrided) {
      refuse_kind(tensor.is_nested() ? "nested" : tensor.is_quantized() ? "quantized" : "sparse");
    }
    const auto& storage = tensor.storage();
    if (const auto* known = device_storage(storage)) {
      return over(*known, tensor);
    }
    auto adopted = adopt(storage, index_);
    storages_.emplace_back(adopted, storage);
    return over(std::move(adopted), tensor);
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) {
      return device_of(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& element : value.toListRef()) {
        made.push_back(device_of(element.toTensor()));
      }
      return made;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const Facts& facts_;
  torch::jit::Stack* stack_;
  size_t first_;
  std::vector<IValue> arguments_;
  c10::DeviceIndex index_ = -1;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 6> storages_;  // device's, host's
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> written_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

}  // namespace

void route_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto op = dispatcher.findOp(name);
    const bool composed = op &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional));
    if (!composed || name.getNamespace() != "aten" || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    static auto* kept = new std::vector<c10::RegistrationHandleRAII>();
    kept->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt,
        nullptr, "the CPU's kernel rather than a composed one"));
  }
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}
