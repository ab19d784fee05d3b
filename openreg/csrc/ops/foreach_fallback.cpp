// Chapter: fallback
#include "openreg/csrc/ops/foreach_fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_set>

#include "openreg/csrc/ops/fallback.h"

namespace openreg {
namespace {

constexpr std::string_view kForeach = "aten::_foreach_";

std::vector<std::string>& names() {
  static auto* const instance = new std::vector<std::string>;
  return *instance;
}

// [fallback: element-operator]
// What PyTorch composes it of, by name: "aten::add" for "aten::_foreach_add_".
std::string elementOperator(std::string_view foreach) {
  std::string name(foreach.substr(kForeach.size()));
  if (name.ends_with('_')) {
    name.pop_back();
  }
  if (name == "norm") {
    return "aten::linalg_vector_norm";
  }
  if (name == "powsum") {
    return "aten::pow";
  }
  return name == "copy" ? "aten::_copy_from" : "aten::" + name;
}
// [/fallback: element-operator]

} // namespace

const std::vector<std::string>& foreachFallbacks() {
  return names();
}

// [fallback: register-foreach]
void registerForeachFallbacks() {
  constexpr auto key = c10::DispatchKey::PrivateUse1;
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::unordered_set<std::string> onDevice;
  for (const auto& native : dispatcher.getAllOpNamesForDispatchKey(key)) {
    onDevice.insert(native.name);
  }
  for (const auto& op : dispatcher.getAllOpNames()) {
    // Their out= forms call these here, and copy.
    if (!op.name.starts_with(kForeach) || op.overload_name.ends_with("out")) {
      continue;
    }
    const std::string element = elementOperator(op.name);
    if (onDevice.contains(element) || onDevice.contains(element + "_") ||
        onDevice.contains(op.name)) {
      continue;
    }
    names().push_back(toString(op));
    library->impl(
        names().back().c_str(),
        torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
// [/fallback: register-foreach]

} // namespace openreg
