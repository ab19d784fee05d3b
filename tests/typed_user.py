"""A user's program, for the type checker: `make lint` reads it, nobody runs it.

`assert_type` fails in the checker where a public name lost its type.
"""

from typing import Any

import torch
from typing_extensions import assert_type

import openreg

assert_type(openreg.is_available(), bool)
assert_type(openreg.device_count(), int)
assert_type(openreg.get_device_name(0), str)
assert_type(openreg.get_device_capability("openreg:1"), tuple[int, int])
assert_type(openreg.mem_get_info(torch.device("openreg")), tuple[int, int])
assert_type(openreg.memory_stats(), dict[str, Any])
assert_type(openreg.memory.memory_allocated(), int)
assert_type(openreg.get_rng_state(), torch.Tensor)
assert_type(openreg.random.initial_seed(), int)
assert_type(openreg.default_generators, tuple[torch.Generator, ...])
assert_type(openreg.get_amp_supported_dtype(), list[torch.dtype])
assert_type(openreg.get_sync_debug_mode(), int)
assert_type(openreg.caching_allocator_alloc(8), int)
assert_type(openreg.fallbacks(), dict[str, int])
assert_type(openreg.fallback.records(), list[openreg.fallback.Record])
assert_type(openreg.fallback.get_mode("aten::add.out"), str)
with openreg.fallback.mode("error, linalg=warn"):
    assert_type(openreg.fallback.report(), str)
assert_type(openreg.__version__, str)

side = openreg.Stream(priority=-1)
assert_type(side, openreg.Stream)
start, end = openreg.Event(enable_timing=True), openreg.Event(True)
with openreg.device(1), openreg.device_of(torch.ones(1)), openreg.stream(side):
    start.record()
    end.record(openreg.current_stream())
openreg.synchronize()
assert_type(start.elapsed_time(end), float)
