// Chapter: generators
// Random numbers of a device: a seed and a position in its sequence.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>

namespace openreg {

// [generators: philox]
// What a kernel needs. Each group of elements takes the numbers of a
// subsequence of its own, from `offset` on: results depend on no thread count.
struct PhiloxState {
  std::uint64_t seed;
  std::uint64_t offset; // in numbers of 32 bits, a multiple of 4
};
// [/generators: philox]

// [generators: class]
// Philox 4x32-10 makes numbers from a counter instead of from its last result:
// nothing has to be stored on the device, and the host knows how far a kernel
// moves on before the kernel has run.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  // The state for a kernel that takes at most `numbers` numbers of 32 bits for
  // each element, and move on behind them. Call it with `mutex_` locked.
  PhiloxState take(std::uint64_t numbers);

  void set_current_seed(std::uint64_t seed) override; // and offset 0
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override; // a new one, from the operating system
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override;

  // 16 bytes, as torch.cuda's: the seed and the offset, little-endian.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // Two generators may share one state, so that a captured graph and eager code
  // go on from where the other stopped.
  void graphsafe_set_state(
      const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  static c10::DeviceType device_type() {
    return c10::kPrivateUse1;
  }

 private:
  struct State : c10::intrusive_ptr_target {
    std::uint64_t seed = c10::default_rng_seed_val;
    std::uint64_t offset = 0;
  };

  Generator* clone_impl() const override;

  c10::intrusive_ptr<State> state_;
};
// [/generators: class]

// [generators: functions]
// The generator that is used where none is named. Starts nothing.
const at::Generator& defaultGenerator(c10::DeviceIndex device);

// The generator an operator was given, or the default one of its device.
// Throws if it belongs to another device.
Generator& generatorFor(
    const std::optional<at::Generator>& given, c10::Device device);
// [/generators: functions]

} // namespace openreg
