// Compute: every operation without a kernel of its own runs on the host, over the device's memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// A host tensor over a device tensor's memory. It does not keep that memory alive, just as a kernel
// launched on a real device does not. Throws if the tensor's storage has been resized away.
at::Tensor host_alias(const at::Tensor& tensor);

// Run the operation on the current stream of its tensors' device.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
