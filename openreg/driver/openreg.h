// Chapter: devices
/**
 * The simulated accelerator's C API.
 *
 * A real chip ships a header like this one and a shared library behind it.
 * Nothing here knows of PyTorch, and everything above this line of the stack
 * knows the chip only through this header: a port replaces the library and
 * keeps the rest.
 *
 * Conventions, the same for every function:
 *
 * - The result is an ::orError. Results come back through the leading pointer
 *   arguments, which are written only on success.
 * - "The current device" is a property of the calling thread (orSetDevice()).
 * - Sizes are bytes, times are as named, indices start at 0.
 * - A function that waits for the device also reports the device's pending
 *   asynchronous error, once. Such functions are marked *synchronizing*.
 * - A failed call leaves a sentence behind that orGetLastErrorMessage() returns.
 */
#ifndef OPENREG_DRIVER_OPENREG_H
#define OPENREG_DRIVER_OPENREG_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define OR_API __attribute__((visibility("default")))
#else
#define OR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------ errors */

// [devices: error-codes]
/** What a call reports. */
typedef enum orError {
  /** The call did what it says. */
  orSuccess = 0,
  /** An argument is out of its range, or null where it must not be. */
  orErrorInvalidValue = 1,
  /** The device has no block that large left. */
  orErrorOutOfMemory = 2,
  /** The device index does not name a device. */
  orErrorInvalidDevice = 3,
  /** The stream or event was destroyed, or never made. */
  orErrorInvalidHandle = 4,
  /** The pointer is not the start of a live allocation. */
  orErrorInvalidPointer = 5,
  /** A copy or fill reaches past the end of its allocation. */
  orErrorOutOfBounds = 6,
  /** Work is still pending; not a failure. */
  orErrorNotReady = 7,
  /** An environment variable has a value that cannot be used. */
  orErrorInvalidConfiguration = 8,
  /** A kernel failed on the device. */
  orErrorKernelFailed = 9,
  /** The device was lost to an earlier kernel failure; only a reset helps. */
  orErrorDeviceLost = 10,
  /** This process is a fork of one that had already started the driver. */
  orErrorForked = 11,
  /** The process is exiting; the device takes no more work. */
  orErrorShutdown = 12,
  /** The operating system refused memory or a thread. */
  orErrorSystem = 13,
  /** The call may not be made from a kernel or a host function. */
  orErrorNotPermitted = 14,
} orError;
// [/devices: error-codes]

/** The enumerator's name, such as ``"orErrorOutOfMemory"``. Never null. */
OR_API const char* orGetErrorName(orError error);

/** One general sentence about an error code. Never null. */
OR_API const char* orGetErrorString(orError error);

/**
 * The calling thread's last error, which is then cleared.
 *
 * ::orErrorNotReady is an answer rather than an error and is not kept here.
 */
OR_API orError orGetLastError(void);

/** Like orGetLastError(), without clearing it. */
OR_API orError orPeekAtLastError(void);

/**
 * What exactly went wrong in the calling thread's last failed call: the
 * device, the kernel, the sizes. Valid until this thread's next failed call.
 * Never null.
 */
OR_API const char* orGetLastErrorMessage(void);

/* ----------------------------------------------------------------- devices */

/** What a device is. */
typedef struct orDeviceProp {
  /** Name of the product, terminated by a zero byte. */
  char name[64];
  /** Memory capacity in bytes. */
  size_t total_memory;
  /** Engines that run kernels; as many streams make progress at once. */
  int compute_engines;
  /** Engines that copy memory beside the kernels. */
  int copy_engines;
  /** Version of the architecture. */
  int major;
  /** Revision of the architecture. */
  int minor;
} orDeviceProp;

// [devices: device-functions]
/**
 * How many devices there are; 0 is a valid answer and not an error.
 *
 * Reads ``OPENREG_DEVICE_COUNT`` (0 to 16, default 2). Does not start the
 * driver, so a process may ask and then fork.
 */
OR_API orError orGetDeviceCount(int* count);

/** Make `device` the calling thread's current device. Starts nothing. */
OR_API orError orSetDevice(int device);

/** The calling thread's current device; 0 in a new thread. */
OR_API orError orGetDevice(int* device);

/** What a device is. Starts nothing and leaves the current device alone. */
OR_API orError orGetDeviceProperties(orDeviceProp* properties, int device);

/**
 * Whether the device has started: 1 from the first call that needs memory, a
 * stream or an event in this process. Starts nothing.
 */
OR_API orError orDeviceGetState(int device, int* started);

/** Start the driver and the current device, if that has not happened yet. */
OR_API orError orInit(void);

/** Wait for all work of the current device. *Synchronizing.* */
OR_API orError orDeviceSynchronize(void);

/**
 * Wait for the current device's work and forget its errors, a lost device
 * included. Memory and streams stay.
 */
OR_API orError orDeviceReset(void);
// [/devices: device-functions]

/* ------------------------------------------------------------------ memory */

/** Where a pointer points. */
typedef enum orMemoryType {
  /** Ordinary host memory: pageable, unknown to the driver. */
  orMemoryUnregistered = 0,
  /** Page-locked host memory from orMallocHost(). */
  orMemoryHost = 1,
  /** Device memory. */
  orMemoryDevice = 2,
} orMemoryType;

/** What the driver knows about a pointer. */
typedef struct orPointerAttributes {
  orMemoryType type;
  /** Owner of device memory, -1 for host memory. */
  int device;
  /** Start of the allocation the pointer lies in, or null. */
  void* base;
  /** Size of that allocation in bytes, or 0. */
  size_t size;
} orPointerAttributes;

/**
 * Allocate device memory on the current device.
 *
 * `*ptr` is aligned to 512 bytes and lies in the device's address window: any
 * host access to it faults, with a message that names the device. 0 bytes give
 * a null pointer. ::orErrorOutOfMemory when no free range is large enough.
 */
OR_API orError orMalloc(void** ptr, size_t bytes);

/**
 * Free device memory, after waiting for its device's work.
 *
 * Callers of a free seldom look at its result, so a pending asynchronous error
 * is left for the next synchronizing call. Null is fine. From a kernel or a
 * host function: ::orErrorNotPermitted. ::orErrorInvalidPointer for anything that is not the start of
 * a live allocation, a second free included.
 */
OR_API orError orFree(void* ptr);

/** A queue of work on one device, made by orStreamCreate(). */
typedef struct orStream* orStream_t;

/** A point in a stream that others can wait for, made by orEventCreate(). */
typedef struct orEvent* orEvent_t;

/**
 * Free device memory once the work now queued on `stream` is done. Does not
 * wait. The pointer must not be used again by any other call.
 */
OR_API orError orFreeAsync(void* ptr, orStream_t stream);

/** Free and total memory of the current device, in bytes. */
OR_API orError orMemGetInfo(size_t* free_bytes, size_t* total_bytes);

/** Allocate page-locked host memory, aligned to 64 bytes. */
OR_API orError orMallocHost(void** ptr, size_t bytes);

/**
 * Free page-locked memory, after waiting for the work of all devices. Reports
 * no asynchronous error. Null is fine. From a host function it does not wait.
 */
OR_API orError orFreeHost(void* ptr);

/** Where a pointer points. Unknown pointers are ::orMemoryUnregistered. */
OR_API orError
orPointerGetAttributes(orPointerAttributes* attributes, const void* ptr);

/** Direction of a copy; a wrong one is ::orErrorInvalidValue. */
typedef enum orMemcpyKind {
  orMemcpyHostToHost = 0,
  orMemcpyHostToDevice = 1,
  orMemcpyDeviceToHost = 2,
  orMemcpyDeviceToDevice = 3,
  /** Look the direction up from the pointers. */
  orMemcpyDefault = 4,
} orMemcpyKind;

/**
 * Copy memory and wait. Ordered after the default stream's work of the current
 * device. *Synchronizing.*
 *
 * Both ranges are checked against their allocations (::orErrorOutOfBounds);
 * the ranges must not overlap.
 */
OR_API orError
orMemcpy(void* dst, const void* src, size_t bytes, orMemcpyKind kind);

/**
 * Copy memory in stream order.
 *
 * Returns at once where a real chip would: between devices, and between a
 * device and page-locked memory. With pageable host memory the call returns
 * when the copy is done, and is then *synchronizing*.
 */
OR_API orError orMemcpyAsync(
    void* dst,
    const void* src,
    size_t bytes,
    orMemcpyKind kind,
    orStream_t stream);

/** Set bytes of device memory to `value` in stream order; checks bounds. */
OR_API orError
orMemsetAsync(void* ptr, int value, size_t bytes, orStream_t stream);

// [frontend: sharing-functions]
/**
 * A descriptor with which other processes can map the allocation `ptr` lies in:
 * the caller's to close, and to send through a Unix socket. `*offset` is where
 * in the allocation `ptr` lies.
 *
 * The first export of an allocation moves it from private memory to a memory
 * object, and waits for the commands that run now, on all devices; the queued
 * ones follow afterwards. Later exports, and those of imported memory, give
 * the same object. It lives as long as anybody has it allocated, imported or
 * open, and never changes its size.
 *
 * The allocation must have its pages to itself: one of less than 4096 bytes
 * is ::orErrorInvalidValue. ::orErrorInvalidPointer outside of any live
 * allocation; from a kernel or a host function ::orErrorNotPermitted;
 * ::orErrorSystem when there are too many open files.
 */
OR_API orError orMemExport(int* fd, size_t* offset, const void* ptr);

/**
 * Map what orMemExport() exported, here or in another process, and give its
 * size. The descriptor may be closed then. Nothing orders the processes' work:
 * the exporter waits for what must come before, and says so to the importer.
 *
 * The memory counts as allocated on the current device, which must be the
 * exporter's (else ::orErrorInvalidDevice), and goes with orFree() or
 * orFreeAsync(), which leave the object to the others. Each import is another
 * mapping. ::orErrorInvalidValue for a descriptor of anything else;
 * ::orErrorOutOfMemory as from orMalloc().
 */
OR_API orError orMemImport(void** ptr, size_t* bytes, int fd);
// [/frontend: sharing-functions]

/* ----------------------------------------------------------------- streams */

/**
 * The least and the greatest priority of the current device's streams. As on
 * other chips a smaller number is a greater priority.
 */
OR_API orError orDeviceGetStreamPriorityRange(int* least, int* greatest);

/** Make a stream on the current device with priority 0. */
OR_API orError orStreamCreate(orStream_t* stream);

/** Make a stream on the current device; the priority is clamped. */
OR_API orError orStreamCreateWithPriority(orStream_t* stream, int priority);

/**
 * Destroy a stream. Work already queued still runs. Does not wait. The default
 * stream cannot be destroyed.
 */
OR_API orError orStreamDestroy(orStream_t stream);

/**
 * The default stream of the current device: a queue of its own, which no
 * created stream shares. Wherever a stream is taken, null means this one.
 */
OR_API orError orStreamGetDefault(orStream_t* stream);

/** A number that no other stream of this process has; 0 is never used. */
OR_API orError orStreamGetId(orStream_t stream, uint64_t* id);

OR_API orError orStreamGetDevice(orStream_t stream, int* device);
OR_API orError orStreamGetPriority(orStream_t stream, int* priority);

/** ::orSuccess if nothing is pending or running, else ::orErrorNotReady. */
OR_API orError orStreamQuery(orStream_t stream);

/** Wait for the work queued on a stream. *Synchronizing.* */
OR_API orError orStreamSynchronize(orStream_t stream);

/**
 * Hold back what is queued on `stream` from now on until the event's most
 * recent record, as of this call, has happened. Nothing to do for an event
 * never recorded. Stream and event may belong to different devices.
 */
OR_API orError orStreamWaitEvent(orStream_t stream, orEvent_t event);

/* ------------------------------------------------------------------ events */

/** Flags of orEventCreateWithFlags(), to be combined with ``|``. */
enum {
  orEventDefault = 0,
  /** Waiting host threads sleep at once instead of spinning for a moment. */
  orEventBlockingSync = 1,
  /** No time stamps: cheaper, and orEventElapsedTime() refuses it. */
  orEventDisableTiming = 2,
};

/** Make an event on the current device. */
OR_API orError orEventCreate(orEvent_t* event);
OR_API orError orEventCreateWithFlags(orEvent_t* event, unsigned flags);

/** Destroy an event. Records and waits already queued still take place. */
OR_API orError orEventDestroy(orEvent_t event);

/**
 * Queue a record on `stream`, of the event's own device. Each record is a new
 * version: waits and queries refer to the record that preceded *them*.
 */
OR_API orError orEventRecord(orEvent_t event, orStream_t stream);

/**
 * ::orSuccess if the last record has happened or there was none, else
 * ::orErrorNotReady.
 */
OR_API orError orEventQuery(orEvent_t event);

/** Wait for the event's last record. *Synchronizing.* */
OR_API orError orEventSynchronize(orEvent_t event);

/**
 * Milliseconds between the last records of two events, by the device's clock.
 * ::orErrorNotReady while either is pending, ::orErrorInvalidValue when either
 * was never recorded or takes no time stamps.
 */
OR_API orError
orEventElapsedTime(float* milliseconds, orEvent_t start, orEvent_t end);

OR_API orError orEventGetDevice(orEvent_t event, int* device);

/* ----------------------------------------------------------------- kernels */

/** What a running kernel can ask about itself. */
typedef struct orKernelContext orKernelContext;

/**
 * A kernel: its name and its code.
 *
 * Arguments are copied into the queue at launch, so the caller's copy may go.
 * `move` constructs an argument block at `dst` from the one at `src` and
 * destroys nothing; null means the block is copied byte by byte. `destroy`
 * ends the queue's copy after the kernel ran, was skipped, or failed; null
 * means there is nothing to do. The struct itself must outlive the queue:
 * make it static.
 */
typedef struct orKernel {
  const char* name;
  void (*run)(orKernelContext* context, void* args);
  void (*move)(void* dst, void* src);
  void (*destroy)(void* args);
} orKernel;

/**
 * Queue a kernel on a stream and return; may be called by several host threads
 * on one stream.
 *
 * `args` points to `bytes` bytes, aligned to 16. The kernel runs on one of the
 * device's compute engines, after everything queued before it on the stream.
 * With ``OPENREG_LAUNCH_BLOCKING=1`` every launch waits, and is *synchronizing*.
 */
OR_API orError orLaunchKernel(
    orStream_t stream, const orKernel* kernel, void* args, size_t bytes);

/** Queue a call of a host function, in stream order, on an engine's thread. */
OR_API orError
orLaunchHostFunc(orStream_t stream, void (*function)(void*), void* data);

/** The device a kernel runs on. */
OR_API int orKernelDevice(const orKernelContext* context);

/**
 * Where a kernel finds device memory: the address, inside the engine, of a
 * device pointer. Costs one addition. A pointer into another device's window
 * is given back unchanged, and touching it faults.
 */
OR_API void* orKernelAddress(const orKernelContext* context, const void* ptr);

/**
 * Report that this kernel failed. The message is kept with the kernel's name
 * and stream until the next synchronizing call on the device.
 */
OR_API void orKernelFail(orKernelContext* context, const char* message);

/**
 * The distance from a device pointer to its backing address, the same for all
 * devices: what orKernelAddress() adds. For code that prepares a kernel's
 * arguments on the host. Reading the backing address outside a kernel is a
 * data race with the device.
 */
OR_API orError orGetBackingOffset(ptrdiff_t* offset);

/**
 * Install a function that describes who is launching, called on the launching
 * thread when ``OPENREG_TRACE_LAUNCHES=1``. It writes at most `size` bytes, the
 * final zero included. The text appears in the message of a failed kernel.
 */
OR_API orError orSetLaunchOrigin(void (*describe)(char* text, size_t size));

#ifdef __cplusplus
}
#endif

#endif /* OPENREG_DRIVER_OPENREG_H */
