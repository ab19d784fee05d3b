// Chapter: fallback
#include "openreg/csrc/ops/category.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <initializer_list>

namespace openreg {
namespace {

bool startsWithOne(
    std::string_view name, std::initializer_list<std::string_view> starts) {
  return std::any_of(starts.begin(), starts.end(), [&](std::string_view start) {
    return name.starts_with(start);
  });
}

bool takesA(const c10::FunctionSchema& schema, c10::TypeKind wanted) {
  return std::any_of(
      schema.arguments().begin(),
      schema.arguments().end(),
      [&](const c10::Argument& argument) {
        c10::TypePtr type = argument.type();
        while (type->kind() == c10::TypeKind::OptionalType ||
               type->kind() == c10::TypeKind::ListType) {
          type = type->containedType(0);
        }
        return type->kind() == wanted;
      });
}

} // namespace

// [fallback: category-of]
std::string_view categoryOf(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  std::string_view name = schema.name();
  if (!name.starts_with("aten::")) {
    return "custom";
  }
  name.remove_prefix(6);
  if (startsWithOne(name, {"_foreach_", "_amp_foreach_", "_fused_ada"}) ||
      startsWithOne(name, {"_fused_sgd"})) {
    return "foreach";
  }
  if (name.find("_backward") != std::string_view::npos) {
    return "backward";
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded) ||
      takesA(schema, c10::TypeKind::GeneratorType)) {
    return "random";
  }
  if (startsWithOne(name, {"linalg_", "_linalg_", "cholesky", "lu_", "_lu_"}) ||
      startsWithOne(name, {"geqrf", "ormqr", "orgqr", "triangular_solve"})) {
    return "linalg";
  }
  if (op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::data_dependent_output)) {
    return "dynamic";
  }
  if (op.hasTag(at::Tag::reduction)) {
    return "reduction";
  }
  if (op.hasTag(at::Tag::pointwise)) {
    return "pointwise";
  }
  return takesA(schema, c10::TypeKind::TensorType) ? "other" : "factory";
}
// [/fallback: category-of]

} // namespace openreg
