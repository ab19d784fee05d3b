// Chapter: fallback
#include "openreg/csrc/ops/fallback_modes.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/util/Exception.h>
#include <fnmatch.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "openreg/csrc/ops/category.h"

namespace openreg {

namespace {

// [fallback: rule]
struct Rule {
  std::string selector; // of operators; empty for all
  FallbackMode mode;
};

bool fits(
    const Rule& rule, const std::string& name, std::string_view category) {
  if (rule.selector.empty() || rule.selector == category) {
    return true;
  }
  // "aten::add" is every overload, "aten::add.default" the one without a name.
  const std::size_t dot = name.find('.');
  const std::string full = dot == std::string::npos ? name + ".default" : name;
  const std::string stem = name.substr(0, dot);
  return fnmatch(rule.selector.c_str(), full.c_str(), 0) == 0 ||
         fnmatch(rule.selector.c_str(), stem.c_str(), 0) == 0;
}
// [/fallback: rule]

// [fallback: parse]
FallbackMode parseMode(const std::string& word) {
  for (const auto mode :
       {FallbackMode::Off, FallbackMode::Warn, FallbackMode::Error}) {
    if (word == toString(mode)) {
      return mode;
    }
  }
  C10_THROW_ERROR(
      ValueError, "'" + word + "' is not a mode: use off, warn or error");
}

void checkSelector(const std::string& selector) {
  std::ostringstream names;
  for (const std::string_view category : kCategories) {
    if (selector == category) {
      return;
    }
    names << ' ' << category;
  }
  TORCH_CHECK_VALUE(
      selector.find("::") != std::string::npos,
      "'",
      selector,
      "' is neither an operator, as in aten::add or aten::linalg_*, nor one of "
      "the categories",
      names.str());
}

std::string stripped(const std::string& word) {
  const std::size_t first = word.find_first_not_of(' ');
  return first == std::string::npos
             ? ""
             : word.substr(first, word.find_last_not_of(' ') - first + 1);
}

// "error, aten::unique*=warn": a mode for all, and modes for some.
std::vector<Rule> parse(const std::string& text) {
  std::vector<Rule> rules;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t equals = word.rfind('=');
    if (equals == std::string::npos) {
      rules.push_back({"", parseMode(stripped(word))});
      continue;
    }
    const std::string selector = stripped(word.substr(0, equals));
    checkSelector(selector);
    rules.push_back({selector, parseMode(stripped(word.substr(equals + 1)))});
  }
  return rules;
}
// [/fallback: parse]

} // namespace

struct FallbackScope {
  const FallbackScope* outer;
  std::vector<Rule> rules;
};

namespace {

const FallbackScope* intern(
    const FallbackScope* outer, const std::string& text) {
  static std::mutex mutex;
  static auto* const known = new std::map<
      std::pair<const FallbackScope*, std::string>,
      std::unique_ptr<FallbackScope>>;
  auto made = std::make_unique<FallbackScope>(outer, parse(text));
  const std::lock_guard lock(mutex);
  return known->try_emplace({outer, text}, std::move(made)).first->second.get();
}

const FallbackScope* fromEnvironment() {
  const char* text = std::getenv("OPENREG_FALLBACK");
  try {
    return intern(nullptr, text == nullptr ? "" : text);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(
        false,
        "OPENREG_FALLBACK='",
        text,
        "': ",
        error.what_without_backtrace(),
        "; correct it or unset it");
  }
}

std::atomic<const FallbackScope*> replaced{nullptr};

const FallbackScope* processRules() {
  if (const auto* set = replaced.load(std::memory_order_acquire)) {
    return set;
  }
  static const FallbackScope* const initial = fromEnvironment();
  return initial;
}

// [fallback: thread-rules]
// PyTorch hands these objects on to the threads that run a backward pass, so
// a rule reaches the backward of what it was written around.
const std::string& threadKey() {
  static const std::string key = "openreg.rules";
  return key;
}

const FallbackScope* threadRules() {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(threadKey())) {
    return nullptr;
  }
  // Without the GIL: it reads a field of an object that this thread holds.
  return static_cast<const FallbackScope*>(PyCapsule_GetPointer(
      Objects::get(threadKey())->ptr(getPyInterpreter()), nullptr));
}
// [/fallback: thread-rules]

} // namespace

const char* toString(FallbackMode mode) {
  constexpr const char* names[] = {"off", "warn", "error"};
  return names[static_cast<int>(mode)];
}

FallbackRules currentFallbackRules() {
  return {threadRules(), processRules()};
}

FallbackMode decide(
    const FallbackRules& rules,
    const std::string& name,
    std::string_view category) {
  for (const FallbackScope* scope : {rules.thread, rules.process}) {
    for (; scope != nullptr; scope = scope->outer) {
      const auto found = std::find_if(
          scope->rules.rbegin(), scope->rules.rend(), [&](const Rule& rule) {
            return fits(rule, name, category);
          });
      if (found != scope->rules.rend()) {
        return found->mode;
      }
    }
  }
  return FallbackMode::Warn;
}

const FallbackScope* pushFallbackRules(const std::string& rules) {
  const FallbackScope* outer = threadRules();
  restoreFallbackRules(intern(outer, rules));
  return outer;
}

void restoreFallbackRules(const FallbackScope* outer) {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (outer == nullptr) {
    Objects::erase(threadKey());
    return;
  }
  auto* scope = const_cast<FallbackScope*>(outer); // a capsule knows no const
  Objects::set(
      threadKey(),
      std::make_shared<c10::SafePyObject>(
          PyCapsule_New(scope, nullptr, nullptr), getPyInterpreter()));
}

void setFallbackRules(const std::string& rules) {
  replaced.store(intern(nullptr, rules), std::memory_order_release);
}

} // namespace openreg
