"""``nn.DataParallel`` over the devices, and the functions it is made of."""

import copy

import pytest
import torch
from needs import operators
from torch.nn.parallel import DataParallel, comm, data_parallel

pytestmark = operators


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers)


def gradients(module):
    return [parameter.grad.cpu() for parameter in module.parameters()]


@pytest.mark.parametrize("where", ["cpu", "openreg:0", "openreg:1"])
@pytest.mark.parametrize("devices", [None, [0], [0, 1]])
def test_output_and_gradients_are_those_of_one_device(where, devices):
    reference = network()
    inputs = torch.randn(7, 4)
    expected = reference(inputs)
    expected.pow(2).sum().backward()
    module = DataParallel(copy.deepcopy(reference).openreg(0), devices)
    module.zero_grad()
    output = module(inputs.to(where))
    output.pow(2).sum().backward()
    assert output.device == torch.device("openreg:0")
    torch.testing.assert_close(output.cpu(), expected)
    for ours, theirs in zip(
        gradients(module), gradients(reference), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_every_device_gets_a_part_of_the_batch():
    class Where(torch.nn.Module):
        def forward(self, inputs):
            seen.append((str(inputs.device), len(inputs)))
            return inputs

    seen = []
    DataParallel(Where().openreg(), [0, 1])(torch.ones(5, 2))
    assert sorted(seen) == [("openreg:0", 3), ("openreg:1", 2)]


def test_output_device_and_complex_inputs():
    inputs = torch.randn(4, 3, dtype=torch.cfloat)
    out = data_parallel(torch.nn.Identity().openreg(), inputs, [0, 1], 1)
    assert out.device == torch.device("openreg:1")
    assert torch.equal(out.cpu(), inputs)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [None, [1, 3]])
def test_scatter_and_gather_are_inverse(dim, sizes):
    whole = torch.arange(16.0).reshape(4, 4)
    parts = comm.scatter(whole, [0, 1], sizes, dim)
    assert [part.get_device() for part in parts] == [0, 1]
    if sizes is not None:
        assert [part.size(dim) for part in parts] == sizes
    for destination in (0, 1, "cpu"):
        back = comm.gather(parts, dim, destination)
        assert torch.equal(back.cpu(), whole)
        wanted = torch.device(
            "cpu" if destination == "cpu" else f"openreg:{destination}"
        )
        assert back.device == wanted


def test_results_go_into_what_the_caller_gives():
    whole = torch.arange(6.0).to("openreg:0")
    out = [torch.zeros(6, device=f"openreg:{i}") for i in range(2)]
    comm.broadcast(whole, out=out)
    assert all(torch.equal(part.cpu(), whole.cpu()) for part in out)
    halves = [
        torch.zeros(2, device="openreg:0"),
        torch.zeros(4).to("openreg:1"),
    ]
    comm.scatter(whole, out=halves)
    assert halves[1].tolist() == [2, 3, 4, 5]
    assert torch.equal(comm.gather(halves, out=torch.zeros(6)), whole.cpu())


def test_a_sum_over_devices():
    parts = [torch.full((3,), 1.0 + i).to(f"openreg:{i}") for i in range(2)]
    assert comm.reduce_add(parts, 1).tolist() == [3, 3, 3]
    (total,) = comm.reduce_add_coalesced([[part] for part in parts], 0)
    assert (total.get_device(), total.tolist()) == (0, [3, 3, 3])


def test_a_broadcast_leaves_the_source_where_it_is():
    source = torch.ones(2, device="openreg:1")
    copies = comm.broadcast(source, [1, 0])
    assert copies[0].data_ptr() == source.data_ptr()
    assert copies[1].device == torch.device("openreg:0")
    many = comm.broadcast_coalesced([source, source * 2], [1, 0])
    assert [[t.sum().item() for t in row] for row in many] == [[2, 4], [2, 4]]


def test_an_index_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="9"):
        comm.scatter(torch.ones(2, 4, device="openreg"), [0, 9])
    with pytest.raises(RuntimeError, match="9"):
        comm.broadcast(torch.ones(2, 4, device="openreg"), [0, 9])
