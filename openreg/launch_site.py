# Chapter: kernels
"""Which line of the user's program is running, for messages about its work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

# [kernels: launch-site]
_NOT_THE_USERS = tuple(
    str(Path(file).parent) + "/" for file in (torch.__file__, __file__)
)


def users_frame() -> FrameType | None:
    """The innermost frame outside of torch and of this package, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_THE_USERS, "<frozen", "<eval_with_key>")):
            return frame
        frame = frame.f_back
    return None


def outside_python() -> str:
    """What runs on a thread without a line of the user's."""
    node = torch._C._current_autograd_node()
    if node is None:
        return "a thread without Python"
    return f"autograd engine ({node.name()})"


def described() -> str:
    """File, line and function of the user's line, or what runs instead."""
    frame = users_frame()
    if frame is None:
        return outside_python()
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"


# [/kernels: launch-site]
