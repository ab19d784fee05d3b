"""What the sweep is told in advance, each with the reason."""

# Their memory is not initialized: only shape, strides and dtype are compared.
UNINITIALIZED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}

# What the device refuses on purpose where the CPU does not: the reason goes
# into the table. By name, and by name and mode.
REFUSALS: dict[str, str] = dict.fromkeys(
    ["sparse_sampled_addmm", "sparse_mm_reduce"],
    "the device has no compressed sparse tensors (CSR)",
)

REFUSALS["addbmm in-place"] = "in place, the CPU changes the input's size"

# Differences that count as right, and why: by name, by name and mode, or by
# these and the kind of the arguments.
ACCEPTED: dict[str, tuple[str, str]] = dict.fromkeys(
    ["linalg_lstsq", "linalg_lstsq_grad_oriented"],
    ("stride", "the CPU gives a part of a larger matrix"),
)
ACCEPTED |= dict.fromkeys(
    ["fft_hfft2", "fft_hfftn", "fft_ifft", "fft_ihfft", "fft_rfft2",
     "fft_rfftn"],
    ("stride", "the CPU's FFT library does not do as the meta kernel says"),
)  # fmt: skip
ACCEPTED |= dict.fromkeys(
    ["addbmm", "arange", "eye", "linspace", "linspace_tensor_overload",
     "logspace", "logspace_tensor_overload", "mode", "narrow_copy",
     "nn_functional_logsigmoid"],
    ("warning", "the CPU resizes `out=` without the warning that is due"),
)  # fmt: skip
ACCEPTED |= dict.fromkeys(
    ["_native_batch_norm_legit forward", "native_batch_norm forward"],
    ("other error IndexError", "it names the dimension that is missing"),
)
ACCEPTED["add out"] = (
    "error RuntimeError",
    "a Boolean alpha is checked against the dtype of `out=`, but on the CPU",
)
ACCEPTED["nn_functional_linear_cross_entropy_chunked_none backward"] = (
    "value",
    "PyTorch adds half precision up in single precision on the CPU alone",
)
ACCEPTED["nn.MultiMarginLoss forward empty"] = (
    "value",
    "the CPU's loss of no samples is what was in the memory before",
)
ACCEPTED["nn.GroupNorm backward"] = (
    "stride",
    "PyTorch's formula wants contiguous tensors from all devices but the CPU",
)
ACCEPTED["kron"] = ("mutation", "the CPU does not count a resized `out=`")
ACCEPTED["torch__scaled_mm_v2"] = ("no error", "copies to the CPU are dense")


def accepts(name: str, mode: str, what: str, wrong: str) -> bool:
    """Whether a difference counts as right; `what` names the call."""
    keys = (f"{name} {mode} {what.split()[-1]}", f"{name} {mode}", name)
    return any(ACCEPTED.get(key, ("",))[0] == wrong != "" for key in keys)


# Their arguments after the first must lie on the CPU.
HOST_ARGUMENTS = {"tensor_split"}

# Without a tensor that says where, they need to be told.
FACTORIES = {"arange", "linspace", "logspace"}

# They take tensors of several devices, on other accelerators too.
MIXED: dict[str, str] = dict.fromkeys(
    ["broadcast_tensors", "expand_as", "reshape_as", "resize_as_", "view_as"],
    "only the shape of the second tensor matters",
)
MIXED |= dict.fromkeys(
    [
        "as_strided_scatter",
        "diagonal_scatter",
        "select_scatter",
        "slice_scatter",
        "to",
    ],
    "copies, and a copy may cross devices",
)
MIXED |= dict.fromkeys(
    [
        "__getitem__",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "index_put",
        "nn.functional.ctc_loss",
        "tensor_split",
    ],
    "indices and lengths may lie elsewhere",
)
MIXED |= dict.fromkeys(
    [
        "jiterator_2inputs_2outputs",
        "jiterator_4inputs_with_extra_args",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
    ],
    "for CUDA alone",
)
