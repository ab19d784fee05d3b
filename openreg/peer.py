# Chapter: frontend
"""What two devices can do with each other's memory."""

from __future__ import annotations

from openreg.devices import Device, _index, get_device_properties


# [frontend: peer]
def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether a kernel of one device can use memory of another: it cannot.

    The driver's contract for ``orKernelAddress()`` says so. Copies between two
    devices need no such access; they never go through the host.

    Raises:
        RuntimeError: there is no such device.

    >>> import torch
    >>> torch.openreg.can_device_access_peer(0, 1)
    False
    """
    for each in (_index(device), _index(peer_device, optional=False)):
        get_device_properties(each)  # refuses what is not there
    return False


# [/frontend: peer]
