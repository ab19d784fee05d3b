"""Print who runs inside whom while a statement is imported, as JSON.

    python import_order.py "import openreg"

Each line of the result is a name, its depth, and the steps at which it begins
and ends.
"""

import json
import sys

MODULES = {"torch", "openreg", "openreg_autoload"}
FUNCTIONS = {
    ("torch", "_import_device_backends"): "torch calls its entry points",
    ("openreg_autoload", "load"): "load()",
}

spans, stack, step = [], [], 0


def name_of(frame):
    module = frame.f_globals.get("__name__")
    function = frame.f_code.co_name
    if function == "<module>" and module in MODULES:
        return module
    return FUNCTIONS.get((module, function))


def watch(frame, event, argument):
    global step
    if event not in {"call", "return"} or not (name := name_of(frame)):
        return
    if event == "call":
        spans.append([name, len(stack), step, None])
        stack.append(spans[-1])
    else:
        stack.pop()[3] = step
    step += 1


sys.setprofile(watch)
exec(sys.argv[1])
sys.setprofile(None)
print(json.dumps(spans))
