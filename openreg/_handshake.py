# Chapter: devices
"""Whether the C++ library fits the torch that is running.

C++ backends have no stable ABI: one built against another release of torch
fails with an undefined symbol, or worse, does not fail. So this is checked
before the library is opened, from a file the build leaves beside it.
"""

import importlib.util
from pathlib import Path


# [devices: handshake]
def release(version: str) -> str:
    """The release line of a version, within which the ABI stays the same.

    >>> release("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def check(running: str) -> None:
    """Raise ImportError unless the library was built for torch `running`."""
    library = importlib.util.find_spec("openreg._C")
    if library is None or library.origin is None:
        raise ImportError(
            "openreg's C++ library is not built; build and install it with "
            "'pip install --no-build-isolation -e .'"
        )
    built = Path(library.origin).with_name("torch_version.txt")
    built_for = built.read_text().strip()
    if release(built_for) != release(running):
        raise ImportError(
            f"openreg was built for torch {built_for} and cannot be used with "
            f"torch {running}: C++ backends have no stable ABI across "
            f"releases. Install torch {release(built_for)}, or build openreg "
            f"again with 'pip install --no-build-isolation .'"
        )


# [/devices: handshake]
