"""A module that moves keeps its parameters: the same objects."""

import copy

import pytest
import torch
from needs import operators

pytestmark = operators


def tied():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def step(model, optimizer, device):
    optimizer.zero_grad()
    model(torch.ones(2, 4).to(device)).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("path", [["openreg"], ["openreg:1", "cpu"]])
def test_parameters_stay_the_objects_that_they_were(path):
    model = tied()
    parameters = list(model.parameters())
    for device in path:
        model.to(device)
        moved = list(model.parameters())
        assert all(a is b for a, b in zip(parameters, moved, strict=True))
        assert model[0].weight is model[1].weight
        assert {str(p.device).split(":")[0] for p in moved} == {
            device.split(":")[0]
        }


def test_an_optimizer_made_before_the_move_trains_the_model():
    model = tied()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.to("openreg")
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        step(model, optimizer, "openreg")
        step(reference, expected, "cpu")
    for ours, theirs in zip(
        model.parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_gradients_move_with_their_parameters():
    model = tied()
    model(torch.ones(2, 4)).sum().backward()
    gradient = model[0].bias.grad.clone()
    model.to("openreg")
    assert model[0].bias.grad.device.type == "openreg"
    assert torch.equal(model[0].bias.grad.cpu(), gradient)
    model(torch.ones(2, 4, device="openreg")).sum().backward()
    assert torch.equal(model[0].bias.grad.cpu(), 2 * gradient)


def test_data_takes_a_tensor_of_the_device_and_gives_it_back():
    tensor = torch.ones(2, requires_grad=True)
    tensor.data = torch.full((3,), 2.0, device="openreg")
    assert (tensor.device.type, tensor.shape) == ("openreg", (3,))
    (tensor * tensor).sum().backward()
    assert tensor.grad.tolist() == [4, 4, 4]
    tensor.grad = None
    tensor.data = torch.ones(1)
    assert tensor.device.type == "cpu"


@pytest.mark.parametrize(
    "other", [torch.ones(2).to_sparse(), torch.ones(2, device="meta")]
)
def test_another_kind_of_tensor_is_refused(other):
    tensor = torch.ones(2, device="openreg")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        tensor.data = other
