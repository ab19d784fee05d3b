// Chapter: fallback
// What shall happen when an operator has to run on the CPU, by rules.
#pragma once

#include <string>
#include <string_view>

namespace openreg {

enum class FallbackMode : char { Off, Warn, Error };

const char* toString(FallbackMode mode);

// [fallback: scope]
// Some rules, and what they were put over. Made once for each combination and
// never freed, so that two equal ones are the same pointer.
struct FallbackScope;

// The rules that a thread is under: those of its `with` blocks, which its
// backward passes inherit, over those of the process. A cache of what they say
// holds as long as both pointers are the same.
struct FallbackRules {
  const FallbackScope* thread = nullptr;
  const FallbackScope* process = nullptr;

  bool operator==(const FallbackRules& other) const = default;
};
// [/fallback: scope]

// The calling thread's. Throws if OPENREG_FALLBACK cannot be understood.
FallbackRules currentFallbackRules();

// What the rules say of an operator: the last that fits it decides, a thread's
// before the process's; `warn` without any. `name` is as in "aten::add.out",
// `category` one of kCategories.
FallbackMode decide(
    const FallbackRules& rules,
    const std::string& name,
    std::string_view category);

// Put rules over the calling thread's, and take them away again: the second
// takes what the first has returned. Both need the GIL.
const FallbackScope* pushFallbackRules(const std::string& rules);
void restoreFallbackRules(const FallbackScope* outer);

// In the place of the process's rules, which OPENREG_FALLBACK gave at first.
void setFallbackRules(const std::string& rules);

} // namespace openreg
