// What Python sees of the device: accelz_sim._C.
#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "device.h"
#include "memory.h"
#include "streams.h"

namespace py = pybind11;

// Python's lock is given up wherever queued work may run: that work, or what it frees, may need it.
using Unlocked = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(_C, m) {
  m.attr("DEVICES") = int(sim::kDevices);
  m.def("current_device", [] { return int(sim::current_device()); });
  m.def("exchange_device", [](int device) { return int(sim::exchange_device(device)); });
  m.def("default_generator", [](int device) { return sim::default_generator(device); });

  m.def("counters", [](int device) {
    const auto now = sim::counters(device);
    return std::make_tuple(now.allocated, now.peak, now.capacity);
  });
  m.def("reset_peak", [](int device) { sim::reset_peak(device); });
  m.def("set_capacity", [](int device, size_t nbytes) { sim::set_capacity(device, nbytes); });
  m.def("fail_allocation", &sim::fail_allocation);

  py::class_<sim::Event, sim::EventPtr>(m, "Event")
      .def_property_readonly("passed", [](const sim::Event& event) { return event.passed.load(); })
      .def_property_readonly("seconds", [](const sim::Event& event) {
        return std::chrono::duration<double>(event.when.time_since_epoch()).count();
      });
  m.def("current_stream", [](int device) { return sim::current_stream(device); });
  m.def("exchange_stream", [](int device, int64_t stream) {
    return sim::exchange_stream(device, stream);
  });
  m.def("new_stream", &sim::new_stream);
  m.def("set_delays", &sim::set_delays, Unlocked());
  m.def("record", &sim::record, Unlocked());
  m.def("wait", &sim::wait, Unlocked());
  m.def("synchronize", [] { sim::synchronize(); }, Unlocked());
  m.def("synchronize_event", [](const sim::EventPtr& event) { sim::synchronize(event); }, Unlocked());
  m.def("keep_alive", [](const at::Tensor& tensor, int64_t stream) {
    sim::submit_behind(stream, [storage = tensor.storage()] {});
  });
}
