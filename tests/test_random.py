"""Random numbers on the device: repeatable, independent, distributed right."""

import math
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import (
    checkpoint,
    get_device_states,
    set_device_states,
)

import openreg

try:
    torch.empty(0, device="openreg")
except NotImplementedError:
    pytest.skip(
        "chapter kernels brings the random kernels", allow_module_level=True
    )

pytestmark = pytest.mark.filterwarnings("ignore:.*has no kernel for openreg")
accelerator = torch.accelerator
FLOATS = [torch.float, torch.double, torch.half, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = SIGNED + UNSIGNED
SIGMAS = 6  # how far a moment may lie from what it should be


def half(*size, **options):
    return torch.full(size, 0.5, device="openreg", **options)


def drawn(name, *arguments):
    return lambda x, **g: getattr(torch.empty_like(x), name)(*arguments, **g)


# Each takes a tensor of probabilities and returns what it draws for it.
SAMPLERS = {
    "uniform_": drawn("uniform_"),
    "normal_": drawn("normal_"),
    "log_normal_": drawn("log_normal_"),
    "exponential_": drawn("exponential_"),
    "cauchy_": drawn("cauchy_"),
    "geometric_": drawn("geometric_", 0.01),
    "bernoulli_.float": drawn("bernoulli_", 0.5),
    "bernoulli_.Tensor": lambda x, **g: torch.empty_like(x).bernoulli_(x, **g),
    "bernoulli": torch.bernoulli,
    "bernoulli.out": lambda x, **g: torch.bernoulli(
        x, out=torch.empty_like(x), **g
    ),
    "random_": drawn("random_"),
    "random_.to": drawn("random_", 1000),
    "random_.from": drawn("random_", -1000, 1000),
    "normal.Tensor_float": lambda x, **g: torch.normal(x, 2.0, **g),
    "normal.float_Tensor": lambda x, **g: torch.normal(2.0, x, **g),
    "normal.Tensor_Tensor": lambda x, **g: torch.normal(x, x, **g),
    "rand": lambda x, **g: torch.rand(x.shape, device=x.device, **g),
    "randn": lambda x, **g: torch.randn(x.shape, device=x.device, **g),
    "randint": lambda x, **g: torch.randint(
        1000, x.shape, device=x.device, **g
    ),
    "randperm": lambda x, **g: torch.randperm(x.numel(), device=x.device, **g),
    "multinomial": lambda x, **g: torch.multinomial(
        x.flatten(), x.numel() // 2, **g
    ),
    "multinomial.replacement": lambda x, **g: torch.multinomial(
        x.flatten(), 64, replacement=True, **g
    ),
}
# These take no generator.
IMPLICIT = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "dropout": functional.dropout,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[1],
    "dropout2d": lambda x: functional.dropout2d(x.view(-1, 8, 1, 1)),
}
EVERY = SAMPLERS | IMPLICIT


def offsets():
    return [each.get_offset() for each in openreg.default_generators]


@pytest.fixture(autouse=True)
def reseeded():
    openreg.set_device(0)
    torch.manual_seed(2026)
    yield
    openreg.set_device(0)


def twice(sampler, x):
    torch.manual_seed(5)
    first = sampler(x).cpu()
    torch.manual_seed(5)
    return first, sampler(x).cpu(), sampler(x).cpu()


# ------------------------------------------------------------ repeatable


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
@pytest.mark.parametrize("name", EVERY)
def test_a_seed_repeats_and_two_calls_differ(name, device):
    first, again, other = twice(EVERY[name], half(512).to(device))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", EVERY)
def test_another_seed_gives_other_numbers(name):
    x = half(512)
    torch.manual_seed(5)
    first = EVERY[name](x).cpu()
    torch.manual_seed(6)
    assert not torch.equal(first, EVERY[name](x).cpu())


@pytest.mark.parametrize("name", EVERY)
def test_the_stream_does_not_matter(name):
    x = half(10_000)
    openreg.synchronize()
    first = twice(EVERY[name], x)[0]
    with torch.Stream(device="openreg"):
        assert torch.equal(first, twice(EVERY[name], x)[1])


@pytest.mark.parametrize("name", EVERY)
def test_the_current_device_does_not_matter(name):
    x = half(512)
    first = twice(EVERY[name], x)[0]
    openreg.set_device(1)
    assert torch.equal(first, twice(EVERY[name], x)[0])
    assert openreg.current_device() == 1


def test_the_number_of_threads_does_not_matter():
    """In processes of their own: OpenMP reads its setting at the start."""
    code = """
import hashlib, sys, torch
torch.manual_seed(5)
found = hashlib.sha256()
for name in ("uniform_", "normal_", "exponential_", "random_", "bernoulli_"):
    for dtype in (torch.float, torch.double):
        x = torch.empty(100_003, dtype=dtype, device="openreg")
        found.update(getattr(x, name)().cpu().numpy().tobytes())
w = torch.ones(10, device="openreg")
for x in (torch.randperm(10_000, device="openreg"),
          torch.multinomial(w, 10_000, replacement=True)):
    found.update(x.cpu().numpy().tobytes())
print(found.hexdigest())
"""
    seen = set()
    for threads in ("1", "4"):
        code_line = code.replace("torch\n", "torch\nimport openreg\n", 1)
        seen.add(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code_line],
                env=os.environ | {"OMP_NUM_THREADS": threads},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(seen) == 1


def test_the_order_of_the_calls_decides_not_that_of_the_kernels():
    late, early = torch.Stream(device="openreg"), torch.Stream("openreg")
    torch.manual_seed(5)
    expected = [torch.rand(64, device="openreg").cpu() for _ in range(2)]
    torch.manual_seed(5)
    with late:
        openreg._sleep(20_000_000)
        first = torch.rand(64, device="openreg")
    with early:
        second = torch.rand(64, device="openreg")
    openreg.synchronize()
    assert torch.equal(first.cpu(), expected[0])
    assert torch.equal(second.cpu(), expected[1])


def test_a_state_continues_the_sequence():
    torch.rand(9, device="openreg")
    state = openreg.get_rng_state()
    expected = torch.randn(9, device="openreg").cpu()
    torch.manual_seed(1)
    openreg.set_rng_state(state)
    assert torch.equal(torch.randn(9, device="openreg").cpu(), expected)


def test_fork_rng_hides_what_was_drawn():
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(9, device="openreg").cpu()
    assert torch.equal(torch.rand(9, device="openreg").cpu(), inside)


def test_numbers_are_philox():
    """Four floats from each subsequence, at the generator's offset."""

    def philox(seed, subsequence, block):
        word = 0xFFFF_FFFF
        k, j = seed & word, seed >> 32
        a, b, c, d = block, 0, subsequence, 0
        for _ in range(10):
            low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
            a, b = high >> 32 ^ b ^ k, high & word
            c, d = low >> 32 ^ d ^ j, low & word
            k, j = k + 0x9E3779B9 & word, j + 0xBB67AE85 & word
        return a, b, c, d

    generator = torch.Generator("openreg").manual_seed(2**40 + 7)
    generator.set_offset(12)
    x = torch.rand(10, device="openreg", generator=generator)
    words = [w for s in range(3) for w in philox(2**40 + 7, s, 3)]
    assert x.tolist() == [(w & 0xFF_FFFF) / 2**24 for w in words[:10]]


# --------------------------------------------------- generators and offsets


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_generator_that_is_given_moves_and_no_other(name):
    generator = torch.Generator("openreg").manual_seed(5)
    before = offsets()
    first = SAMPLERS[name](half(512), generator=generator).cpu()
    assert offsets() == before
    assert generator.get_offset() > 0
    assert generator.get_offset() % 4 == 0
    generator.manual_seed(5)
    again = SAMPLERS[name](half(512), generator=generator).cpu()
    assert torch.equal(first, again)


@pytest.mark.parametrize("name", EVERY)
def test_without_one_the_devices_own_moves(name):
    before = offsets()
    EVERY[name](half(512).to("openreg:1"))
    assert offsets()[0] == before[0]
    assert offsets()[1] > before[1]


@pytest.mark.parametrize("owner", ["cpu", "openreg:1"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_generator_of_another_device_is_refused(name, owner):
    wrong = torch.Generator(owner).manual_seed(5)
    state, before = wrong.get_state(), offsets()
    with pytest.raises(RuntimeError, match=f"generator.*{owner}"):
        SAMPLERS[name](half(512), generator=wrong)
    assert torch.equal(wrong.get_state(), state)
    assert offsets() == before


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_"])
def test_the_cpu_refuses_the_devices_generator(name):
    wrong = torch.Generator("openreg")
    with pytest.raises(RuntimeError, match="generator"):
        getattr(torch.empty(3), name)(generator=wrong)
    assert wrong.get_offset() == 0


def test_threads_that_share_a_generator_get_different_numbers():
    generator = torch.Generator("openreg")
    made = [[] for _ in range(4)]

    def work(mine):
        for _ in range(100):
            x = torch.rand(4, device="openreg", generator=generator)
            mine.append(tuple(x.tolist()))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generator.get_offset() == 4 * 4 * 100
    assert len({x for mine in made for x in mine}) == 400


def test_two_shuffles_have_nothing_in_common():
    """Of n places, 1 on average agrees: far from it is correlated."""
    agree = 0
    for lag in range(1, 9):  # the second would lag behind the first
        for _ in range(100):
            first = torch.randperm(64 + lag, device="openreg").cpu()
            second = torch.randperm(64, device="openreg").cpu()
            agree += int((first[:64] == second).sum())
    expected = 800 * 64 * (1 / 68)
    assert abs(agree - expected) < SIGMAS * math.sqrt(800) * 1.1


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_elements_and_calls_are_uncorrelated(name):
    n = 50_000
    first, second = (
        getattr(torch, name)(n, device="openreg").cpu().double()
        for _ in range(2)
    )
    pairs = [(first, second), (first[1:], first[:-1]), (first[4:], first[:-4])]
    pairs += [(first[:-4], second[4:]), (first[4:], second[:-4])]
    for a, b in pairs:
        found = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert abs(found) < SIGMAS / math.sqrt(n)


# ------------------------------------------------------- targets and types


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_"])
def test_strided_targets_get_the_same_numbers(name):
    torch.manual_seed(5)
    expected = getattr(torch.empty(30, 20, device="openreg"), name)().cpu()
    for target in (
        torch.zeros(20, 30, device="openreg").t(),
        torch.zeros(30, 40, device="openreg")[:, ::2],
        torch.zeros(40, 50, device="openreg")[5:35, 7:27],
    ):
        torch.manual_seed(5)
        getattr(target, name)()
        assert torch.equal(target.cpu(), expected)


def test_only_the_target_is_written():
    base = torch.zeros(8, 8, device="openreg")
    base[2:6:2, 1::3].normal_()
    written = base.cpu() != 0
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[2:6:2, 1::3] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "random_", "cauchy_"])
def test_targets_of_no_dimension_and_of_no_element(name):
    scalar = torch.full((), -7.25, device="openreg")
    getattr(scalar, name)()
    assert scalar.item() != -7.25
    before = offsets()
    assert getattr(torch.empty(3, 0, device="openreg"), name)().numel() == 0
    assert offsets() == before


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, ()) for name in ("uniform_", "normal_", "random_", "cauchy_")),
        *((name, ()) for name in ("log_normal_", "exponential_")),
        ("geometric_", (0.5,)),
        ("bernoulli_", (0.5,)),
        ("bernoulli_", (torch.tensor(0.5),)),
    ],
)
def test_overlapping_targets_are_refused(name, arguments):
    before = offsets()
    with pytest.raises(RuntimeError, match="single memory location"):
        getattr(half(1).expand(4), name)(*arguments)
    openreg.synchronize()
    assert offsets() == before


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_range_of_uniform_numbers(dtype):
    x = torch.empty(200_000, dtype=dtype, device="openreg")
    for low, high in ((0, 1), (-3, -1), (100, 101)):
        seen = x.uniform_(low, high).cpu()
        assert seen.min() >= low
        assert seen.max() < high


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_random_covers_the_range_it_is_given(dtype):
    x = torch.empty(4000, dtype=dtype, device="openreg")
    seen = set(x.random_(3, 11).cpu().double().tolist())
    assert seen == set(range(3, 11))
    assert set(x.random_(4).cpu().double().tolist()) == set(range(4))


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
def test_random_covers_the_type(dtype):
    x = torch.empty(20_000, dtype=dtype, device="openreg")
    seen = x.random_().cpu().double()
    top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    assert seen.min() >= 0
    assert seen.min() <= top * 0.01
    assert seen.max() >= top * 0.99
    if dtype in SIGNED:
        seen = x.random_(torch.iinfo(dtype).min, None).cpu().double()
        assert seen.min() <= -top * 0.98
        assert seen.max() >= top * 0.98


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_floats_are_integers_that_the_type_can_hold(dtype):
    x = torch.empty(20_000, dtype=dtype, device="openreg").random_().cpu()
    top = 2 ** (1 - round(math.log2(torch.finfo(dtype).eps)))
    assert torch.equal(x, x.round())
    assert x.min() >= 0
    assert x.max() <= top
    assert x.max() >= top * 0.95


# --------------------------------------------------------------- moments


def check_moments(x, mean, variance, fourth):
    """Mean and variance; `fourth` is the distribution's central moment."""
    x, n = x.cpu().double().flatten(), x.numel()
    assert abs(x.mean() - mean) < SIGMAS * math.sqrt(variance / n)
    bound = SIGMAS * math.sqrt((fourth - variance**2) / n)
    assert abs(x.var() - variance) < bound


# Of half and bfloat16 the rounding adds to the error.
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.half])
@pytest.mark.parametrize(
    ("name", "arguments", "moments"),
    [
        ("uniform_", (), (1 / 2, 1 / 12, 1 / 80)),
        ("uniform_", (-3, 1), (-1, 16 / 12, 256 / 80)),
        ("normal_", (), (0, 1, 3)),
        ("normal_", (2, 3), (2, 9, 243)),
        ("exponential_", (), (1, 1, 9)),
        ("exponential_", (2,), (1 / 2, 1 / 4, 9 / 16)),
        ("bernoulli_", (0.25,), (0.25, 0.1875, 0.08203125)),
        ("random_", (0, 11), (5, 10, 178)),
        ("geometric_", (0.5,), (2, 2, 38)),
    ],
)
def test_moments(name, arguments, moments, dtype):
    x = torch.empty(100_001, dtype=dtype, device="openreg")
    check_moments(getattr(x, name)(*arguments), *moments)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "bernoulli_"])
def test_moments_of_bfloat16(name):
    x = getattr(half(100_000, dtype=torch.bfloat16), name)().cpu().double()
    mean, deviation = (0, 1) if name == "normal_" else (0.5, x.std().item())
    assert abs(x.mean() - mean) < SIGMAS * deviation / math.sqrt(1e5) + 2**-9


def test_normal_numbers_of_odd_counts_and_their_tails():
    x = torch.randn(1_000_001, device="openreg").cpu()
    for limit in (1, 2, 3, 4):
        p = math.erfc(limit / math.sqrt(2))
        seen = (x.abs() > limit).sum().item()
        bound = SIGMAS * math.sqrt(1e6 * p * (1 - p)) + 1
        assert abs(seen - 1e6 * p) < bound
    assert torch.isfinite(x).all()


def test_log_normal_and_cauchy_numbers_by_their_quantiles():
    n = 100_000
    x = torch.empty(n, device="openreg")
    logs = x.log_normal_(1, 2).cpu().log()
    check_moments(logs, 1, 4, 48)
    below = x.cauchy_(3, 2).cpu()
    for quantile, p in ((1, 0.25), (3, 0.5), (5, 0.75)):
        seen = (below < quantile).sum().item()
        assert abs(seen - n * p) < SIGMAS * math.sqrt(n * p * (1 - p))


def test_geometric_and_exponential_numbers_start_where_they_should():
    x = torch.empty(200_000, device="openreg")
    assert x.geometric_(0.9).cpu().min() == 1
    assert x.exponential_().cpu().min() > 0


def test_complex_numbers_have_two_parts_of_half_the_variance():
    x = torch.randn(50_000, dtype=torch.cfloat, device="openreg").cpu()
    check_moments(torch.view_as_real(x), 0, 1 / 2, 3 / 4)
    x = torch.rand(50_000, dtype=torch.cdouble, device="openreg").cpu()
    check_moments(torch.view_as_real(x), 1 / 2, 1 / 12, 1 / 80)


def test_normal_numbers_for_tensors_of_means_and_deviations():
    mean = torch.tensor([[-5.0], [0.0], [7.0]], device="openreg")
    deviation = torch.tensor([1.0, 3.0], device="openreg")
    x = torch.normal(
        mean.expand(3, 20_000).contiguous(), deviation[1].item()
    ).cpu()
    for row, at in zip(x, (-5, 0, 7), strict=True):
        check_moments(row, at, 9, 243)
    both = torch.normal(mean, deviation)  # broadcast
    assert both.shape == (3, 2)
    assert torch.equal(torch.normal(mean, 0 * mean).cpu(), mean.cpu())


# ------------------------------------------------------------- bernoulli


@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.bool, torch.uint8, torch.int64]
)
def test_bernoulli_follows_each_probability(dtype):
    p = torch.tensor([0.0, 0.1, 0.5, 1.0])
    x = torch.empty(20_000, 4, dtype=dtype, device="openreg")
    for probabilities in (p, p.to("openreg"), p.double().to("openreg")):
        seen = x.bernoulli_(probabilities).cpu().double()
        assert set(seen.flatten().tolist()) == {0, 1}
        bound = SIGMAS * (p * (1 - p) / 20_000).sqrt()
        assert ((seen.mean(0) - p).abs() <= bound).all()


@pytest.mark.parametrize("bad", [1.5, -0.1, math.nan])
def test_a_bad_probability_is_reported_by_the_device(bad):
    p = torch.tensor([0.5, bad, 0.5], device="openreg")
    torch.bernoulli(p)  # queued: the check runs on the device
    with pytest.raises(torch.AcceleratorError, match=r"every p .* \[0, 1\]"):
        openreg.synchronize()
    openreg.synchronize()  # it is reported once
    assert torch.rand(3, device="openreg").cpu().max() < 1


# ------------------------------------------- permutations and multinomial


@pytest.mark.parametrize("n", [0, 1, 2, 17, 3000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.double])
def test_randperm_is_a_permutation(n, dtype):
    x = torch.randperm(n, dtype=dtype, device="openreg")
    assert x.dtype == dtype
    assert x.device.type == "openreg"
    assert x.sort().values.tolist() == list(range(n))


def test_each_permutation_is_as_likely():
    counts = {}
    for _ in range(6000):
        order = tuple(torch.randperm(3, device="openreg").tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    bound = SIGMAS * math.sqrt(6000 * (1 / 6) * (5 / 6))
    assert all(abs(seen - 1000) < bound for seen in counts.values())


def test_multinomial_follows_the_weights():
    weights = torch.tensor([[0.0, 1, 2, 5, 0], [4, 0, 0, 0, 4]])
    x = torch.multinomial(weights.to("openreg"), 50_000, replacement=True)
    for row, drawn in zip(weights, x.cpu(), strict=True):
        p = row / row.sum()
        seen = drawn.bincount(minlength=5) / 50_000
        assert ((seen - p).abs() <= SIGMAS * (p * (1 - p) / 5e4).sqrt()).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_never_draws_weight_zero(dtype, replacement):
    weights = torch.zeros(3000, 8, dtype=dtype, device="openreg")
    weights[:, 1::3] = 1  # 1, 4 and 7
    x = torch.multinomial(weights, 3, replacement=replacement).cpu()
    assert set(x.flatten().tolist()) == {1, 4, 7}
    if not replacement:
        assert torch.equal(x.sort().values, torch.tensor([[1, 4, 7]] * 3000))


def test_multinomial_without_replacement_prefers_great_weights():
    weights = torch.tensor([1.0, 1, 8]).expand(20_000, 3).to("openreg")
    first = torch.multinomial(weights, 2).cpu()[:, 0]
    seen = (first == 2).double().mean()
    assert abs(seen - 0.8) < SIGMAS * math.sqrt(0.8 * 0.2 / 20_000)


@pytest.mark.parametrize(
    "weights",
    [[0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]],
    ids=str,
)
def test_bad_weights_are_an_error(weights):
    x = torch.tensor([[1.0, 1.0], weights], device="openreg")
    with pytest.raises(RuntimeError, match=r"multinomial|probability tensor"):
        torch.multinomial(x, 1).cpu()
    torch.multinomial(x, 2, replacement=True)
    with pytest.raises(torch.AcceleratorError, match="finite weights"):
        openreg.synchronize()


# --------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_drops_and_scales(dtype):
    x = torch.ones(40_000, dtype=dtype, device="openreg")
    y = functional.dropout(x, 0.2).cpu()
    kept = y != 0
    assert abs(kept.double().mean() - 0.8) < SIGMAS * math.sqrt(0.16 / 40_000)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1.25))
    assert torch.equal(
        functional.dropout(x, 0.2, training=False).cpu(), x.cpu()
    )
    assert torch.equal(functional.dropout(x, 0.0).cpu(), x.cpu())
    assert not functional.dropout(x, 1.0).cpu().any()


def test_dropouts_backward_uses_the_mask():
    x = half(1000).requires_grad_()
    y = functional.dropout(x, 0.25)
    y.backward(torch.full_like(y, 3.0))
    kept = y.detach().cpu() != 0
    torch.testing.assert_close(x.grad.cpu(), 4.0 * kept)


def test_dropout_of_strided_inputs():
    x = torch.arange(1.0, 601, device="openreg").view(20, 30).t()
    y, mask = torch.native_dropout(x, 0.5, True)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y.cpu(), x.cpu() * mask.cpu() * 2)
    y, mask = torch.native_dropout(x, 0.5, False)
    assert mask.cpu().all()
    assert torch.equal(y.cpu(), x.cpu())


def test_the_states_of_checkpointing_repeat_a_dropout():
    x = torch.ones(1000, device="openreg:1")
    devices, states = get_device_states(x)
    first = functional.dropout(x).cpu()
    torch.manual_seed(99)
    set_device_states(devices, states, device_type="openreg")
    assert devices == [1]
    assert torch.equal(functional.dropout(x).cpu(), first)


@pytest.mark.skipif(
    not hasattr(openreg, "get_amp_supported_dtype"),
    reason="torch's checkpoint asks for autocast, which chapter amp brings",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_repeats_under_checkpoint(reentrant):
    runs = []

    def layer(x):
        y = functional.dropout(x, 0.5)
        runs.append(y.detach().cpu())
        return y * x

    x = torch.ones(1000, device="openreg:1", requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=reentrant)
    torch.manual_seed(99)
    y.backward(torch.ones_like(y))
    assert len(runs) == 2
    assert torch.equal(*runs)


# ---------------------------------------------------------- bad arguments

BAD = {
    "uniform": lambda x: x.uniform_(2, 1),
    "uniform of int": lambda x: x.int().uniform_(),
    "uniform out of range": lambda x: x.half().uniform_(0, 1e9),
    "normal": lambda x: x.normal_(0, -1),
    "normal of tensors": lambda x: torch.normal(x, -1 - x),
    "normal of shapes": lambda x: torch.normal(x, torch.cat([x, x])),
    "log_normal": lambda x: x.log_normal_(0, 0),
    "exponential": lambda x: x.exponential_(0),
    "exponential below 0": lambda x: x.exponential_(-1),
    "exponential of int": lambda x: x.int().exponential_(),
    "cauchy": lambda x: x.cauchy_(0, 0),
    "cauchy of int": lambda x: x.int().cauchy_(),
    "geometric of 0": lambda x: x.geometric_(0),
    "geometric of 1": lambda x: x.geometric_(1),
    "bernoulli": lambda x: x.bernoulli_(1.5),
    "bernoulli below 0": lambda x: x.bernoulli_(-0.5),
    "bernoulli of shapes": lambda x: x.bernoulli_(torch.cat([x, x])),
    "random": lambda x: x.random_(5, 5),
    "random to 0": lambda x: x.random_(0),
    "random out of range": lambda x: x.to(torch.int8).random_(0, 1000),
    "randint": lambda x: torch.randint(5, 3, (3,), device=x.device),
    "randperm": lambda x: torch.randperm(-1, device=x.device),
    "randperm of int8": lambda x: torch.randperm(
        1000, dtype=torch.int8, device=x.device
    ),
    "randperm of half": lambda x: torch.randperm(
        5000, dtype=torch.half, device=x.device
    ),
    "no draws": lambda x: torch.multinomial(x + 1, 0),
    "too many draws": lambda x: torch.multinomial(x + 1, 4),
    "weights of int": lambda x: torch.multinomial((x + 1).int(), 2),
    "weights of dimensions": lambda x: torch.multinomial(x.view(3, 1, 1), 1),
    "dropout": lambda x: functional.dropout(x, 1.5),
    "native_dropout": lambda x: torch.native_dropout(x, 1.5, True),
    "dropout of int": lambda x: functional.dropout(x.int()),
    "overlap": lambda x: x[:1].expand(3).normal_(),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_as_the_cpu_refuses_them(name):
    with pytest.raises((RuntimeError, ValueError)) as expected:
        BAD[name](torch.zeros(3))
    x = torch.zeros(3, device="openreg")
    with pytest.raises(expected.type) as seen:
        BAD[name](x)
    first, other = (str(e.value).splitlines()[0] for e in (seen, expected))
    assert first == other
    openreg.synchronize()  # nothing failed later


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.int().normal_(),
        lambda x: x.int().log_normal_(),
        lambda x: x.cfloat().geometric_(0.5),
        lambda x: x.cfloat().bernoulli_(0.5),
        lambda x: x.cfloat().random_(),
    ],
    ids=["normal", "log_normal", "geometric", "bernoulli", "random"],
)
def test_types_without_a_kernel_are_refused_at_the_call(call):
    before = offsets()
    with pytest.raises(NotImplementedError, match="not implemented for"):
        call(torch.zeros(3, device="openreg"))
    openreg.synchronize()
    assert offsets() == before


@pytest.mark.parametrize("other", ["cpu", "openreg:1"])
def test_the_backward_of_dropout_refuses_a_mask_of_another_device(other):
    gradient = torch.ones(4, device="openreg:0")
    mask = torch.ones(4, dtype=torch.bool, device=other)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ops.aten.native_dropout_backward(gradient, mask, 2.0)


def test_weights_without_a_sum_are_told_by_the_next_wait():
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="sum of probabilities"):
        torch.multinomial(x, 2)
    torch.multinomial(x.to("openreg"), 2)  # the values are looked at later
    with pytest.raises(torch.AcceleratorError, match="sum of probabilities"):
        openreg.synchronize()
    openreg.synchronize()
