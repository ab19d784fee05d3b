// Chapter: kernels
#include "openreg/csrc/trial.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <functional>

namespace openreg {
namespace {

thread_local bool running = false;
thread_local bool conclusive = true;

class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {
  }
};

// "expected m1 and m2 to have the same dtype": the words of the library's own
// checks. An error with none of them is reported later, by the kernel.
bool isAboutTypes(std::string_view text) {
  constexpr std::array kWords{
      "dtype", "scalar type", "long tensor", "datatype"};
  return std::any_of(kWords.begin(), kWords.end(), [&](const char* words) {
    return text.find(words) != std::string_view::npos;
  });
}

} // namespace

Trial::Trial() {
  running = true;
  conclusive = true;
}

Trial::~Trial() {
  running = false;
}

bool Trial::isRunning() {
  return running;
}

void Trial::setInconclusive() {
  conclusive = false;
}

// [kernels: try]
bool Trial::passes(c10::function_ref<void()> kernel) {
  const Trial trial;
  // The caller's autocast, tracing or transforms are not the kernel's.
  const c10::impl::ForceDispatchKeyGuard bare(
      c10::default_included_set,
      c10::default_excluded_set |
          c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  try {
    kernel();
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const c10::Error& error) {
    if (isAboutTypes(error.what_without_backtrace())) {
      throw;
    }
    return conclusive; // about sizes or values, which are made up here
  } catch (const std::exception&) {
    return conclusive;
  }
  return conclusive;
}
// [/kernels: try]

Signature mix(Signature signature, const at::ITensorListRef& tensors) {
  for (const at::Tensor& tensor : tensors) {
    signature = mix(signature, tensor);
  }
  return signature;
}

Signature mix(Signature signature, const at::IOptTensorListRef& tensors) {
  for (const at::OptionalTensorRef& tensor : tensors) {
    signature = mix(signature, tensor);
  }
  return signature;
}

Signature mix(Signature signature, std::string_view text) {
  return mix(signature, std::hash<std::string_view>()(text));
}

Signature mix(Signature signature, std::optional<std::string_view> text) {
  return text.has_value() ? mix(signature, *text) : mix(signature, 0);
}

void Trials::run(Signature signature, c10::function_ref<void()> kernel) {
  {
    const std::lock_guard lock(mutex_);
    if (passed_.contains(signature)) {
      recent_[next_++ % recent_.size()] = signature;
      return;
    }
  }
  if (Trial::passes(kernel)) {
    const std::lock_guard lock(mutex_);
    passed_.insert(signature);
    recent_[next_++ % recent_.size()] = signature;
  }
}

} // namespace openreg
