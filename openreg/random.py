# Chapter: generators
"""Seeds and states of the devices' random numbers.

PyTorch finds these by name: ``torch.manual_seed`` calls ``manual_seed_all``,
``torch.random.fork_rng`` and checkpointing the states. A seed may be set, and a
state read, before a device has started and in a forked child.
"""

from __future__ import annotations

import torch

from openreg import _C
from openreg.devices import Device, _index, device_count


# [generators: of-device]
def _generator(device: Device) -> torch.Generator:
    return _C.default_generator(_index(device))


# [frontend: get-generator]
def _get_generator(device: torch.device) -> torch.Generator:
    """The generator of a device, for whoever names none.

    Functions with random numbers that are compiled ask for it.

    >>> torch.openreg._get_generator(torch.device("openreg", 1)).device
    device(type='openreg', index=1)
    """
    return _generator(device)


# [/frontend: get-generator]


def _default_generators() -> tuple[torch.Generator, ...]:
    """The generator of each device, for whoever names none."""
    return tuple(map(_C.default_generator, range(device_count())))


# [/generators: of-device]


# [generators: seeds]
def manual_seed(seed: int) -> None:
    """Seed the current device's generator.

    >>> torch.openreg.manual_seed(7)
    >>> torch.openreg.initial_seed()
    7
    """
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator, all with the same seed."""
    for generator in _default_generators():
        generator.manual_seed(int(seed))


def seed() -> None:
    """Give the current device's generator a seed nobody can foresee."""
    _generator(None).seed()


def seed_all() -> None:
    """Give every device the same seed, one nobody can foresee."""
    first, *others = _default_generators() or (None,)
    if first is not None:
        number = first.seed()
        for generator in others:
            generator.manual_seed(number)


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator(None).initial_seed()


# [/generators: seeds]


# [generators: states]
def get_rng_state(device: Device = "openreg") -> torch.Tensor:
    """A generator's state: 16 bytes on the CPU, its seed and its offset.

    >>> torch.openreg.get_rng_state().shape
    torch.Size([16])
    """
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "openreg") -> None:
    """Put a generator back into a state.

    Raises:
        RuntimeError: the tensor is not the state of an openreg generator.
    """
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of every device's generator."""
    return [generator.get_state() for generator in _default_generators()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put every device's generator back; one state for each device."""
    states, generators = list(new_states), _default_generators()
    if len(states) != len(generators):
        raise ValueError(
            f"got {len(states)} states for {len(generators)} devices"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


# [/generators: states]
