# Chapter: streams
"""Callbacks for what happens to streams, events and memory.

PyTorch's C++ code looks a device's registries up here by these names once
``torch._C._activate_gpu_trace()`` was called. ``torch.cuda._gpu_trace`` has
the same names.
"""

from torch._utils import CallbackRegistry

# [streams: registries]
EventCreationCallbacks: CallbackRegistry[int]
EventCreationCallbacks = CallbackRegistry("openreg event creation")
EventDeletionCallbacks: CallbackRegistry[int]
EventDeletionCallbacks = CallbackRegistry("openreg event deletion")
EventRecordCallbacks: CallbackRegistry[int, int]
EventRecordCallbacks = CallbackRegistry("openreg event record")
EventWaitCallbacks: CallbackRegistry[int, int]
EventWaitCallbacks = CallbackRegistry("openreg event wait")
MemoryAllocationCallbacks: CallbackRegistry[int]
MemoryAllocationCallbacks = CallbackRegistry("openreg memory allocation")
MemoryDeallocationCallbacks: CallbackRegistry[int]
MemoryDeallocationCallbacks = CallbackRegistry("openreg memory deallocation")
StreamCreationCallbacks: CallbackRegistry[int]
StreamCreationCallbacks = CallbackRegistry("openreg stream creation")
DeviceSynchronizationCallbacks: CallbackRegistry[[]]
DeviceSynchronizationCallbacks = CallbackRegistry("openreg synchronization")
StreamSynchronizationCallbacks: CallbackRegistry[int]
StreamSynchronizationCallbacks = CallbackRegistry("openreg stream wait")
EventSynchronizationCallbacks: CallbackRegistry[int]
EventSynchronizationCallbacks = CallbackRegistry("openreg event wait by host")
# [/streams: registries]
