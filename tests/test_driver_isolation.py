"""Device memory is out of the host's reach, and a fault is named rightly."""

import signal

import driver_child
import pytest

ACCESS = {
    "read": "ctypes.string_at(block + 5, 1)",
    "write": "ctypes.memset(block + 5, 1, 1)",
}


def fault(code, *options):
    """What a process says that must die from a memory fault."""
    process = driver_child.run(code, *options)
    assert process.returncode == -signal.SIGSEGV, process.stderr
    return process.stderr


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("access", ACCESS)
def test_host_access_dies_with_the_device_named(access, device):
    code = f"""
    driver.set_device({device})
    block = driver.upload(b"device memory")
    print(hex(block + 5), file=sys.stderr)
    {ACCESS[access]}
    """
    first, *message = fault(code).splitlines()
    assert f"openreg:{device}" in message[0]
    assert f"openreg:{1 - device}" not in message[0]
    assert first in message[0]


def test_freed_device_memory_stays_out_of_reach():
    code = """
    block = driver.upload(b"device memory")
    driver.free(block)
    ctypes.string_at(block, 1)
    """
    assert "openreg:0" in fault(code)


def test_another_thread_is_caught_as_well():
    code = """
    block = driver.upload(b"device memory")
    driver.set_device(1)
    thread = threading.Thread(target=ctypes.string_at, args=(block, 1))
    thread.start()
    thread.join()
    """
    assert "openreg:0" in fault(code)


def test_kernel_cannot_reach_another_device():
    code = """
    block = driver.upload(b"device memory")
    driver.set_device(1)
    stream = driver.Stream()
    stream.launch(lambda kernel: print(kernel.read(block, 4)))
    stream.synchronize()
    """
    assert "openreg:0" in fault(code)


def test_kernel_address_is_the_constant_distance_away():
    code = """
    offset = ctypes.c_ssize_t()
    driver.lib.orGetBackingOffset(ctypes.byref(offset))
    for device in (0, 1):
        with driver.on_device(device):
            block, found = driver.malloc(8), []
            stream = driver.Stream()
            stream.launch(lambda it: found.append(it.address(block + 3)))
            stream.synchronize()
            assert found == [block + 3 + offset.value]
    """
    driver_child.output(code)


FAULT_ELSEWHERE = "ctypes.string_at(8, 1)"


def test_fault_elsewhere_is_not_blamed_on_the_device():
    code = f"block = driver.upload(b'device memory')\n{FAULT_ELSEWHERE}\n"
    assert "openreg" not in fault(code)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_earlier_fault_handler_still_runs(elsewhere):
    access = FAULT_ELSEWHERE if elsewhere else ACCESS["read"]
    code = f"""
    block = driver.upload(b"device memory")
    {access}
    """
    message = fault(code, "-X", "faulthandler")
    assert "Fatal Python error: Segmentation fault" in message
    assert ("openreg:0" in message) is not elsewhere


def test_later_fault_handler_still_runs():
    """It sends the signal on without an address, so nothing is blamed."""
    code = f"""
    block = driver.upload(b"device memory")
    import faulthandler
    faulthandler.enable()
    {FAULT_ELSEWHERE}
    """
    message = fault(code)
    assert "Fatal Python error: Segmentation fault" in message
    assert "openreg:" not in message
