# Chapter: kernels
"""Write the C++ of the structured operators, from the installed torch's data.

    python structured.py FOLDER [FILES]

A structured operator has its checks and its output's shape in one C++ class of
PyTorch's, the meta function, that serves every device. What is left for a
device is the kernel, and a device whose library has PyTorch's own operators
writes the same few lines for each: take the arguments along, launch, call the
library. `torchgen`, which comes with torch, knows all signatures and writes
the wrappers around the meta functions. It has no `PrivateUse1` there, so it is
asked for another device, and the name is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torchgen
import yaml
from torchgen.api import meta, native, structured
from torchgen.api.types import Binding, CppSignatureGroup
from torchgen.context import native_function_manager
from torchgen.dest import RegisterDispatchKey
from torchgen.dest.register_dispatch_key import gen_registration_helpers
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.model import (
    BackendIndex,
    BackendMetadata,
    DispatchKey,
    NativeFunction,
    NativeFunctionsGroup,
)
from torchgen.selective_build.selector import SelectiveBuilder
from torchgen.utils import Target

PACKAGED = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
# Their `out=` form resizes a result of another size on its way to the sum, and
# warns of it, on an engine, where nobody has done anything wrong; or gives it
# the conjugate bit, which a view cannot hand on.
COPIED = {"linalg_lu_solve", "mse_loss", "smooth_l1_loss"}
# Their kernels lay the result out as the input, in spite of the meta function.
RESTRIDED = {
    "reflection_pad3d",
    "reflection_pad3d_backward",
    "replication_pad2d",
    "replication_pad3d",
}
# Elementwise operators with numbers that choose nothing but the dtype.
NUMBERS = {
    *(
        "add_Tensor",
        "sub_Tensor",
        "addcdiv",
        "addcmul",
        "clamp_max",
        "clamp_min",
    ),
    *(
        "eq_Scalar",
        "ge_Scalar",
        "gt_Scalar",
        "le_Scalar",
        "lt_Scalar",
        "ne_Scalar",
    ),
    *("lerp_Scalar", "threshold", "threshold_backward"),
}
# In place they may not read what they have written, and they know that they are
# in place by getting one tensor twice.
IN_PLACE = {"tril", "triu"}
LISTED = Path(__file__).with_suffix(".yaml")
MODEL = DispatchKey.XPU  # whose wrappers have the shape that we need

HEAD = """\
// Written by openreg/csrc/structured.py for torch's own operators.
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/plain.h"
#include "openreg/csrc/trial.h"
"""

BOXED = """\
// Written by openreg/csrc/structured.py.
#include <torch/library.h>

#include "openreg/csrc/library.h"

namespace openreg {

template <auto Kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<Kernel>();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {"""

# [kernels: allocation]
ALLOCATION = """
namespace at::detail {
inline Tensor empty_xpu(IntArrayRef sizes, const TensorOptions& options) {
  return empty_generic(
      sizes, GetAllocator(kPrivateUse1), DispatchKeySet(DispatchKey::XPU),
      typeMetaToScalarType(options.dtype()), options.memory_format_opt());
}
inline Tensor empty_strided_xpu(
    IntArrayRef sizes, IntArrayRef strides, const TensorOptions& options) {
  return empty_strided_generic(
      sizes, strides, GetAllocator(kPrivateUse1),
      DispatchKeySet(DispatchKey::XPU),
      typeMetaToScalarType(options.dtype()));
}
} // namespace at::detail
"""
# [/kernels: allocation]


# [kernels: groups]
def groups() -> dict[str, NativeFunctionsGroup]:
    """The structured operators that the CPU has, by their ``out=`` overload.

    A group is one operator in three forms: functional, in-place and ``out=``.
    """
    parsed = parse_native_yaml(
        str(PACKAGED / "native_functions.yaml"), str(PACKAGED / "tags.yaml")
    )
    on_cpu = parsed.backend_indices[DispatchKey.CPU]
    return {
        str(group.out.func.name): group
        for group in get_grouped_native_functions(parsed.native_functions)
        if isinstance(group, NativeFunctionsGroup)
        and group.structured
        and on_cpu.has_kernel(group.out)
    }


def chosen() -> list[NativeFunctionsGroup]:
    """Those of them that are listed; a release may not have them all."""
    found = groups()
    names = yaml.safe_load(LISTED.read_text())["structured"]
    return [found[name] for name in names if name in found]


# [/kernels: groups]


def bindings(arguments: Sequence[Binding]) -> str:
    """Return the arguments as a C++ parameter list."""
    return ", ".join(argument.decl() for argument in arguments)


# [kernels: kernel]
def kernel(group: NativeFunctionsGroup) -> str:
    """The class with the operator's kernel: `impl`, after its meta function.

    The library is called by the ``out=`` form. Some meta functions replace an
    argument for `impl` ("precomputed"), and the library wants the caller's
    own; there the class looks on when its meta function is called.
    """
    name, out = meta.name(group), group.out
    given = structured.meta_arguments(group) if out.precomputed else []
    library = CppSignatureGroup.from_native_function(
        out, method=False, fallback_binding=True
    ).most_faithful_signature()
    function = library.name().removeprefix("__dispatch_")
    names = [argument.name for argument in library.arguments()]
    early = {argument.name for argument in given}
    call = f"at::cpu::{function}({', '.join(f'give({n})' for n in names)})"
    if name in COPIED:
        *inputs, result = (f"give({n})" for n in names)
        base = group.functional.func.name.name.base
        call = f"settle({result}, at::cpu::{base}({', '.join(inputs)}))"
    if name in IN_PLACE:
        first, *others, result = names
        others = "".join(f", give({n})" for n in others)
        call = (
            f"at::Tensor to = give({result}), from = give({first}); "
            f"const bool same = to.const_data_ptr() == from.const_data_ptr(); "
            f"at::cpu::{function}(same ? to : from{others}, to)"
        )
    captures = ", ".join(
        f"{name} = std::move(*{name}_)"
        if name in early
        else f"{name} = keep({name})"
        for name in names
    )
    before = ""
    if name in RESTRIDED:
        before = (
            f"{names[-1]}.unsafeGetTensorImpl()->empty_tensor_restride("
            "self.suggest_memory_format());"
        )
    choosing = ", ".join(name for name in names if name not in early)
    look_on = ""
    static = "" if given else "static "
    parameters = bindings(structured.impl_arguments(group))
    forwarded = ", ".join(argument.name for argument in given)
    if given:
        look_on = f"""
  auto meta({bindings(given)}) {{
    auto result = at::meta::structured_{name}::meta({forwarded});
    {" ".join(f"{a.name}_.emplace(keep({a.name}));" for a in given)}
    return result;
  }}
  {" ".join(f"std::optional<Kept<{a.type}>> {a.name}_;" for a in given)}"""
    return f"""
constexpr char k_{name}[] = "{out.func.name}";
struct structured_{name}_openreg : at::meta::structured_{name} {{{look_on}
  {static}void impl({parameters}) {{
    {before}
    launchTried<k_{name}>(
        signatureOf({choosing}),
        [{captures}]() mutable {{
          {call};
        }});
  }}
}};"""


# [/kernels: kernel]


# [kernels: shortcut]
def elementwise(group: NativeFunctionsGroup) -> bool:
    """Whether the sizes and dtypes of the inputs say all of the result."""
    types = {str(a.type) for a in group.functional.func.arguments.flat_all}
    return (
        group.out.structured_inherits == "TensorIteratorBase"
        and not group.out.precomputed
        and (types == {"Tensor"} or meta.name(group) in NUMBERS)
    )


def shortcut(group: NativeFunctionsGroup) -> str:
    """The functional form that asks its meta function only where it must."""
    name = meta.name(group)
    arguments = native.arguments(group.functional.func, symint=False)
    names = ", ".join(argument.name for argument in arguments)
    return f"""
Tensor plain_{name}({bindings(arguments)}) {{
  static openreg::ResultTypes types;
  if (!openreg::isPlain({names})) {{
    return wrapper_XPU_{name}({names});
  }}
  const auto signature = openreg::ResultTypes::of({names});
  if (const auto dtype = types.find(signature)) {{
    Tensor result = openreg::newResult({arguments[0].name}.sizes(), *dtype);
    openreg::structured_{name}_openreg::impl({names}, result);
    return result;
  }}
  Tensor result = wrapper_XPU_{name}({names});
  types.add(signature, result.scalar_type());
  return result;
}}"""


# [/kernels: shortcut]


# [kernels: file]
def source(
    headers: Sequence[str],
    kernels: Sequence[str],
    index: BackendIndex,
    functions: Sequence[NativeFunction | NativeFunctionsGroup],
    shortcuts: Sequence[str] = (),
) -> str:
    """One C++ file: kernels, torchgen's wrappers, their registration."""

    def written(target: Target) -> list[str]:
        register = RegisterDispatchKey(
            index,
            target,
            SelectiveBuilder.get_nop_selector(),
            rocm=False,
            symint=True,
            class_method_name=None,
            skip_dispatcher_op_registration=False,
        )
        return [text for each in functions for text in register(each)]

    lines = [
        HEAD,
        *headers,
        ALLOCATION,
        "namespace openreg {",
        "namespace {",
        *kernels,
        "} // namespace",
        "} // namespace openreg",
        "namespace {",
        "using namespace at;",
        *gen_registration_helpers(index),
        *written(Target.ANONYMOUS_DEFINITION),
        *shortcuts,
        f"TORCH_LIBRARY_IMPL(aten, {index.dispatch_key}, m) {{",
        *written(Target.REGISTRATION),
        "}",
        "} // namespace",
    ]
    text = "\n".join(lines)
    return text.replace("XPU", "PrivateUse1").replace("_xpu", "_openreg")


def file(part: Sequence[NativeFunctionsGroup]) -> str:
    """The C++ of these structured operators."""
    index = BackendIndex(
        dispatch_key=MODEL,
        use_out_as_primary=True,
        external=False,
        device_guard=True,
        index={
            group.out.func.name: BackendMetadata(
                kernel=f"{meta.name(group)}_openreg",
                structured=True,
                cpp_namespace="openreg",
            )
            for group in part
        },
    )
    kernels = []
    for group in part:
        with native_function_manager(group.out):
            kernels.append(kernel(group))
    bases = sorted({group.functional.func.name.name.base for group in part})
    headers = [
        f"#include <ATen/ops/{base}_{kind}.h>"
        for base in bases
        for kind in ("meta", "cpu_dispatch")
    ]
    short = [group for group in part if elementwise(group)]
    text = source(headers, kernels, index, part, [*map(shortcut, short)])
    for name in map(meta.name, short):
        text = text.replace(
            f"TORCH_FN(wrapper_PrivateUse1_{name})", f"TORCH_FN(plain_{name})"
        )
    return text


# [/kernels: file]


# [kernels: sparse]
def sparse() -> str:
    """Register PyTorch's functions for sparse tensors of any device.

    Those that are the CPU's own are in ops/sparse.cpp, or missing, as are
    conversions to layouts that the device does not have.
    """
    parsed = parse_native_yaml(
        str(PACKAGED / "native_functions.yaml"), str(PACKAGED / "tags.yaml")
    )
    on_cpu = parsed.backend_indices[DispatchKey.SparseCPU].index
    general = {
        name: BackendMetadata(
            kernel=entry.kernel, structured=False, cpp_namespace="at::native"
        )
        for name, entry in on_cpu.items()
        if "_cpu" not in entry.kernel and not entry.kernel.startswith("coo_to")
    }
    functions = [f for f in parsed.native_functions if f.func.name in general]
    bases = sorted({f.func.name.name.base for f in functions})
    index = BackendIndex(
        dispatch_key=DispatchKey.SparseXPU,
        use_out_as_primary=False,
        external=False,
        device_guard=True,
        index=general,
    )
    return source(
        [f"#include <ATen/ops/{base}_native.h>" for base in bases],
        [],
        index,
        functions,
    )


# [/kernels: sparse]


# [kernels: boxed]
def boxed() -> str:
    """The registration of what needs no C++ of its own: see library.h."""
    listed = yaml.safe_load(LISTED.read_text())
    lines = [
        f'  m.impl("{name}", boxed<&{kind}Kernel>());'
        for kind, names in listed.items()
        if kind != "structured"
        for name in names
    ]
    return "\n".join([BOXED, *lines, "}", "} // namespace openreg"])


# [/kernels: boxed]


def write(folder: Path, files: int) -> None:
    """Write the operators into so many files, of about equal size.

    A file that would not change keeps its time, and is not compiled again.
    """
    groups = chosen()
    texts = {"boxed": boxed(), "sparse": sparse()}
    for number in range(files):
        texts[f"structured_{number}"] = file(groups[number::files])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / f"{name}.cpp"
        if not path.exists() or path.read_text() != f"{text}\n":
            path.write_text(f"{text}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 4)
