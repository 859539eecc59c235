// accelz_sim._C: what Python sees of the device beyond torch's own view of it.
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "memory.h"
#include "streams.h"

namespace py = pybind11;

// The GIL is released wherever queued work may run: that work, or what it frees, may need it.
using Unlocked = py::call_guard<py::gil_scoped_release>;

// As torch's own graphs, of the current device.
struct CapturedGraph {
  void capture_begin() { sim::begin_capture(sim::current_device()); }
  void capture_end() { recorded = sim::end_capture(); }
  void replay() {
    TORCH_CHECK(recorded, "nothing has been captured");
    sim::replay(recorded);
  }
  sim::GraphPtr recorded;
};

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

  m.def("set_delays", &sim::set_delays, Unlocked());
  m.def("set_late", &sim::set_late, Unlocked());
  m.def("synchronize", [] { sim::synchronize(); }, Unlocked());

  py::class_<CapturedGraph>(m, "Graph")
      .def(py::init())
      .def("capture_begin", &CapturedGraph::capture_begin)
      .def("capture_end", &CapturedGraph::capture_end)
      .def("replay", &CapturedGraph::replay, Unlocked());
}
