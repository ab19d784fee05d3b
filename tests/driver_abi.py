"""The signatures of openreg/driver/openreg.h, for ctypes."""

import ctypes
import importlib.util
import os
import sys
import sysconfig
from ctypes import POINTER, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path


class DriverError(Exception):
    """A failed call: the error's name and the sentence that explains it."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


class DeviceProperties(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 64),
        ("total_memory", c_size_t),
        ("compute_engines", c_int),
        ("copy_engines", c_int),
        ("major", c_int),
        ("minor", c_int),
    ]


class PointerAttributes(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("device", c_int),
        ("base", c_void_p),
        ("size", c_size_t),
    ]


RUN = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
MOVE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
DESTROY = ctypes.CFUNCTYPE(None, c_void_p)
DESCRIBE = ctypes.CFUNCTYPE(None, c_void_p, c_size_t)


class KernelStruct(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", RUN),
        ("move", MOVE),
        ("destroy", DESTROY),
    ]


_INT, _POINTER = POINTER(c_int), POINTER(c_void_p)
_CALLS = {
    "orGetDeviceCount": [_INT],
    "orSetDevice": [c_int],
    "orGetDevice": [_INT],
    "orGetDeviceProperties": [POINTER(DeviceProperties), c_int],
    "orDeviceGetState": [c_int, _INT],
    "orInit": [],
    "orDeviceSynchronize": [],
    "orDeviceReset": [],
    "orMalloc": [_POINTER, c_size_t],
    "orFree": [c_void_p],
    "orFreeAsync": [c_void_p, c_void_p],
    "orMemGetInfo": [POINTER(c_size_t), POINTER(c_size_t)],
    "orMallocHost": [_POINTER, c_size_t],
    "orFreeHost": [c_void_p],
    "orPointerGetAttributes": [POINTER(PointerAttributes), c_void_p],
    "orMemExport": [_INT, POINTER(c_size_t), c_void_p],
    "orMemImport": [_POINTER, POINTER(c_size_t), c_int],
    "orMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
    "orMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "orMemsetAsync": [c_void_p, c_int, c_size_t, c_void_p],
    "orDeviceGetStreamPriorityRange": [_INT, _INT],
    "orStreamCreate": [_POINTER],
    "orStreamCreateWithPriority": [_POINTER, c_int],
    "orStreamDestroy": [c_void_p],
    "orStreamGetDefault": [_POINTER],
    "orStreamGetId": [c_void_p, POINTER(c_uint64)],
    "orStreamGetDevice": [c_void_p, _INT],
    "orStreamGetPriority": [c_void_p, _INT],
    "orStreamQuery": [c_void_p],
    "orStreamSynchronize": [c_void_p],
    "orStreamWaitEvent": [c_void_p, c_void_p],
    "orEventCreate": [_POINTER],
    "orEventCreateWithFlags": [_POINTER, ctypes.c_uint],
    "orEventDestroy": [c_void_p],
    "orEventRecord": [c_void_p, c_void_p],
    "orEventQuery": [c_void_p],
    "orEventSynchronize": [c_void_p],
    "orEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "orEventGetDevice": [c_void_p, _INT],
    "orLaunchKernel": [c_void_p, POINTER(KernelStruct), c_void_p, c_size_t],
    "orLaunchHostFunc": [c_void_p, DESTROY, c_void_p],
    "orGetBackingOffset": [POINTER(ctypes.c_ssize_t)],
    "orSetLaunchOrigin": [DESCRIBE],
}
_UNCHECKED = {
    "orGetErrorName": ([c_int], ctypes.c_char_p),
    "orGetErrorString": ([c_int], ctypes.c_char_p),
    "orGetLastError": ([], c_int),
    "orPeekAtLastError": ([], c_int),
    "orGetLastErrorMessage": ([], ctypes.c_char_p),
    "orKernelDevice": ([c_void_p], c_int),
    "orKernelAddress": ([c_void_p, c_void_p], c_void_p),
    "orKernelFail": ([c_void_p, ctypes.c_char_p], None),
}


def library_path() -> Path:
    """The installed driver, found without importing openreg or torch.

    OPENREG_DRIVER names another one. An editable install keeps the library in
    site-packages while the package's sources stay where they are.
    """
    if override := os.environ.get("OPENREG_DRIVER"):
        return Path(override)
    spec = importlib.util.find_spec("openreg")
    folders = [
        Path(f) for f in (spec and spec.submodule_search_locations) or ()
    ]
    installed = (sysconfig.get_path("platlib"), *sys.path)
    folders += [Path(folder) / "openreg" for folder in installed]
    for folder in folders:
        if (folder / "libopenreg.so").is_file():
            return folder / "libopenreg.so"
    raise FileNotFoundError(
        "libopenreg.so is not installed; run `make test`, or name the library "
        "in OPENREG_DRIVER"
    )


def _check(code, _function, _arguments):
    if code:
        message = lib.orGetLastErrorMessage().decode()
        raise DriverError(lib.orGetErrorName(code).decode(), message)
    return code


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    for name, arguments in _CALLS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
        function.errcheck = _check
    for name, (arguments, result) in _UNCHECKED.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


lib = _load()
