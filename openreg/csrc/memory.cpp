// Chapter: memory
// What Python asks of the device's memory beyond torch.accelerator.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <string>
#include <vector>

#include "openreg/csrc/allocator.h"
#include "openreg/csrc/device.h"
#include "openreg/csrc/module.h"
#include "openreg/csrc/pinned.h"
#include "openreg/csrc/stream.h"

namespace py = pybind11;

namespace openreg {
namespace {

using caching::Entry;

c10::DeviceIndex narrow(int device) {
  TORCH_CHECK(
      device >= 0 && device < deviceCount(),
      "there is no openreg:",
      device,
      " to ask about its memory; ",
      static_cast<int>(deviceCount()),
      " devices are present");
  return static_cast<c10::DeviceIndex>(device);
}

// [memory: fraction]
void setFraction(double fraction, int device) {
  TORCH_CHECK_VALUE(
      fraction >= 0 && fraction <= 1,
      "the fraction of the device's memory must be from 0 to 1, not ",
      fraction);
  orDeviceProp properties;
  check(orGetDeviceProperties(&properties, narrow(device)));
  const auto total = static_cast<double>(properties.total_memory);
  cacheOf(narrow(device))
      .setLimit(
          fraction == 1 ? SIZE_MAX
                        : static_cast<std::size_t>(fraction * total));
}

double getFraction(int device) {
  orDeviceProp properties;
  check(orGetDeviceProperties(&properties, narrow(device)));
  const std::size_t limit = cacheOf(narrow(device)).limit();
  return limit == SIZE_MAX ? 1.0
                           : static_cast<double>(limit) /
                                 static_cast<double>(properties.total_memory);
}
// [/memory: fraction]

// [memory: record]
// Who asks for memory: the Python stack, and the C++ one if `native`.
void recordHistory(std::size_t entries, bool stacks, bool native) {
  for (c10::DeviceIndex device = 0; device < deviceCount(); ++device) {
    std::function<caching::Context()> capture;
    if (stacks) {
      capture = [native] {
        return caching::Context(
            torch::CapturedTraceback::gather(
                /*python=*/true, /*script=*/false, native));
      };
    }
    cacheOf(device).recordHistory(entries, std::move(capture));
  }
}
// [/memory: record]

// The stacks of a whole snapshot are symbolized together, since they share
// most of their frames; each goes into the dictionaries that wait for it.
class Frames {
 public:
  void add(const caching::Context& context, const py::dict& into) {
    if (context == nullptr) {
      into["frames"] = py::list();
      return;
    }
    kept_.push_back(context);
    stacks_.push_back(static_cast<torch::CapturedTraceback*>(context.get()));
    into_.push_back(into);
  }

  void fill() {
    const torch::SymbolizedTracebacks found = torch::symbolize(stacks_);
    std::vector<py::dict> frames;
    for (const torch::unwind::Frame& frame : found.all_frames) {
      py::dict one;
      one["filename"] = frame.filename;
      one["name"] = frame.funcname;
      one["line"] = frame.lineno;
      frames.push_back(std::move(one));
    }
    for (std::size_t i = 0; i < into_.size(); ++i) {
      py::list stack;
      for (const std::uint64_t index : found.tracebacks[i]) {
        stack.append(frames[index]);
      }
      into_[i]["frames"] = stack;
    }
  }

 private:
  std::vector<caching::Context> kept_;
  std::vector<torch::CapturedTraceback*> stacks_;
  std::vector<py::dict> into_;
};

const char* name(Entry::Action action) {
  switch (action) {
    case Entry::Action::Alloc:
      return "alloc";
    case Entry::Action::FreeRequested:
      return "free_requested";
    case Entry::Action::FreeCompleted:
      return "free_completed";
    case Entry::Action::SegmentAlloc:
      return "segment_alloc";
    case Entry::Action::SegmentFree:
      return "segment_free";
    case Entry::Action::Snapshot:
      return "snapshot";
    case Entry::Action::OutOfMemory:
      return "oom";
  }
  return "unknown";
}

// [memory: describe-segment]
py::dict describe(
    const caching::SegmentInfo& segment, int device, Frames& frames) {
  py::dict result;
  std::size_t allocated = 0;
  std::size_t active = 0;
  std::size_t requested = 0;
  py::list blocks;
  for (const caching::BlockInfo& block : segment.blocks) {
    py::dict one;
    one["address"] = block.address;
    one["size"] = block.size;
    one["requested_size"] = block.requested;
    one["state"] = block.allocated ? "active_allocated"
                   : block.active  ? "active_pending_free"
                                   : "inactive";
    frames.add(block.context, one);
    blocks.append(one);
    allocated += block.allocated ? block.size : 0;
    active += block.active ? block.size : 0;
    requested += block.allocated ? block.requested : 0;
  }
  result["device"] = device;
  result["address"] = segment.address;
  result["total_size"] = segment.size;
  result["allocated_size"] = allocated;
  result["active_size"] = active;
  result["requested_size"] = requested;
  result["stream"] = segment.stream;
  result["segment_type"] = segment.small ? "small" : "large";
  result["segment_pool_id"] = py::make_tuple(0, 0);
  result["is_expandable"] = false;
  frames.add(segment.context, result);
  result["blocks"] = blocks;
  return result;
}

// [/memory: describe-segment]

// [memory: describe-entry]
py::dict describe(const Entry& entry, int device, Frames& frames) {
  py::dict result;
  result["action"] = name(entry.action);
  result[entry.action == Entry::Action::OutOfMemory ? "device_free" : "addr"] =
      entry.address;
  result["size"] = entry.size;
  result["stream"] = entry.stream;
  result["device"] = device;
  result["pool_id"] = py::make_tuple(0, 0);
  result["time_us"] = entry.nanoseconds / 1000;
  frames.add(entry.context, result);
  return result;
}

// [/memory: describe-entry]

// As torch.cuda.memory._snapshot() has it, which is what the visualizer reads.
py::dict snapshot() {
  Frames frames;
  py::list segments;
  py::list traces;
  for (c10::DeviceIndex device = 0; device < deviceCount(); ++device) {
    caching::Snapshot taken;
    {
      const py::gil_scoped_release release; // it may capture a stack
      taken = cacheOf(device).snapshot();
    }
    for (const caching::SegmentInfo& segment : taken.segments) {
      segments.append(describe(segment, device, frames));
    }
    py::list trace;
    for (const Entry& entry : taken.history) {
      trace.append(describe(entry, device, frames));
    }
    traces.append(trace);
  }
  frames.fill();
  py::dict result;
  result["segments"] = segments;
  result["device_traces"] = traces;
  result["external_annotations"] = py::list();
  result["allocator_settings"] = py::dict();
  return result;
}

py::dict hostStatistics() {
  const at::HostStats stats = pinnedAllocator()->get_stats();
  py::dict result;
  const auto put = [&result](const char* prefix, const auto& stat) {
    const std::string key(prefix);
    result[py::str(key + ".current")] = stat.current;
    result[py::str(key + ".peak")] = stat.peak;
    result[py::str(key + ".allocated")] = stat.allocated;
    result[py::str(key + ".freed")] = stat.freed;
  };
  put("allocations", stats.allocations);
  put("allocated_bytes", stats.allocated_bytes);
  put("active_requests", stats.active_requests);
  put("active_bytes", stats.active_bytes);
  result["num_host_alloc"] = stats.num_host_alloc;
  result["num_host_free"] = stats.num_host_free;
  return result;
}

} // namespace

// [memory: bind-memory]
void bindMemory(py::module_& m) {
  m.def("set_memory_fraction", &setFraction);
  m.def("get_memory_fraction", &getFraction);
  m.def("record_memory_history", &recordHistory);
  m.def("memory_snapshot", &snapshot);
  m.def("host_memory_stats", &hostStatistics);
  m.def("reset_host_memory_stats", [](bool peaks) {
    peaks ? pinnedAllocator()->reset_peak_stats()
          : pinnedAllocator()->reset_accumulated_stats();
  });
}
// [/memory: bind-memory]

} // namespace openreg
