// Chapter: devices
// The functions Python calls. Whatever may wait for the device lets go of the
// interpreter lock first: an engine may need it to drop the last reference to
// a tensor, and would wait for us while we wait for it.
// [streams: include-trace]
#include <c10/core/impl/GPUTrace.h>
// [/streams: include-trace]
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "openreg/csrc/device.h"
#include "openreg/csrc/module.h"

namespace py = pybind11;

namespace {

// [devices: properties]
orDeviceProp properties(int device) {
  orDeviceProp result;
  openreg::check(orGetDeviceProperties(&result, device));
  return result;
}

std::string describe(const orDeviceProp& device) {
  return "_DeviceProperties(name='" + std::string(device.name) +
         "', total_memory=" + std::to_string(device.total_memory >> 20) +
         "MiB, compute_engines=" + std::to_string(device.compute_engines) +
         ", copy_engines=" + std::to_string(device.copy_engines) + ")";
}

void bindProperties(py::module_& m) {
  py::class_<orDeviceProp>(m, "_DeviceProperties")
      .def_property_readonly(
          "name", [](const orDeviceProp& self) { return self.name; })
      .def_readonly("total_memory", &orDeviceProp::total_memory)
      .def_readonly("compute_engines", &orDeviceProp::compute_engines)
      .def_readonly("copy_engines", &orDeviceProp::copy_engines)
      .def_readonly("major", &orDeviceProp::major)
      .def_readonly("minor", &orDeviceProp::minor)
      .def("__repr__", &describe);
  m.def("get_device_properties", &properties);
}
// [/devices: properties]

// [devices: state]
bool isStarted(int device) {
  int started = 0;
  openreg::check(orDeviceGetState(device, &started));
  return started != 0;
}

// Whether any device has started, whoever started it: Python, C++ or the chip's
// own API. A fork has started none.
bool isInitialized() {
  for (int device = 0; device < openreg::deviceCount(); ++device) {
    int started = 0;
    if (orDeviceGetState(device, &started) == orSuccess && started != 0) {
      return true;
    }
  }
  return false;
}

bool isInBadFork() {
  int started = 0;
  return orDeviceGetState(0, &started) == orErrorForked;
}
// [/devices: state]

// [devices: translate]
// pybind11 alone would make a RuntimeError of every C++ exception, with the C++
// stack in its message. PyTorch's own translation knows the right class.
void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  }
}
// [/devices: translate]

// [guards: synchronize]
void synchronize(int device) {
  const c10::DeviceIndex previous = openreg::currentDevice();
  // Not as a c10::DeviceIndex: that has 8 bits, and 257 would become 1.
  if (device >= 0) { // as in torch.cuda, a negative index changes nothing
    openreg::check(orSetDevice(device));
  }
  const orError error = orDeviceSynchronize();
  orSetDevice(previous); // keeps the message of `error`
  openreg::check(error);
  // [streams: trace-synchronize]
  if (const auto* trace = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    (*trace)->trace_gpu_device_synchronization(c10::kPrivateUse1);
  }
  // [/streams: trace-synchronize]
}
// [/guards: synchronize]

} // namespace

// [devices: module]
PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&translate);
  m.def("device_count", [] {
    int count = 0; // asked directly: here there is somebody to tell
    openreg::check(orGetDeviceCount(&count));
    return count;
  });
  m.def("current_device", &openreg::currentDevice);
  m.def("set_device", [](int index) { openreg::check(orSetDevice(index)); });
  m.def("init", [] { openreg::check(orInit()); });
  m.def("is_started", &isStarted);
  m.def("is_initialized", &isInitialized);
  m.def("is_in_bad_fork", &isInBadFork);
  // For Python code that calls the driver by itself, through ctypes.
  m.def("check", [](int code) { openreg::check(static_cast<orError>(code)); });
  bindProperties(m);
  // [guards: bind-synchronize]
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  // [/guards: bind-synchronize]
  // [streams: bind-streams]
  openreg::bindStreams(m);
  // [/streams: bind-streams]
  // [memory: bind]
  openreg::bindMemory(m);
  // [/memory: bind]
  // [generators: bind]
  openreg::bindGenerators(m);
  // [/generators: bind]
  // [frontend: bind-sync-debug]
  openreg::bindSyncDebug(m);
  // [/frontend: bind-sync-debug]
  // [frontend: bind-tiles]
  openreg::bindTiles(m);
  // [/frontend: bind-tiles]
  // [frontend: bind]
  openreg::bindSharing(m);
  // [/frontend: bind]
  // [fallback: bind]
  openreg::bindFallback(m);
  // [/fallback: bind]
}
// [/devices: module]
