// Chapter: frontend
// Sends storages to other processes, and keeps them while they are used there.
//
// With every message travels a lifeline: the write end of a pipe, whose read
// end stays here. The receiver closes it when its storage is gone, and the
// system does when the receiver dies, however it dies; then the read end
// reports a hang-up, and this process may use the memory for something else.
#include "openreg/csrc/sharing.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Storage.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "openreg/csrc/device.h"
#include "openreg/csrc/module.h"
#include "openreg/csrc/stream.h"

namespace py = pybind11;

namespace openreg {
namespace {

// [frontend: sent]
struct Sent { // one message
  c10::Storage storage;
  int pipe;          // the read end
  bool wasResizable; // and is not, for as long as it is shared
};

struct Table {
  std::mutex mutex;
  std::vector<Sent> sent;
};

// Never destroyed: storages outlive static destructors.
Table& table() {
  static auto* const instance = [] {
    pthread_atfork(
        [] { table().mutex.lock(); },
        [] { table().mutex.unlock(); },
        [] { table().mutex.unlock(); });
    return new Table;
  }();
  return *instance;
}
// [/frontend: sent]

// [frontend: lifeline]
// Keep the storage until the descriptor that is returned, and all that are made
// from it, are closed. Resizing it would give its memory back behind the
// receiver's back.
int keep(const c10::Storage& storage) {
  std::array<int, 2> ends{};
  TORCH_CHECK(
      pipe2(ends.data(), O_CLOEXEC) == 0,
      "cannot share openreg memory: ",
      std::strerror(errno),
      "; each message with a tensor that is still held elsewhere needs a file "
      "descriptor (ulimit -n)");
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const bool resizable = impl->resizable();
  impl->set_resizable(false);
  const std::lock_guard lock(table().mutex);
  table().sent.push_back({storage, ends[0], resizable});
  return ends[1];
}
// [/frontend: lifeline]

// [frontend: share-storage]
struct Message {
  Place place;
  int lifeline;
};

Message share(const c10::Storage& storage) {
  collectShared();
  const c10::Device device = storage.device();
  // No event reaches across processes: what the receiver must find there is
  // waited for here.
  check(orStreamSynchronize(toHandle(currentStream(device.index()))));
  Message message{{device.index(), -1, 0, storage.nbytes()}, -1};
  check(orMemExport(
      &message.place.memory, &message.place.offset, storage.data()));
  try {
    message.lifeline = lifelineOf(storage.data_ptr());
    if (message.lifeline < 0) { // ours, and not passed on
      message.lifeline = keep(storage);
    }
  } catch (...) {
    close(message.place.memory);
    throw;
  }
  return message;
}
// [/frontend: share-storage]

// [frontend: hand-on]
// Of several messages with one storage, the last to go makes it resizable.
void settle(std::vector<Sent>& left, const Sent& gone) {
  if (!gone.wasResizable) {
    return;
  }
  c10::StorageImpl* const impl = gone.storage.unsafeGetStorageImpl();
  const auto other =
      std::find_if(left.begin(), left.end(), [&](const Sent& it) {
        return it.storage.unsafeGetStorageImpl() == impl;
      });
  if (other != left.end()) {
    other->wasResizable = true;
  } else {
    impl->set_resizable(true);
  }
}
// [/frontend: hand-on]

} // namespace

// [frontend: collect]
std::size_t collectShared() {
  std::vector<Sent> gone; // destroyed without the lock
  {
    const std::lock_guard lock(table().mutex);
    std::vector<Sent>& sent = table().sent;
    std::vector<pollfd> ends;
    for (const Sent& it : sent) {
      ends.push_back({it.pipe, 0, 0});
    }
    if (ends.empty() || poll(ends.data(), ends.size(), 0) <= 0) {
      return 0;
    }
    std::vector<Sent> left;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const bool over = (ends[i].revents & (POLLHUP | POLLERR)) != 0;
      (over ? gone : left).push_back(std::move(sent[i]));
    }
    sent = std::move(left);
    for (const Sent& it : gone) {
      settle(sent, it);
      close(it.pipe);
    }
  }
  return gone.size();
}
// [/frontend: collect]

// [frontend: bind-sharing]
void bindSharing(py::module_& m) {
  m.def("_share_storage", [](const py::object& storage) {
    const c10::Storage unpacked = THPStorage_Unpack(storage.ptr());
    Message it{};
    {
      const py::gil_scoped_release release;
      it = share(unpacked);
    }
    const Place& at = it.place;
    return py::make_tuple(
        at.device, at.memory, at.offset, at.bytes, it.lifeline);
  });
  m.def(
      "_open_shared",
      [](int device,
         int memory,
         std::size_t offset,
         std::size_t bytes,
         int lifeline) {
        noteUse();
        c10::Storage storage;
        {
          const py::gil_scoped_release release;
          storage = openShared({device, memory, offset, bytes}, lifeline);
        }
        return py::reinterpret_steal<py::object>(
            THPStorage_Wrap(std::move(storage)));
      });
  m.def(
      "_collect_shared",
      &collectShared,
      py::call_guard<py::gil_scoped_release>());
}
// [/frontend: bind-sharing]

} // namespace openreg
