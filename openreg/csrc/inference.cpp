// Chapter: kernels
#include "openreg/csrc/inference.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>

#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace openreg {
namespace {

// A program with other sizes at every step must not fill the memory.
constexpr std::size_t kRemembered = 4096;

struct Hash {
  std::size_t operator()(const Description& description) const {
    return description.hash();
  }
};

struct Memory {
  std::mutex mutex;
  std::unordered_map<Description, Form, Hash> forms;
};

Memory& memory() {
  static Memory* const instance = new Memory; // used until the process ends
  return *instance;
}

std::int64_t bitsOf(double value) {
  std::int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// [kernels: meta-of]
at::Tensor metaOf(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() > 0)) {
    return tensor; // indices
  }
  at::Tensor result = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  // A number of the CPU is one of the device's by the time the kernel runs.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return result;
}
// [/kernels: meta-of]

} // namespace

void Description::add(std::int64_t word) {
  words_.push_back(word);
}

// [kernels: describe]
void Description::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    add(-1);
    return;
  }
  const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  add(tensor.dim() << 16 |
      static_cast<std::int64_t>(tensor.scalar_type()) << 4 |
      std::int64_t{number} << 3 | std::int64_t{tensor.is_conj()} << 2 |
      std::int64_t{tensor.is_neg()} << 1 | std::int64_t{tensor.is_cpu()});
  words_.insert(words_.end(), tensor.sizes().begin(), tensor.sizes().end());
  words_.insert(words_.end(), tensor.strides().begin(), tensor.strides().end());
}

// Each value begins with a word that tells its kind, and lists tell how many
// there are: no two calls have the same description.
bool Description::add(const c10::IValue& value) {
  if (value.isTensor()) {
    add(value.toTensor());
  } else if (value.isNone()) {
    add(-2);
  } else if (value.isInt()) {
    add(1), add(value.toInt());
  } else if (value.isDouble()) {
    add(2), add(bitsOf(value.toDouble()));
  } else if (value.isBool()) {
    add(3), add(value.toBool());
  } else if (value.isComplexDouble()) {
    const c10::complex<double> number = value.toComplexDouble();
    add(4), add(bitsOf(number.real())), add(bitsOf(number.imag()));
  } else if (value.isDevice()) {
    add(5), add(static_cast<std::int64_t>(value.toDevice().type()));
  } else if (value.isString()) {
    const std::string_view text = value.toStringView();
    add(6), add(static_cast<std::int64_t>(text.size()));
    words_.insert(words_.end(), text.begin(), text.end());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    add(7), add(static_cast<std::int64_t>(list.size()));
    for (const c10::IValue& each : list) {
      if (!add(each)) {
        return false;
      }
    }
  } else {
    return false;
  }
  return true;
}

std::optional<Description> Description::of(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  Description result;
  result.words_.reserve(64);
  // A schema stays where it is while its library is loaded.
  result.add(reinterpret_cast<std::int64_t>(&op.schema()));
  result.add(
      static_cast<std::int64_t>(
          c10::typeMetaToScalarType(c10::get_default_dtype())));
  for (const c10::IValue& argument : arguments) {
    if (!result.add(argument)) {
      return std::nullopt;
    }
  }
  return result;
}
// [/kernels: describe]

std::size_t Description::hash() const {
  std::size_t result = 0;
  for (const std::int64_t word : words_) {
    result = (result ^ static_cast<std::size_t>(word)) * 0x9e3779b97f4a7c15u;
    result ^= result >> 32;
  }
  return result;
}

// [kernels: remember]
Form recall(const Description& description) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().forms.find(description);
  return found != memory().forms.end() ? found->second : nullptr;
}

void remember(Description description, Form form) {
  const std::lock_guard lock(memory().mutex);
  if (memory().forms.size() >= kRemembered) {
    memory().forms.clear();
  }
  memory().forms.emplace(std::move(description), std::move(form));
}
// [/kernels: remember]

c10::IValue metaOf(const c10::IValue& value) {
  if (value.isTensor()) {
    return metaOf(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      result.push_back(metaOf(tensor));
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      result.push_back(
          each.has_value() ? std::optional(metaOf(*each)) : std::nullopt);
    }
    return result;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::Device(c10::kMeta);
  }
  return value;
}

} // namespace openreg
