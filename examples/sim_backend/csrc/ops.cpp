// The operations that cannot run on the host: creating, viewing and copying tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "device.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device checked(std::optional<c10::Device> device, std::optional<c10::Layout> layout,
                    std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only host memory can be pinned");
  return c10::device_or_default(device);
}

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(checked(device, layout, pinned));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                     std::optional<bool> pinned) {
  const c10::DeviceGuard guard(checked(device, layout, pinned));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Growing a tensor copies its content, so the work that computes it must be done first.
void settle(const Tensor& tensor) {
  if (tensor.storage().nbytes() > 0) synchronize(current_stream(tensor.device().index()));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  settle(self);
  return at::native::resize_(self, size, format);
}

Tensor& set_storage_(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size,
                     IntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  settle(self);
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_whole_storage_(Tensor& self, c10::Storage source) {
  return at::native::set_(self, std::move(source));
}

Tensor& set_to_tensor_(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_to_nothing_(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return self.set_(storage, 0, {0}, {});
}

// Copies. Between devices and from pageable host memory the host waits, as it does on real devices.

void copy_on_device(const Tensor& source, const Tensor& target) {
  const auto device = target.device().index();
  const auto from = host_alias(source), to = host_alias(target);
  if (source.device() == target.device()) {
    submit(device, [=] { to.copy_(from); });
    return;
  }
  synchronize(current_stream(source.device().index()));
  synchronize(current_stream(device));
  to.copy_(from);
}

void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto device = target.device().index();
  const auto to = host_alias(target);
  const bool pinned = non_blocking && is_pinned(source.storage().data());
  const auto from = pinned || !delayed(device) ? source : source.clone();
  submit(device, [=] { to.copy_(from); });
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto device = source.device().index();
  const auto from = host_alias(source);
  if (non_blocking && is_pinned(target.storage().data())) {
    submit(device, [=] { target.copy_(from); });
    return;
  }
  synchronize(current_stream(device));
  target.copy_(from);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (source.is_cpu()) {
    copy_to_device(source, target, non_blocking);
  } else if (target.is_cpu()) {
    copy_to_host(source, target, non_blocking);
  } else {
    TORCH_CHECK(source.device().type() == kType && target.device().type() == kType,
                "sim copies to and from the host only, not from ", source.device(), " to ",
                target.device());
    copy_on_device(source, target);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar(const Tensor& self) {
  settle(self);
  return at::_local_scalar_dense(host_alias(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  note_use(self.storage().data(), stream.id());
}

// torch calls fused dropout on devices that are not its own, without a generator to draw from.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const bool drops = train.value_or(true);
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  mask.bernoulli_(drops ? 1 - p : 1);
  const double scale = !drops ? 1 : p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// It also calls these two, in place of convolution and its gradient.

const c10::OperatorHandle& operation(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return found.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, ""))
      .first->second;
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_on_host(operation("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto gradient = arguments[0].toTensor();
  const c10::List<int64_t> bias_sizes({gradient.size(1)});
  stack->insert(stack->end() - static_cast<int64_t>(arguments.size()) + 3, bias_sizes);
  run_on_host(operation("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage_);
  library.impl("set_.source_Storage", set_whole_storage_);
  library.impl("set_.source_Tensor", set_to_tensor_);
  library.impl("set_", set_to_nothing_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace sim
