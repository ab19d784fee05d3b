// Chapter: devices
// What the other files add to the Python module `_C`.
#pragma once

#include <pybind11/pybind11.h>

namespace openreg {

// [streams: declare]
void bindStreams(pybind11::module_& m);
// [/streams: declare]
// [memory: declare]
void bindMemory(pybind11::module_& m);
// [/memory: declare]
// [generators: declare]
void bindGenerators(pybind11::module_& m);
// [/generators: declare]
// [frontend: declare-sync-debug]
void bindSyncDebug(pybind11::module_& m);
// [/frontend: declare-sync-debug]
// [frontend: declare-tiles]
void bindTiles(pybind11::module_& m);
// [/frontend: declare-tiles]
// [frontend: declare]
void bindSharing(pybind11::module_& m);
// [/frontend: declare]
// [fallback: declare]
void bindFallback(pybind11::module_& m);
// [/fallback: declare]

} // namespace openreg
