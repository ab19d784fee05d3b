# Chapter: frontend
"""What PyTorch looks up as ``torch.<device>._utils``; the name is PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from openreg.devices import current_device


# [frontend: device-index]
def _get_device_index(
    device: Any, optional: bool = False, allow_cpu: bool = False
) -> int:
    """The index that a device argument means.

    ``torch.load`` asks this for the device that a file or ``map_location``
    names.

    Args:
        device: an index, a device, a string such as ``"openreg:1"``, or None.
        optional: an index that is not named means the current device.
        allow_cpu: answer -1 for the CPU instead of refusing it.

    Raises:
        ValueError: it is another kind of device, or no index is named.

    >>> torch.openreg._utils._get_device_index("openreg:1")
    1
    """
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type == "cpu" and allow_cpu:
            return -1
        if device.type != "openreg":
            raise ValueError(f"expected an openreg device, got {device!r}")
        if device.index is not None:
            return device.index
    if not optional:
        raise ValueError(
            f"expected an index or a device with an index such as "
            f"'openreg:0', got {device!r}"
        )
    return current_device()


# [/frontend: device-index]
