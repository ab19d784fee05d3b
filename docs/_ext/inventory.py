"""Write docs/inventories/torch.inv: the PyTorch names that the guide links to.

A build then needs no network. Add a name here when `-n` reports it missing,
and run ``python docs/_ext/inventory.py``.
"""

import zlib
from pathlib import Path

HEAD = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: 2.13\n"
HEAD += "# The remainder of this file is compressed using zlib.\n"
PAGES = {
    "torch.AcceleratorError": ("py:exception", "torch.html"),
    "torch.OutOfMemoryError": ("py:exception", "torch.html"),
    "torch.autograd.Function": ("py:class", "autograd.html"),
    "torch.device": ("py:class", "tensor_attributes.html"),
    "torch.dtype": ("py:class", "tensor_attributes.html"),
    "torch.library.custom_op": ("py:function", "library.html"),
    "torch.library.opcheck": ("py:function", "library.html"),
    "torch.Tensor": ("py:class", "tensors.html"),
}
OWN_PAGE = {
    "py:class": ["torch.Event", "torch.Generator", "torch.Stream"],
    "py:function": [
        "torch.accelerator.current_accelerator",
        "torch.accelerator.device_count",
        "torch.accelerator.device_index",
        "torch.accelerator.is_available",
        "torch.accelerator.set_device_index",
        "torch.accelerator.synchronize",
        "torch.autograd.gradcheck.gradcheck",
        "torch.cuda.ipc_collect",
        "torch.cuda.set_device",
        "torch.empty",
        "torch.empty_strided",
        "torch.load",
        "torch.manual_seed",
        "torch.save",
        "torch.utils.generate_methods_for_privateuse1_backend",
        "torch.utils.rename_privateuse1_backend",
    ],
}

if __name__ == "__main__":
    lines = [f"{n} {role} 1 {page}#$ -\n" for n, (role, page) in PAGES.items()]
    for role, names in OWN_PAGE.items():
        lines += [f"{n} {role} 1 generated/{n}.html#$ -\n" for n in names]
    target = Path(__file__).parents[1] / "inventories" / "torch.inv"
    body = zlib.compress("".join(sorted(lines)).encode(), 9)
    target.write_bytes(HEAD.encode() + body)
