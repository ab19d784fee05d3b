"""Run programs in processes of their own, and import torch only once.

Importing torch takes seconds, and a page or a test runs dozens of programs.
So a template process imports torch, with no backend, and forks a child for
each program. The child opens the state that it is asked for, loads the
backends as `import torch` does, and ends as every Python process ends.

Use `subprocess` where the start of the interpreter itself is the subject.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_template: subprocess.Popen | None = None
_lock = threading.Lock()


def run(code: str, env: dict[str, str], timeout: float = 300):
    """Run a program in a child and return its `CompletedProcess`.

    torch is loaded already: of the environment, only what torch reads later
    than at its import has an effect.
    """
    global _template
    with _lock, tempfile.TemporaryDirectory() as folder:
        if _template is None or _template.poll() is not None:
            _template = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, SWITCH: "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(_template.stdin.close)
        request = [code, env, os.getcwd(), folder, timeout]
        print(json.dumps(request), file=_template.stdin, flush=True)
        status = json.loads(_template.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("1", "2"))
    if status is None:
        raise subprocess.TimeoutExpired(code, timeout, out, err)
    return subprocess.CompletedProcess(code, status, out, err)


def wait(child: int, timeout: float) -> int | None:
    """The exit status of a child, None if it was killed for its slowness."""
    descriptor = os.pidfd_open(child)
    ready, *_ = select.select([descriptor], [], [], timeout)
    os.close(descriptor)
    if not ready:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ready else None


def serve() -> list:
    """Fork a child for each request; return the request, in the child."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        print(json.dumps(wait(child, request[-1])), flush=True)
    os._exit(0)


def become(code: str, env: dict, cwd: str, folder: str, _: float) -> dict:
    """Make this process what `python -c` would start; return its globals."""
    for descriptor in (0, 1, 2):
        path = os.path.join(folder, str(descriptor))
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # A state leads PYTHONPATH, and hides what else is called openreg.
    path = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = ["", *path, *(p for p in sys.path[1:] if p not in path)]
    if path and os.path.exists(site := os.path.join(path[0], SITE)):
        runpy.run_path(site)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv[:] = ["-c"]
    return main.__dict__


SITE = "sitecustomize.py"

if __name__ == "__main__":
    import torch

    gc.collect()
    gc.freeze()
    program = serve()
    names = become(*program)
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    exec(compile(program[0], "<string>", "exec"), names)
