# Chapter: devices
"""OpenReg: a PyTorch backend for a simulated accelerator.

``import torch`` finds it by itself, and ``torch.openreg`` is this package.

>>> import torch
>>> torch.device("openreg", 1)
device(type='openreg', index=1)
"""

import sys

import torch

from openreg import _handshake

# [devices: rename]
_owner = torch._C._get_privateuse1_backend_name()
if _owner not in ("privateuseone", "openreg"):
    raise ImportError(
        f"PyTorch has one place for a backend like this in a process, and "
        f"{_owner!r} has taken it; import only one of the two"
    )
_handshake.check(torch.__version__)
# The C++ library first. If it cannot be opened, torch stays as it was: a name
# without a device behind it would break CPU work that asks for accelerators.
from openreg import _C

torch.utils.rename_privateuse1_backend("openreg")
torch._register_device_module("openreg", sys.modules[__name__])
# [/devices: rename]

# [devices: load]
try:
    from openreg.devices import (
        _is_in_bad_fork,
        _lazy_init,
        current_device,
        device,
        device_count,
        get_device_capability,
        get_device_name,
        get_device_properties,
        init,
        is_available,
        is_initialized,
        set_device,
    )
except BaseException:
    # Half a backend would break code that only asks whether there is one.
    del torch.openreg, sys.modules["torch.openreg"]
    raise
# [/devices: load]
# [guards: exports]
from openreg.devices import synchronize

# [/guards: exports]
# [streams: exports]
from openreg import _gpu_trace, sanitizer
from openreg.streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    _sleep,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

# [/streams: exports]
# [memory: exports]
from openreg import memory
from openreg.memory import (
    empty_cache,
    get_per_process_memory_fraction,
    host_memory_stats,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)

# [/memory: exports]
# [generators: exports]
from openreg.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

# [/generators: exports]
# [frontend: exports]
from openreg import _utils
from openreg.deferred import _lazy_call
from openreg.devices import (
    _DeviceGuard,
    _exchange_device,
    _maybe_exchange_device,
    device_of,
)
from openreg.formats import (
    get_amp_supported_dtype,
    is_bf16_supported,
    is_tf32_supported,
)
from openreg.memory import (
    device_memory_used,
    host_memory_stats_as_nested_dict,
    memory_stats_as_nested_dict,
)
from openreg.peer import can_device_access_peer
from openreg.random import _get_generator
from openreg.raw_memory import (
    caching_allocator_alloc,
    caching_allocator_delete,
)
from openreg.streams import (
    get_stream_from_external,
    is_current_stream_capturing,
)
from openreg.sync_debug import get_sync_debug_mode, set_sync_debug_mode

# [/frontend: exports]
# [frontend: sharing-exports]
from openreg.sharing import ipc_collect

# [/frontend: sharing-exports]
# [frontend: tiles-exports]
from openreg import dlpack, parallel, tiles
from openreg.tiles import is_tiled, to_strided, to_tiled

# [/frontend: tiles-exports]
# [autograd: exports]
from openreg import _engine_threads

# [/autograd: exports]
# [fallback: exports]
from openreg import fallback
from openreg.fallback import fallback_count, fallbacks

# [/fallback: exports]
# [quantization: exports]
from openreg import _out_dtype

# [/quantization: exports]
# [export: exports]
from openreg import export

# [/export: exports]


# [generators: default-generators]
def __getattr__(name: str) -> object:
    """``default_generators``, which needs the devices counted, when asked."""
    if name == "default_generators":
        from openreg.random import _default_generators

        return _default_generators()
    # [frontend: initialized]
    if name == "_initialized":  # torch.utils.checkpoint asks it so
        return is_initialized()
    # [/frontend: initialized]
    # [quantization: lazy]
    if name == "quantization":  # imports torchao, which takes seconds
        import importlib

        return importlib.import_module("openreg.quantization")
    # [/quantization: lazy]
    raise AttributeError(f"module 'openreg' has no attribute {name!r}")


# [/generators: default-generators]

# [streams: sanitizer]
try:
    sanitizer._enable_if_asked()
except BaseException:
    del torch.openreg, sys.modules["torch.openreg"]
    raise
# [/streams: sanitizer]

# [frontend: complete]
dlpack._install()
parallel._install()
tiles._install()
# [/frontend: complete]
# [frontend: methods]
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True,
    for_module=True,
    for_packed_sequence=True,
    for_storage=True,
)
# [/frontend: methods]

__version__ = "0.1.0"
