// Chapter: generators
#include "openreg/csrc/generator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>

#include <array>
#include <cstring>
#include <vector>

#include "openreg/csrc/device.h"
#include "openreg/csrc/module.h"

namespace openreg {

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl(
          c10::Device(c10::kPrivateUse1, device),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(c10::make_intrusive<State>()) {
}

// [generators: take]
PhiloxState Generator::take(std::uint64_t numbers) {
  const PhiloxState now{state_->seed, state_->offset};
  state_->offset += (numbers + 3) / 4 * 4; // Philox makes four at a time
  return now;
}
// [/generators: take]

// [generators: seed]
void Generator::set_current_seed(std::uint64_t seed) {
  state_->seed = seed;
  state_->offset = 0;
}

std::uint64_t Generator::current_seed() const {
  return state_->seed;
}

std::uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return current_seed();
}

void Generator::set_offset(std::uint64_t offset) {
  TORCH_CHECK(
      offset % 4 == 0,
      "the offset must be a multiple of 4, not ",
      offset,
      ": Philox makes four numbers at a time");
  state_->offset = offset;
}

std::uint64_t Generator::get_offset() const {
  return state_->offset;
}
// [/generators: seed]

// [generators: state]
void Generator::set_state(const c10::TensorImpl& state) {
  std::array<std::uint64_t, 2> values;
  TORCH_CHECK_TYPE(
      state.device().is_cpu() && state.dtype() == at::kByte,
      "the state of an openreg generator is a CPU tensor of bytes, as "
      "get_state() gives it, not ",
      state.dtype(),
      " on ",
      state.device());
  TORCH_CHECK(
      state.numel() == sizeof(values),
      "the state of an openreg generator has ",
      sizeof(values),
      " bytes, not ",
      state.numel(),
      "; it may be the state of another device's generator");
  TORCH_CHECK(
      state.is_contiguous(),
      "the state of an openreg generator must be contiguous; call "
      "contiguous() on it");
  std::memcpy(values.data(), state.data(), sizeof(values));
  set_offset(values[1]); // checks it first
  state_->seed = values[0];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  const std::array<std::uint64_t, 2> values{state_->seed, state_->offset};
  // Past the dispatcher: under FakeTensorMode, at::empty has no memory.
  const at::Tensor result = at::detail::empty_cpu({sizeof(values)}, at::kByte);
  std::memcpy(result.mutable_data_ptr(), values.data(), sizeof(values));
  return result.getIntrusivePtr();
}
// [/generators: state]

// [generators: share]
void Generator::graphsafe_set_state(
    const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  auto* const generator = dynamic_cast<Generator*>(other.get());
  TORCH_CHECK(
      generator != nullptr,
      "an openreg generator can share the state of another openreg generator "
      "only");
  state_ = generator->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> Generator::graphsafe_get_state() const {
  auto copy = c10::make_intrusive<Generator>(device().index());
  copy->state_ = state_;
  return copy;
}

// A clone goes its own way.
Generator* Generator::clone_impl() const {
  auto* const copy = new Generator(device().index());
  copy->state_->seed = state_->seed;
  copy->state_->offset = state_->offset;
  return copy;
}
// [/generators: share]

// [generators: default]
const at::Generator& defaultGenerator(c10::DeviceIndex device) {
  // Never destroyed, like all that may be asked for while the process exits.
  static const auto* const generators = [] {
    auto* const made = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < deviceCount(); ++index) {
      made->push_back(at::make_generator<Generator>(index));
    }
    return made;
  }();
  const c10::DeviceIndex index = device < 0 ? currentDevice() : device;
  TORCH_CHECK(
      static_cast<std::size_t>(index) < generators->size(),
      "there is no generator for openreg:",
      static_cast<int>(index),
      "; ",
      generators->size(),
      " devices are present");
  return (*generators)[static_cast<std::size_t>(index)];
}

Generator& generatorFor(
    const std::optional<at::Generator>& given, c10::Device device) {
  if (!given.has_value() || !given->defined()) {
    return *defaultGenerator(device.index()).get<Generator>();
  }
  TORCH_CHECK(
      given->device() == device,
      "the generator belongs to ",
      given->device(),
      " and the tensor to ",
      device,
      "; make one with torch.Generator(device='",
      device,
      "')");
  return *given->get<Generator>();
}
// [/generators: default]

// [generators: bind]
void bindGenerators(pybind11::module_& m) {
  m.def("default_generator", [](int device) {
    // Here, where it still has more than the 8 bits of a c10::DeviceIndex.
    TORCH_CHECK(
        device >= -1 && device < deviceCount(),
        "there is no generator for openreg:",
        device,
        "; ",
        static_cast<int>(deviceCount()),
        " devices are present");
    const auto index = static_cast<c10::DeviceIndex>(device);
    return pybind11::reinterpret_steal<pybind11::object>(
        THPGenerator_Wrap(defaultGenerator(index)));
  });
}
// [/generators: bind]

} // namespace openreg
