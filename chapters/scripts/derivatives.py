"""What the gradient formulas of PyTorch call, and whether it is there.

The formulas ship with torch, as data of its code generator.
"""

import re
from pathlib import Path

import torch
import torchgen
import yaml

FORMULAS = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
OPERATORS = {}  # operator: its overloads
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("aten::") and not name.endswith("out"):
        OPERATORS.setdefault(re.split(r"::|\.", name)[1], []).append(name)
# Any of them serves the device. All but the first serve every device.
KEYS = (
    "PrivateUse1",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def served(operator, keys=KEYS):
    """Whether an overload of the operator has a kernel at one of the keys."""
    if "overrideable" in operator:  # the composite one only raises an error
        keys = KEYS[:1]
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, key)
        for overload in OPERATORS.get(operator, ())
        for key in keys
    )


def formulas():
    """Pairs: a forward operator with a kernel of the device, its formulas."""
    for entry in yaml.safe_load(FORMULAS.read_text()):
        operator = re.match(r"\w+", entry.pop("name"))[0]
        if served(operator, KEYS[:1]):
            parts = entry.get("dispatch", {}).get("Default", entry)
            texts = [text for text in parts.values() if isinstance(text, str)]
            yield operator, texts


def calls(texts):
    """The operators that these formulas call."""
    names = re.findall(r"\b([a-z_]\w*?)(?:_symint)?\(", " ".join(texts))
    return {name for name in names if name in OPERATORS}


def missing():
    """Forward operators of the device, and what their formulas call in vain."""
    found = {}
    for operator, texts in formulas():
        absent = sorted(name for name in calls(texts) if not served(name))
        if absent:
            found[operator] = absent
    return found
