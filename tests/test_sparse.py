"""Sparse tensors in coordinate form on the device, against the CPU."""

import pytest
import torch
from needs import operators
from torch import nn

import openreg

pytestmark = operators


def matrix(device="cpu", dtype=torch.float32, coalesced=False):
    """Four by five, with one place given twice and one that is zero."""
    indices = torch.tensor([[0, 3, 0, 2, 1], [1, 4, 1, 0, 3]])
    values = torch.tensor([1.0, 2.0, 3.0, -4.0, 0.0]).to(dtype)
    made = torch.sparse_coo_tensor(
        indices.to(device), values.to(device), (4, 5), device=device
    )
    return made.coalesce() if coalesced else made


def both(call):
    """The call's result on the device and on the CPU, as dense tensors."""
    results = []
    for device in ("openreg", "cpu"):
        result = call(device)
        assert result.device.type == device
        if result.is_sparse:
            result = result.to_dense()
        results.append(result.cpu())
    torch.testing.assert_close(*results)


DENSE = torch.arange(20.0).view(4, 5)
RIGHT = torch.arange(15.0).view(5, 3)
CALLS = {
    "made": lambda d: matrix(d),
    "made empty": lambda d: torch.sparse_coo_tensor(size=(2, 3), device=d),
    "hybrid": lambda d: torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0]], device=d), torch.ones(3, 2, device=d), (3, 2)
    ),
    "coalesced": lambda d: matrix(d).coalesce(),
    "hybrid coalesced": lambda d: torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0]], device=d), torch.ones(3, 2, device=d), (3, 2)
    ).coalesce(),
    "from dense": lambda d: (DENSE.to(d) % 3).to_sparse(),
    "from dense, one": lambda d: (DENSE.to(d) % 3).to_sparse(1),
    "dense plus": lambda d: DENSE.to(d) + matrix(d),
    "dense, strided": lambda d: DENSE.t().contiguous().t().to(d) + matrix(d),
    "in place": lambda d: DENSE.to(d).add_(matrix(d), alpha=2),
    "sum of two": lambda d: matrix(d) + matrix(d, coalesced=True),
    "difference": lambda d: matrix(d, coalesced=True) - matrix(d) * 2,
    "whole numbers": lambda d: matrix(d, torch.int64) + matrix(d),
    "times a number": lambda d: matrix(d) * 2.5,
    "times dense": lambda d: matrix(d) * DENSE.to(d),
    "times sparse": lambda d: matrix(d) * (DENSE.to(d) % 2).to_sparse(),
    "divided": lambda d: matrix(d, coalesced=True) / 4,
    "product": lambda d: matrix(d) @ RIGHT.to(d),
    "sparse.mm": lambda d: torch.sparse.mm(matrix(d), RIGHT.to(d)),
    "addmm": lambda d: torch.addmm(
        torch.ones(4, 3, device=d), matrix(d), RIGHT.to(d), beta=2, alpha=3
    ),
    "addmm, beta zero": lambda d: torch.addmm(
        torch.full((4, 3), float("nan"), device=d),
        matrix(d),
        RIGHT.to(d),
        beta=0,
    ),
    "vector": lambda d: matrix(d) @ torch.arange(5.0, device=d),
    "negative": lambda d: -matrix(d, coalesced=True),
    "relu": lambda d: torch.relu(matrix(d, coalesced=True)),
    "transposed": lambda d: matrix(d).t(),
    "sum": lambda d: torch.sparse.sum(matrix(d)),
    "sum over rows": lambda d: torch.sparse.sum(matrix(d), 0),
    "joined": lambda d: torch.cat([matrix(d), matrix(d)], 1),
    "copy": lambda d: matrix().to(d),
    "back": lambda d: matrix("openreg").cpu().to(d),
    "clone": lambda d: matrix(d).clone(),
    "norm": lambda d: matrix(d).norm(),
    "mask": lambda d: DENSE.to(d).sparse_mask(matrix(d, coalesced=True)),
    "double": lambda d: matrix(d).to(torch.float64),
}


@pytest.mark.parametrize("name", CALLS)
def test_sparse_tensors(name):
    both(CALLS[name])


def test_a_sparse_tensor_can_be_looked_at():
    x = matrix("openreg", coalesced=True)
    assert x._nnz() == 4
    assert x.indices().device.type == "openreg"
    assert "device='openreg:0'" in repr(x)
    assert x.is_coalesced()


@pytest.mark.parametrize("index", [0, 1])
def test_results_lie_where_the_arguments_do(index):
    x = matrix(f"openreg:{index}")
    for result in (x.coalesce(), x @ RIGHT.to(x.device), x + x):
        assert result.device.index == index


def test_the_product_has_a_gradient():
    grads = []
    for device in ("openreg", "cpu"):
        left = matrix(device, coalesced=True).requires_grad_()
        right = RIGHT.to(device, copy=True).requires_grad_()
        torch.sparse.mm(left, right).pow(2).sum().backward()
        grads.append((left.grad.to_dense().cpu(), right.grad.cpu()))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_a_sparse_embedding_trains_as_on_the_cpu(make):
    tables = []
    for device in ("openreg", "cpu"):
        torch.manual_seed(0)
        table = nn.Embedding(7, 3, sparse=True)
        table.to(device)
        optimizer = make(table.parameters(), lr=0.1)
        for step in range(5):
            words = torch.tensor([1, 4, 1, step]).to(device)
            optimizer.zero_grad()
            table(words).pow(2).sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
        tables.append(table.weight.detach().cpu())
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x.to_sparse_csr(), "sparse"),
        (lambda x: x.to_dense().to_sparse_csr(), "sparse"),
        (lambda x: torch.sparse.softmax(x, 1), "_sparse_softmax"),
        (lambda x: x + x.to_dense(), "add"),
        (lambda x: x + matrix(), "same device"),
        (lambda x: x @ torch.ones(5, 2), "same device|device"),
        (lambda x: x @ torch.ones(4, 2, device=x.device), "size"),
        (lambda x: x + matrix(x.device).t(), "match"),
    ],
)
def test_what_there_is_not_is_refused(call, error):
    with pytest.raises((NotImplementedError, RuntimeError), match=error):
        call(matrix("openreg"))
    torch.openreg.synchronize()


def test_nothing_of_it_falls_back():
    before = dict(openreg.fallbacks())
    for name, call in CALLS.items():
        call("openreg")
        assert dict(openreg.fallbacks()) == before, name
