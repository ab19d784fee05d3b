"""Seeds, offsets and states of the devices' generators, without operators."""

import copy
import io
import os
import pickle
import threading
import warnings

import processes
import pytest
import torch

import openreg

DEVICES = ["openreg:0", "openreg:1"]


def run(code, **environment):
    """What a process of its own prints; it must end well."""
    code = f"import torch, openreg\n{code}"
    process = processes.run(code, os.environ | environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def seeds():
    return [each.initial_seed() for each in openreg.default_generators]


@pytest.fixture(autouse=True)
def quiet_and_on_device_zero():
    with torch.random.fork_rng(devices=range(openreg.device_count())):
        openreg.set_device(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
        openreg.set_device(0)


@pytest.fixture
def generator():
    made = torch.Generator("openreg:1")
    made.manual_seed(11)
    made.set_offset(8)
    return made


def where(generator):
    return generator.initial_seed(), generator.get_offset()


# ------------------------------------------------------------ generators


@pytest.mark.parametrize("device", DEVICES)
def test_a_generator_belongs_to_the_device_it_was_made_for(device):
    made = torch.Generator(device)
    assert made.device == torch.device(device)
    assert made.get_offset() == 0


def test_no_index_means_the_current_device():
    openreg.set_device(1)
    assert torch.Generator("openreg").device.index == 1
    openreg.manual_seed(21)
    assert seeds()[1] == openreg.initial_seed() == 21 != seeds()[0]


def test_a_new_generator_starts_with_pytorchs_default_seed():
    made = torch.Generator("openreg")
    assert made.initial_seed() == torch.Generator().initial_seed()


def test_generators_of_one_device_are_independent(generator):
    other = torch.Generator(generator.device)
    other.manual_seed(12)
    openreg.manual_seed_all(13)
    assert where(generator) == (11, 8)
    assert where(other) == (12, 0)


@pytest.mark.parametrize("index", [2, 7, 127])
def test_a_device_that_is_not_there_is_named_with_the_count(index):
    for call in (
        lambda: torch.Generator(f"openreg:{index}"),
        lambda: openreg.get_rng_state(index),
        lambda: openreg.set_rng_state(openreg.get_rng_state(), index),
    ):
        with pytest.raises(RuntimeError, match=rf"openreg:{index}.*2 devices"):
            call()


@pytest.mark.parametrize("device", ["cpu", torch.device("meta")])
def test_states_are_those_of_this_kind_of_device(device):
    with pytest.raises(ValueError, match="expected an openreg device"):
        openreg.get_rng_state(device)


def test_the_default_generators_are_one_for_each_device_and_stay():
    defaults = openreg.default_generators
    assert [each.device.index for each in defaults] == [0, 1]
    again = openreg.default_generators
    assert all(a is b for a, b in zip(defaults, again, strict=True))


def test_an_unknown_attribute_is_still_unknown():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = openreg.no_such_name


# ----------------------------------------------------------------- seeds


def test_torch_manual_seed_reaches_every_device():
    torch.manual_seed(5)
    assert seeds() == [5, 5]
    assert openreg.initial_seed() == torch.initial_seed() == 5


def test_torch_seed_reaches_every_device():
    torch.manual_seed(5)
    number = torch.seed()
    assert seeds() == [number, number]


def test_seeding_starts_the_sequence_again():
    for each in openreg.default_generators:
        each.set_offset(64)
    torch.manual_seed(5)
    assert [where(each) for each in openreg.default_generators] == [(5, 0)] * 2


def test_seeding_one_device_leaves_the_others():
    torch.manual_seed(5)
    with openreg.device(1):
        openreg.manual_seed(6)
    assert seeds() == [5, 6]


def test_unforeseeable_seeds():
    torch.manual_seed(5)
    openreg.seed()
    first, other = seeds()
    assert first != 5
    assert other == 5
    openreg.seed_all()
    assert seeds()[0] == seeds()[1] != first
    assert (
        torch.Generator("openreg").seed() != torch.Generator("openreg").seed()
    )


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_are_taken_as_the_cpu_takes_them(seed):
    expected = torch.Generator().manual_seed(seed).initial_seed()
    assert (
        torch.Generator("openreg").manual_seed(seed).initial_seed() == expected
    )
    torch.manual_seed(seed)
    assert seeds() == [expected] * 2


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "a", None])
def test_seeds_are_refused_as_the_cpu_refuses_them(seed, generator):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as expected:
        torch.Generator().manual_seed(seed)
    with pytest.raises(expected.type) as seen:
        generator.manual_seed(seed)
    assert str(seen.value) == str(expected.value)
    assert where(generator) == (11, 8)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, "a"])
def test_a_refused_seed_changes_no_device(seed):
    torch.manual_seed(5)
    with pytest.raises(ValueError, match=r"Overflow|invalid literal"):
        openreg.manual_seed_all(seed)
    assert seeds() == [5, 5]


# --------------------------------------------------------------- offsets


@pytest.mark.parametrize("offset", [0, 4, 1 << 40, 2**64 - 4])
def test_an_offset_is_kept(offset, generator):
    generator.set_offset(offset)
    assert where(generator) == (11, offset)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 2**64 - 1])
def test_an_offset_inside_a_block_is_refused(offset, generator):
    with pytest.raises(RuntimeError, match=f"multiple of 4, not {offset}"):
        generator.set_offset(offset)
    assert where(generator) == (11, 8)


# ---------------------------------------------------------------- states


def test_a_state_is_seed_and_offset_in_sixteen_bytes(generator):
    state = generator.get_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    assert state.view(torch.int64).tolist() == [11, 8]
    expected = (11).to_bytes(8, "little") + (8).to_bytes(8, "little")
    assert bytes(state.tolist()) == expected


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_state_brings_seed_and_offset_back(seed, generator):
    generator.manual_seed(seed)
    generator.set_offset(1 << 40)
    state = generator.get_state()
    other = torch.Generator("openreg")
    other.set_state(state)
    assert where(other) == (seed, 1 << 40)
    other.manual_seed(1)
    assert torch.equal(generator.get_state(), state)


def test_a_state_is_a_copy(generator):
    state = generator.get_state()
    state.zero_()
    assert where(generator) == (11, 8)
    generator.set_state(state)
    state.fill_(4)
    assert where(generator) == (0, 0)


def test_states_of_one_device_and_of_all():
    torch.manual_seed(5)
    one, every = openreg.get_rng_state(1), openreg.get_rng_state_all()
    torch.manual_seed(6)
    openreg.set_rng_state(one, "openreg:1")
    assert seeds() == [6, 5]
    openreg.set_rng_state_all(iter(every))
    assert seeds() == [5, 5]
    openreg.set_device(1)
    assert torch.equal(openreg.get_rng_state(torch.device("openreg")), one)


def misaligned():
    state = torch.zeros(16, dtype=torch.uint8)
    state[0], state[8] = 99, 6
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.get_rng_state(), RuntimeError, "16 bytes, not 5056"),
        (torch.zeros(0, dtype=torch.uint8), RuntimeError, "16 bytes, not 0"),
        (torch.zeros(15, dtype=torch.uint8), RuntimeError, "16 bytes, not 15"),
        (torch.zeros(16), TypeError, "bytes.*not float"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "bytes.*not long"),
        (torch.zeros(16, dtype=torch.int8), TypeError, "bytes.*not signed"),
        (
            torch.zeros(16, dtype=torch.uint8, device="meta"),
            TypeError,
            "CPU tensor.*on meta",
        ),
        (torch.zeros(32, dtype=torch.uint8)[::2], RuntimeError, "state"),
        (misaligned(), RuntimeError, "multiple of 4, not 6"),
    ],
    ids=[
        *("cpu's", "empty", "short", "float", "long", "signed", "meta"),
        *("strided", "misaligned"),
    ],
)
def test_a_refused_state_changes_nothing(state, error, message, generator):
    with pytest.raises(error, match=message):
        generator.set_state(state)
    assert where(generator) == (11, 8)


def test_what_is_no_tensor_is_no_state(generator):
    with pytest.raises(TypeError):
        generator.set_state(b"\0" * 16)
    assert where(generator) == (11, 8)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_state_for_each_device(count):
    torch.manual_seed(5)
    states = [torch.zeros(16, dtype=torch.uint8)] * count
    with pytest.raises(ValueError, match=f"{count} states for 2 devices"):
        openreg.set_rng_state_all(states)
    assert seeds() == [5, 5]


def test_states_survive_saving_and_the_strict_loader(generator):
    file = io.BytesIO()
    torch.save(generator.get_state(), file)
    generator.manual_seed(1)
    file.seek(0)
    generator.set_state(torch.load(file, weights_only=True))
    assert where(generator) == (11, 8)


@pytest.mark.parametrize(
    "through",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: x.clone_state(),
    ],
    ids=["pickle", "deepcopy", "clone"],
)
def test_a_copy_has_the_state_and_goes_its_own_way(through, generator):
    other = through(generator)
    assert other.device == generator.device
    assert where(other) == (11, 8)
    other.set_offset(16)
    assert where(generator) == (11, 8)
    generator.manual_seed(12)
    assert where(other) == (11, 16)


# --------------------------------------------------------- shared states


def test_a_graphsafe_state_is_the_same_state(generator):
    shared = generator.graphsafe_get_state()
    assert shared.device == generator.device
    generator.set_offset(16)
    assert where(shared) == (11, 16)
    shared.manual_seed(12)
    assert where(generator) == (12, 0)


def test_a_generator_takes_part_in_anothers_state(generator):
    other = torch.Generator("openreg:1")
    mine = other.graphsafe_get_state()
    other.graphsafe_set_state(generator)
    other.set_offset(32)
    assert where(generator) == (11, 32)
    other.graphsafe_set_state(mine)
    other.set_offset(64)
    assert where(generator) == (11, 32)


def test_a_shared_state_outlives_the_generator_it_came_from(generator):
    shared = generator.graphsafe_get_state()
    other = torch.Generator("openreg:1")
    other.graphsafe_set_state(shared)
    del shared, generator
    assert where(other) == (11, 8)


def test_no_state_is_shared_with_another_kind_of_device(generator):
    with pytest.raises(RuntimeError, match="another openreg generator"):
        generator.graphsafe_set_state(torch.Generator())
    assert where(generator) == (11, 8)


def test_compiled_code_exchanges_states_of_the_default_generator():
    default = openreg.default_generators[0]
    default.manual_seed(5)
    borrowed = torch.Generator("openreg").manual_seed(6)
    mine = default.graphsafe_get_state()
    default.graphsafe_set_state(borrowed)
    assert seeds()[0] == openreg.initial_seed() == 6
    default.graphsafe_set_state(mine)
    assert seeds()[0] == 5


# -------------------------------------------------------------- fork_rng


@pytest.mark.parametrize("kind", [{}, {"device_type": "openreg"}])
def test_fork_rng_restores_every_device(kind):
    torch.manual_seed(5)
    openreg.default_generators[1].set_offset(8)
    warnings.simplefilter("ignore")  # of several devices
    with torch.random.fork_rng(**kind):
        torch.manual_seed(6)
        assert seeds() == [6, 6]
    assert [where(g) for g in openreg.default_generators] == [(5, 0), (5, 8)]


@pytest.mark.parametrize("devices", [[0], ["openreg:0"], range(1)])
def test_fork_rng_restores_the_devices_it_is_given(devices):
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(6)
    assert seeds() == [5, 6]


def test_fork_rng_restores_after_an_exception():
    torch.manual_seed(5)

    def fail():
        with torch.random.fork_rng(devices=[0, 1]):
            torch.manual_seed(6)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seeds() == [5, 5]


# -------------------------------------------------- processes and threads


def test_nothing_here_starts_a_device():
    code = """
torch.manual_seed(5); torch.seed(); openreg.seed(); openreg.seed_all()
openreg.set_rng_state_all(openreg.get_rng_state_all())
generator = torch.Generator("openreg:1").clone_state()
generator.set_state(generator.get_state())
with torch.random.fork_rng(devices=[0, 1]): pass
print(openreg.is_initialized())
"""
    assert run(code) == ["False"]


def test_devices_are_counted_when_the_generators_are_asked_for():
    code = """
import os
os.environ["OPENREG_DEVICE_COUNT"] = "3"
print(len(torch.openreg.default_generators))
"""
    assert run(code) == ["3"]


def test_without_devices_there_is_nothing_to_seed():
    code = """
import warnings; warnings.simplefilter("error")
torch.manual_seed(5); openreg.seed_all()
openreg.set_rng_state_all(openreg.get_rng_state_all())
with torch.random.fork_rng(): pass
print(openreg.default_generators)
make = lambda: torch.Generator("openreg")
for call in (openreg.seed, openreg.get_rng_state, make):
    try: call()
    except RuntimeError as error: print("refused")
"""
    assert run(code, OPENREG_DEVICE_COUNT="0") == ["()", *["refused"] * 3]


@pytest.mark.parametrize("start", ["", "openreg.init()"])
def test_a_forked_child_seeds_for_itself(start):
    code = f"""
import os
openreg.manual_seed_all(5)
{start}
if (child := os.fork()) == 0:
    torch.manual_seed(6)  # leaves the device out when it cannot be used
    openreg.manual_seed_all(7)
    openreg.set_rng_state_all(openreg.get_rng_state_all())
    generator = torch.Generator("openreg").manual_seed(8)
    print(openreg.initial_seed(), generator.initial_seed(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], openreg.initial_seed())
"""
    assert run(code) == ["7", "8", "0", "5"]


def test_threads_see_whole_states():
    shared = torch.Generator("openreg")
    shared.manual_seed(0)
    torn = []

    def work(number):
        mine = torch.Generator("openreg").manual_seed(number)
        mine.set_offset(4 * number)
        state = mine.get_state()
        for _ in range(500):
            shared.set_state(state)
            seed, offset = shared.get_state().view(torch.int64).tolist()
            if offset != 4 * seed:
                torn.append((seed, offset))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn


def test_the_generators_outlive_the_interpreters_last_line():
    code = """
import atexit
atexit.register(lambda: print(torch.manual_seed(5).initial_seed()))
keep = [torch.Generator("openreg") for _ in range(3)]
openreg.init()
"""
    assert run(code) == ["5"]
