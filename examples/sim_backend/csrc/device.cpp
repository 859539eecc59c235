#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <memory>
#include <utility>

#include "memory.h"
#include "streams.h"

namespace sim {
namespace {

thread_local c10::DeviceIndex current = 0;

// A device's generator: a host generator under the device's name.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return impl().seed(); }
  void set_offset(uint64_t offset) override { impl().set_offset(offset); }
  uint64_t get_offset() const override { return impl().get_offset(); }
  void set_state(const c10::TensorImpl& state) override { impl().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl().get_state(); }

  // The state itself, not a copy: its holder goes on drawing from it.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<Generator*>(state.get());
    TORCH_CHECK(other != nullptr, "expected the state of a generator of a sim device");
    host = other->host;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(device().index(), host);
  }

  at::Generator host;

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
  c10::GeneratorImpl& impl() const { return *host.unsafeGetGeneratorImpl(); }
};

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device,
                                       at::detail::createCPUGenerator());
}

// A device without an index is the current one.
c10::Device numbered(c10::Device device) {
  return device.has_index() ? device : c10::Device(kType, current_device());
}

c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, numbered(device), id);
}

EventPtr& event_at(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_stream(numbered(device).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device, new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(device, new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return sim::record(stream.id())->passed; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr;
    event_at(*event) = sim::record(stream.id());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream.id(), event_at(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || event_at(event)->passed; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(event_at(event));
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto span = event_at(to)->when - event_at(from)->when;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {kType, device_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::DeviceIndex current_device() { return current; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no device sim:", int(device),
              "; there are sim:0 to sim:", int(kDevices) - 1);
  return std::exchange(current, device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kDevices>{make_generator(0), make_generator(1)};
  return generators->at(device);
}

at::Generator host_generator(const at::Generator& generator) {
  auto* impl = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "expected a generator of a sim device, got one of ",
              generator.device());
  return impl->host;
}

}  // namespace sim
