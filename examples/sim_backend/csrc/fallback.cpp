#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "streams.h"

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Host kernels run below autograd and autocast, which have been handled on the device's side.
struct HostScope {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast{c10::autocast_dispatch_keyset};
};

// The value with every tensor in it, including those in lists, replaced by change(tensor).
template <typename Change>
IValue map_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_view(const c10::Argument& result) {
  return result.alias_info() != nullptr && !result.alias_info()->isWrite();
}

bool takes_generator(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
}

// One operation on its way to the host.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<IValue> given;  // the arguments as they came, on the device
  Stack host = {};            // the arguments for the host; after the run, its results
  c10::Device device = {kType, -1};
  bool random = false;
  // The operation may resize empty tensors that it writes to, but a host kernel cannot resize device
  // memory. So it gets a host tensor instead, whose result is then copied.
  std::vector<std::pair<at::Tensor, at::Tensor>> resizable = {};

  const std::vector<c10::Argument>& arguments() const { return op.schema().arguments(); }
  const std::vector<c10::Argument>& returns() const { return op.schema().returns(); }
};

void check_same(const c10::OperatorHandle& op, c10::Device device, const at::Tensor& other) {
  TORCH_CHECK(other.device() == device, op.schema().operator_name(),
              ": expected all tensors to be on the same device, but found at least two devices, ",
              device, " and ", other.device());
}

// Find the device to run on, which all tensors must share. A host tensor of one value counts as a
// number, and indices may be on the host.
void find_device(Call& call) {
  for (const auto& value : call.given) {
    if (value.isDevice()) call.device = value.toDevice();
  }
  const auto look = [&](const at::Tensor& tensor) {
    if (call.device.index() < 0 && on_device(tensor)) call.device = tensor.device();
    return tensor;
  };
  const auto check = [&](const at::Tensor& tensor) {
    const bool number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
    if (tensor.defined() && !number) check_same(call.op, call.device, tensor);
    return tensor;
  };
  for (const auto& value : call.given) map_tensors(value, look);
  if (call.device.index() < 0) call.device = {kType, current_device()};
  for (const auto& value : call.given) {
    if (!value.isOptionalTensorList()) map_tensors(value, check);
  }
}

at::Tensor host_copy(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

at::Tensor host_argument(Call& call, const at::Tensor& tensor, bool written, bool later) {
  if (!tensor.defined()) return tensor;
  if (!on_device(tensor)) return later ? host_copy(tensor) : tensor;
  if (!written || tensor.numel() > 0) return host_alias(tensor);
  auto target = at::empty({0}, tensor.options().device(c10::kCPU));
  if (tensor.dim() != 1) target.resize_(tensor.sizes());
  call.resizable.emplace_back(tensor, target);
  return target;
}

IValue host_generator_for(const Call& call, const IValue& given) {
  return host_generator(given.isGenerator() ? given.toGenerator()
                                            : default_generator(call.device.index()));
}

void prepare(Call& call) {
  find_device(call);
  const bool later = delayed(call.device.index());
  for (size_t i = 0; i < call.given.size(); ++i) {
    const auto& argument = call.arguments()[i];
    const auto& value = call.given[i];
    if (value.isDevice()) {
      call.host.emplace_back(c10::Device(c10::kCPU));
    } else if (takes_generator(argument)) {
      call.random = true;
      call.host.push_back(host_generator_for(call, value));
    } else {
      call.host.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
        return host_argument(call, tensor, writes(argument), later);
      }));
    }
  }
}

// A device tensor for a host result. Strides are kept if they are dense.
at::Tensor empty_for(const at::Tensor& result, c10::Device device) {
  const auto options = result.options().device(device);
  if (result.is_non_overlapping_and_dense()) {
    return at::empty_strided(result.sizes(), result.strides(), options);
  }
  return at::empty(result.sizes(), options);
}

at::Tensor uploaded(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) return result;
  auto output = empty_for(result, device);
  host_alias(output).copy_(result);
  return output;
}

const IValue& written_argument(const Call& call, const c10::Argument& result) {
  for (size_t i = 0; i < call.given.size(); ++i) {
    const auto* info = call.arguments()[i].alias_info();
    if (info != nullptr && *info == *result.alias_info()) return call.given[i];
  }
  TORCH_CHECK(false, call.op.schema(), ": no argument goes with the result ", result);
}

// The view of the device tensor that equals the host kernel's view, which lies in the first argument.
at::Tensor device_view(const Call& call, const at::Tensor& view) {
  const auto& base = call.given.at(0).toTensor();
  TORCH_CHECK(view.dtype() == base.dtype(), call.op.schema().operator_name(),
              " is a view in another dtype, which sim does not have");
  const auto offset = base.storage_offset() + view.storage_offset();
  return base.as_strided(view.sizes(), view.strides(), offset);
}

IValue device_result(const Call& call, const c10::Argument& result, const IValue& value) {
  if (writes(result)) return written_argument(call, result);
  return map_tensors(value, [&](const at::Tensor& tensor) {
    return is_view(result) ? device_view(call, tensor) : uploaded(tensor, call.device);
  });
}

// The host's kernel. The arguments are held meanwhile: torch 2.11 drops those of zero_ before it takes the
// result, which is one of them, so the stack must not have the last reference.
void call_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const Stack held = *stack;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void run_now(Call& call, Stack* stack) {
  {
    const HostScope scope;
    call_on_host(call.op, &call.host);
    for (const auto& [tensor, result] : call.resizable) {
      tensor.resize_(result.sizes());
      host_alias(tensor).copy_(result);
    }
  }
  for (size_t i = 0; i < call.returns().size(); ++i) {
    stack->push_back(device_result(call, call.returns()[i], call.host.at(i)));
  }
}

at::Tensor meta_copy(const at::Tensor& tensor) {
  if (!tensor.defined() || (!on_device(tensor) && tensor.dim() == 0)) return tensor;
  const auto options = tensor.options().device(c10::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// Norms give their statistics in the dtype of their weights on the host, and always wide on meta tensors.
at::Tensor host_dtype(const Call& call, size_t index, const at::Tensor& promised) {
  const auto& name = call.op.schema().name();
  const bool norm = name == "aten::native_layer_norm" || name == "aten::native_group_norm";
  if (!norm || index == 0) return promised;
  auto dtype = call.given[0].toTensor().scalar_type();
  for (const auto& value : call.given) {
    if (value.isTensor() && value.toTensor().defined()) dtype = value.toTensor().scalar_type();
  }
  return promised.to(dtype);
}

// The operation's results on meta tensors; nullopt if only running it can tell their shapes.
std::optional<Stack> meta_results(const Call& call) {
  Stack results;
  for (const auto& value : call.given) {
    results.push_back(value.isDevice() ? IValue(c10::Device(c10::kMeta))
                                       : map_tensors(value, meta_copy));
  }
  try {
    const HostScope scope;
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].isTensor() && !results[i].isTensorList()) return std::nullopt;
    results[i] = map_tensors(results[i], [&](const at::Tensor& tensor) {
      return tensor.defined() ? host_dtype(call, i, tensor) : tensor;
    });
  }
  return results;
}

// All that the shapes of the results depend on; nullopt where that may be the value of a number.
std::optional<std::string> question(const Call& call) {
  std::ostringstream key;
  bool numbers = false;
  key << call.op.schema().operator_name() << at::get_default_dtype();
  for (const auto& value : call.given) {
    key << '|';
    if (!value.isTensor() && !value.isTensorList() && !value.isOptionalTensorList()) {
      key << value;
      continue;
    }
    if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) key << (tensor ? '+' : '-');
    }
    map_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      numbers = numbers || (!on_device(tensor) && tensor.dim() == 0);
      key << tensor.sizes() << tensor.strides() << tensor.scalar_type();
      return tensor;
    });
  }
  return numbers ? std::nullopt : std::optional(key.str());
}

// The same, asked once: many meta kernels are Python, and take longer than small operations themselves.
std::optional<Stack> remembered_meta_results(const Call& call) {
  constexpr size_t kMost = 4096;
  static std::mutex mutex;
  static auto& answers = *new std::unordered_map<std::string, std::optional<Stack>>();
  const auto key = question(call);
  if (!key) return meta_results(call);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = answers.find(*key); found != answers.end()) return found->second;
  }
  auto results = meta_results(call);
  const std::lock_guard lock(mutex);
  if (answers.size() >= kMost) answers.clear();
  answers.emplace(*key, results);
  return results;
}

// Results of the right shape, not filled yet; nullopt if only running the operation can tell the shape.
std::optional<Stack> promise(const Call& call) {
  auto results = remembered_meta_results(call);
  if (!results) return std::nullopt;
  for (auto& result : *results) {
    result = map_tensors(result, [&](const at::Tensor& tensor) {
      return tensor.defined() ? empty_for(tensor, call.device) : tensor;
    });
  }
  return results;
}

// Resize the empty tensors that the operation writes to before it runs. Returns false if only running it can
// tell their shapes.
bool resize_now(Call& call) {
  if (call.resizable.empty()) return true;
  const auto results = remembered_meta_results(call);
  if (!results) return false;
  for (size_t i = 0; i < call.returns().size(); ++i) {
    const auto& result = results->at(i);
    if (!writes(call.returns()[i]) || !result.isTensor()) return false;
    const auto& written = written_argument(call, call.returns()[i]).toTensor();
    if (written.numel() > 0) continue;
    if (!result.toTensor().is_contiguous()) return false;
    written.resize_(result.toTensor().sizes());
  }
  call.host.clear();
  call.resizable.clear();
  prepare(call);
  return call.resizable.empty();
}

// Queue the call and promise its results. Returns false if it has to run now.
bool run_later(Call& call, Stack* stack) {
  if (call.random || !resize_now(call)) return false;
  Stack results;
  std::vector<at::Tensor> outputs;
  bool in_place = true;
  for (const auto& result : call.returns()) {
    in_place = in_place && writes(result);
    if (in_place) results.push_back(written_argument(call, result));
  }
  if (!in_place) {
    auto promised = promise(call);
    if (!promised) return false;
    results = std::move(*promised);
    for (const auto& result : results) {
      map_tensors(result, [&](const at::Tensor& tensor) {
        if (tensor.defined()) outputs.push_back(host_alias(tensor));
        return tensor;
      });
    }
  }
  submit(call.device.index(), [op = call.op, host = std::move(call.host), outputs]() mutable {
    const HostScope scope;
    call_on_host(op, &host);
    size_t next = 0;
    if (outputs.empty()) return;
    for (const auto& value : host) {
      map_tensors(value, [&](const at::Tensor& tensor) {
        if (tensor.defined()) outputs.at(next++).copy_(tensor);
        return tensor;
      });
    }
  });
  for (auto& result : results) stack->push_back(std::move(result));
  return true;
}

bool only_views(const Call& call) {
  bool views = !call.returns().empty();
  for (const auto& result : call.returns()) views = views && is_view(result);
  return views;
}

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  const auto itemsize = tensor.dtype().itemsize();
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), itemsize,
                                                       tensor.storage_offset());
  TORCH_CHECK(tensor.numel() == 0 || storage.nbytes() >= needed, "a tensor of shape ",
              tensor.sizes(), " on ", tensor.device(), " has no memory behind it: its storage holds ",
              storage.nbytes(), " bytes, it needs ", needed,
              ". Grow the storage again before reading or writing it");
  auto* start = static_cast<char*>(storage.mutable_data());
  if (tensor.numel() > 0) start += tensor.storage_offset() * itemsize;
  const auto options = tensor.options().device(c10::kCPU);
  return at::for_blob(start, tensor.sizes()).strides(tensor.strides()).options(options).make_tensor();
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  Call call{op, given.vec()};
  torch::jit::drop(*stack, count);
  prepare(call);
  if (delayed(call.device.index()) && !only_views(call)) {
    if (run_later(call, stack)) return;
    synchronize(current_stream(call.device.index()));
  }
  run_now(call, stack);
}

// torch has decompositions for these that would take precedence over the fallback. They round otherwise
// than the host's kernels, or make them resize a result that exists already.
constexpr const char* kNotDecomposed[] = {
    "native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr",
    "mse_loss",          "smooth_l1_loss"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : kNotDecomposed) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace sim
