// The driver API, as far as accelz_cuda calls it, over the kernels that this library was built
// with.
#include <string>

#include "host_cuda.h"

namespace {
std::string last_image;
int launches_without_context = 0;  // how many launches still fail for want of a context
int contexts_entered = 0;
constexpr int kInvalidContext = 201, kNotFound = 500, kInvalidValue = 1;
}  // namespace

extern "C" {

unsigned long argument_size(const char* name) { return host::entries().at(name).size; }

void leave_context(int launches) { launches_without_context = launches; }

int entered() { return contexts_entered; }

int cuGetErrorName(int error, const char** name) {
  *name = error == kNotFound       ? "CUDA_ERROR_NOT_FOUND"
          : error == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
                                   : nullptr;
  return 0;
}

int cuLibraryLoadData(void** library, const void* image, void*, void*, unsigned, void*, void*,
                      unsigned) {
  last_image = static_cast<const char*>(image);
  *library = &last_image;
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  const auto found = host::entries().find(name);
  if (library != &last_image || found == host::entries().end()) return kNotFound;
  *kernel = &found->second;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &contexts_entered;
  return 0;
}

int cuCtxSetCurrent(void* context) {
  contexts_entered += context == &contexts_entered;
  return 0;
}

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void*, void** parameters,
                   void** extra) {
  if (launches_without_context > 0) {
    --launches_without_context;
    return kInvalidContext;
  }
  const bool fits =
      x > 0 && y == 1 && z == 1 && block_x == host::kThreads && block_y == 1 && block_z == 1;
  if (!fits || shared != 0 || extra != nullptr) return kInvalidValue;
  static_cast<const host::Entry*>(kernel)->run(parameters[0], x);
  return 0;
}

}  // extern "C"
