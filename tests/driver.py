"""The driver for the tests, through ctypes: without torch.

Every call is checked: a result other than success raises DriverError. Calls
release the interpreter lock, so that kernels written in Python run while a
test waits for them.
"""

import contextlib
import ctypes
from ctypes import (
    byref,
    c_float,
    c_int,
    c_size_t,
    c_ssize_t,
    c_uint64,
    c_void_p,
)

from driver_abi import (
    DESCRIBE,
    DESTROY,
    MOVE,
    RUN,
    DeviceProperties,
    DriverError,
    KernelStruct,
    PointerAttributes,
    lib,
)

__all__ = ["DESCRIBE", "DESTROY", "RUN", "DriverError", "lib"]

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(
    5
)
UNREGISTERED, HOST, DEVICE = range(3)
BLOCKING_SYNC, DISABLE_TIMING = 1, 2


def _read(function, kind, *arguments):
    result = kind()
    function(byref(result), *arguments)
    return result.value


def _ready(function, handle) -> bool:
    try:
        function(handle)
    except DriverError as error:
        if error.name != "orErrorNotReady":
            raise
        return False
    return True


def device_count() -> int:
    return _read(lib.orGetDeviceCount, c_int)


def set_device(device: int) -> None:
    lib.orSetDevice(device)


def get_device() -> int:
    return _read(lib.orGetDevice, c_int)


@contextlib.contextmanager
def on_device(device: int):
    """Make a device current in this thread for the length of the block."""
    previous = get_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(previous)


def properties(device: int) -> DeviceProperties:
    result = DeviceProperties()
    lib.orGetDeviceProperties(byref(result), device)
    return result


def started(device: int) -> bool:
    result = c_int()
    lib.orDeviceGetState(device, byref(result))
    return bool(result.value)


def synchronize() -> None:
    lib.orDeviceSynchronize()


def malloc(size: int) -> int:
    """Device memory on the current device; 0 for the null pointer."""
    return _read(lib.orMalloc, c_void_p, size) or 0


def free(pointer: int) -> None:
    lib.orFree(pointer)


def free_memory() -> int:
    """Bytes free on the current device."""
    free_bytes, total = c_size_t(), c_size_t()
    lib.orMemGetInfo(byref(free_bytes), byref(total))
    return free_bytes.value


def malloc_host(size: int) -> int:
    return _read(lib.orMallocHost, c_void_p, size) or 0


def free_host(pointer: int) -> None:
    lib.orFreeHost(pointer)


def attributes(pointer: int) -> PointerAttributes:
    result = PointerAttributes()
    lib.orPointerGetAttributes(byref(result), pointer)
    return result


def export(pointer: int) -> tuple[int, int]:
    """A descriptor of the memory's object, and where the pointer lies."""
    descriptor, offset = c_int(), c_size_t()
    lib.orMemExport(byref(descriptor), byref(offset), pointer)
    return descriptor.value, offset.value


def import_(descriptor: int) -> tuple[int, int]:
    """An object mapped on the current device, and its size."""
    pointer, size = c_void_p(), c_size_t()
    lib.orMemImport(byref(pointer), byref(size), descriptor)
    return pointer.value, size.value


def backing_offset() -> int:
    """From a device pointer to where a kernel finds it."""
    return _read(lib.orGetBackingOffset, c_ssize_t)


def copy(dst, src, size: int, kind: int = DEFAULT) -> None:
    """Addresses or ctypes arrays; waits."""
    lib.orMemcpy(dst, src, size, kind)


def upload(data: bytes) -> int:
    """A new block on the current device that holds the bytes."""
    pointer = malloc(len(data))
    copy(pointer, data, len(data), HOST_TO_DEVICE)
    return pointer


def download(pointer: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    copy(data, pointer, size, DEVICE_TO_HOST)
    return data.raw


def priority_range() -> tuple[int, int]:
    """The least and the greatest priority of the current device."""
    least, greatest = c_int(), c_int()
    lib.orDeviceGetStreamPriorityRange(byref(least), byref(greatest))
    return least.value, greatest.value


class KernelContext:
    """What a kernel written in Python gets."""

    def __init__(self, context: int, arguments: int):
        self._context = context
        self.arguments = arguments
        self.device = lib.orKernelDevice(context)

    def address(self, pointer: int) -> int:
        return lib.orKernelAddress(self._context, pointer)

    def read(self, pointer: int, size: int) -> bytes:
        return ctypes.string_at(self.address(pointer), size)

    def write(self, pointer: int, data: bytes) -> None:
        ctypes.memmove(self.address(pointer), data, len(data))

    def fail(self, message: str) -> None:
        lib.orKernelFail(self._context, message.encode())


# The driver keeps the address of a kernel until its queue is done with it,
# which may be at the exit of the process.
_immortal = []


class Kernel:
    """A kernel whose code is `function(KernelContext)`.

    An exception inside fails the kernel, and so reaches the test at the next
    synchronizing call.
    """

    def __init__(self, function, name=None, move=None, destroy=None):
        self._function = function
        name = name or getattr(function, "__name__", "kernel")
        self.struct = KernelStruct(
            name.encode(),
            RUN(self._run),
            MOVE(move) if move else MOVE(),
            DESTROY(destroy) if destroy else DESTROY(),
        )
        _immortal.append(self)

    def _run(self, context, arguments):
        wrapped = KernelContext(context, arguments)
        try:
            self._function(wrapped)
        except BaseException as error:
            wrapped.fail(f"{type(error).__name__}: {error}")


class Stream:
    """A new stream of the current device, unless a handle is given."""

    def __init__(self, priority=None, handle=None):
        if priority is not None:
            handle = _read(lib.orStreamCreateWithPriority, c_void_p, priority)
        self.handle = handle or _read(lib.orStreamCreate, c_void_p)

    @classmethod
    def default(cls) -> "Stream":
        return cls(handle=_read(lib.orStreamGetDefault, c_void_p))

    @property
    def id(self) -> int:
        result = c_uint64()
        lib.orStreamGetId(self.handle, byref(result))
        return result.value

    @property
    def device(self) -> int:
        result = c_int()
        lib.orStreamGetDevice(self.handle, byref(result))
        return result.value

    @property
    def priority(self) -> int:
        result = c_int()
        lib.orStreamGetPriority(self.handle, byref(result))
        return result.value

    def query(self) -> bool:
        return _ready(lib.orStreamQuery, self.handle)

    def synchronize(self) -> None:
        lib.orStreamSynchronize(self.handle)

    def wait(self, event: "Event") -> None:
        lib.orStreamWaitEvent(self.handle, event.handle)

    def destroy(self) -> None:
        lib.orStreamDestroy(self.handle)

    def launch(self, kernel, arguments: bytes = b"") -> None:
        """Queue a Kernel, or a function that becomes one."""
        if not isinstance(kernel, Kernel):
            kernel = Kernel(kernel)
        room = ctypes.create_string_buffer(len(arguments) + 16)
        aligned = (ctypes.addressof(room) + 15) & ~15
        ctypes.memmove(aligned, arguments, len(arguments))
        lib.orLaunchKernel(
            self.handle, byref(kernel.struct), aligned, len(arguments)
        )

    def copy(self, dst, src, size: int, kind: int = DEFAULT) -> None:
        lib.orMemcpyAsync(dst, src, size, kind, self.handle)

    def fill(self, pointer: int, value: int, size: int) -> None:
        lib.orMemsetAsync(pointer, value, size, self.handle)

    def free(self, pointer: int) -> None:
        lib.orFreeAsync(pointer, self.handle)


class Event:
    """An event of the current device."""

    def __init__(self, flags: int = 0):
        self.handle = _read(lib.orEventCreateWithFlags, c_void_p, flags)

    @property
    def device(self) -> int:
        result = c_int()
        lib.orEventGetDevice(self.handle, byref(result))
        return result.value

    def record(self, stream: Stream) -> None:
        lib.orEventRecord(self.handle, stream.handle)

    def query(self) -> bool:
        return _ready(lib.orEventQuery, self.handle)

    def synchronize(self) -> None:
        lib.orEventSynchronize(self.handle)

    def elapsed(self, end: "Event") -> float:
        """Milliseconds from this event's last record to the other's."""
        result = c_float()
        lib.orEventElapsedTime(byref(result), self.handle, end.handle)
        return result.value

    def destroy(self) -> None:
        lib.orEventDestroy(self.handle)
