"""DLPack: no copy, the same place, and the consumer's stream waits."""

import numpy as np
import pytest
import torch
from needs import operators

import openreg

pytestmark = operators


@pytest.fixture
def tensor():
    return torch.arange(24.0).reshape(4, 6).to("openreg:1")


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[1:, ::2],
        lambda t: t.t(),
        lambda t: t[2, 3],
        lambda t: t[:0],
        lambda t: t.to(torch.int16),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.to(torch.complex64),
        lambda t: t > 3,
    ],
)
def test_the_same_memory_at_the_same_place(tensor, view):
    sent = view(tensor)
    got = torch.from_dlpack(sent)
    assert (got.device, got.dtype) == (sent.device, sent.dtype)
    assert (got.shape, got.data_ptr()) == (sent.shape, sent.data_ptr())
    assert torch.equal(got.cpu(), sent.cpu())
    if got.numel() and got.dtype == torch.float32:
        got.fill_(-1.0)
        assert (sent.cpu() == -1).all()


def test_the_memory_lives_as_long_as_the_importer(tensor):
    got = torch.from_dlpack(tensor)
    address = tensor.data_ptr()
    del tensor
    others = [torch.zeros(24, device="openreg:1") for _ in range(8)]
    assert address not in [other.data_ptr() for other in others]
    assert got.sum().item() == sum(range(24))


def test_the_capsule_can_be_handed_over_by_itself(tensor):
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    assert torch.from_dlpack(capsule).device == tensor.device


def test_another_device_takes_a_copy(tensor):
    assert torch.equal(torch.from_dlpack(tensor, device="cpu"), tensor.cpu())
    back = torch.from_dlpack(tensor.cpu(), device="openreg:0")
    assert back.device == torch.device("openreg:0")
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(tensor, device="cpu", copy=False)
    copied = torch.from_dlpack(tensor, copy=True)
    assert copied.data_ptr() != tensor.data_ptr()
    assert copied.device == tensor.device


def test_numpy_refuses_or_copies_and_says_how(tensor):
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        np.asarray(tensor)
    with pytest.raises(RuntimeError, match="Unsupported device"):
        np.from_dlpack(tensor)
    assert np.array_equal(np.from_dlpack(tensor.cpu()), tensor.tolist())


@pytest.mark.parametrize("default", [None, 1])
def test_the_default_stream_waits_for_ours(tensor, default):
    side = torch.Stream("openreg:1")
    done = torch.Event("openreg:1", blocking=True)
    with torch.accelerator.device_index(1), side:
        openreg._sleep(30_000_000)
        done.record(side)
        tensor.__dlpack__(stream=default)
    openreg.default_stream(1).synchronize()
    assert done.query()


def test_a_consumers_stream_waits_for_ours(tensor):
    with torch.accelerator.device_index(1):
        consumer = torch.Stream("openreg:1")
        done = torch.Event("openreg:1")
        openreg._sleep(30_000_000)
        done.record(torch.accelerator.current_stream())
        tensor.__dlpack__(stream=consumer.native_handle)
        consumer.synchronize()
    assert done.query()


def test_no_order_is_made_where_none_is_asked_for(tensor):
    with torch.accelerator.device_index(1):
        other = torch.Stream("openreg:1")
        gate = torch.Event("openreg:1")
        openreg._sleep(50_000_000)
        gate.record(torch.accelerator.current_stream())
        tensor.__dlpack__(stream=-1)
        other.synchronize()
        assert not gate.query()
        gate.synchronize()


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (0, BufferError, "pass 1 for the default stream"),
        ("0", TypeError, "stream must be"),
        (12345678, RuntimeError, "stream"),
    ],
)
def test_a_stream_that_is_none_is_refused(tensor, stream, error, message):
    with pytest.raises(error, match=message):
        tensor.__dlpack__(stream=stream)


def test_a_stream_of_another_device_is_refused(tensor):
    elsewhere = torch.Stream("openreg:0")
    with pytest.raises(ValueError, match="belongs to openreg:0"):
        tensor.__dlpack__(stream=elsewhere.native_handle)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.requires_grad_(),
        lambda t: t.to(torch.complex64).conj(),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_what_a_capsule_cannot_say_is_refused_as_for_any_tensor(tensor, make):
    with pytest.raises(BufferError, match="Can't export"):
        torch.from_dlpack(make(tensor))


def test_tensors_of_other_devices_go_where_they_went():
    host = torch.arange(3)
    assert torch.from_dlpack(host).data_ptr() == host.data_ptr()
    assert host.__dlpack_device__() == np.arange(3).__dlpack_device__()
    with pytest.raises(AssertionError, match="None on cpu"):
        host.__dlpack__(stream=5)


def test_a_subclass_still_overrides_both_methods(tensor):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    seen = []
    loud = tensor.as_subclass(Loud)
    assert torch.from_dlpack(loud).data_ptr() == tensor.data_ptr()
    assert {"__dlpack__", "__dlpack_device__"} <= set(seen)
