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

# Differences that count as right: by name, what differs and why.
ACCEPTED: dict[str, tuple[str, str]] = dict.fromkeys(
    ["linalg_lstsq", "linalg_lstsq_grad_oriented"],
    ("stride", "the CPU gives a part of a larger matrix"),
)

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
