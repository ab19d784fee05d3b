"""The public names of the package, for type checkers."""

import torch

from openreg import dlpack as dlpack
from openreg import export as export
from openreg import fallback as fallback
from openreg import memory as memory
from openreg import parallel as parallel
from openreg import random as random
from openreg import sanitizer as sanitizer
from openreg import streams as streams
from openreg.devices import *
from openreg.fallback import fallback_count as fallback_count
from openreg.fallback import fallbacks as fallbacks
from openreg.formats import *
from openreg.memory import *
from openreg.peer import *
from openreg.random import *
from openreg.raw_memory import *
from openreg.sharing import *
from openreg.sync_debug import *
from openreg.tiles import *

__version__: str
default_generators: tuple[torch.Generator, ...]

ExternalStream = streams.ExternalStream
Stream = streams.Stream
StreamContext = streams.StreamContext
current_stream = streams.current_stream
default_stream = streams.default_stream
get_stream_from_external = streams.get_stream_from_external
is_current_stream_capturing = streams.is_current_stream_capturing
set_stream = streams.set_stream
stream = streams.stream

# What it makes is a torch.Event, which a class of Python cannot say.
class Event(torch.Event):
    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> Event: ...
