// The current device, and each device's random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace sim {

constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex current_device();
// Returns the device that was current; throws for an index that does not exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

const at::Generator& default_generator(c10::DeviceIndex device);
// The host generator that draws a device generator's numbers: kernels run on the host here.
at::Generator host_generator(const at::Generator& generator);

}  // namespace sim
