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
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# What `python -c` runs, so that a program finds itself where that would be.
COMMAND = [sys.executable, "-c", "exec(__import__('processes').serve())"]

_template: subprocess.Popen | None = None
_lock = threading.Lock()


def run(code: str, env: dict[str, str], timeout: int = 300):
    """Run a program in a child and return its `CompletedProcess`.

    torch is loaded already: of the environment, only what torch reads later
    than at its import has an effect.
    """
    global _template
    with _lock, tempfile.TemporaryDirectory() as folder:
        if _template is None or _template.poll() is not None:
            _template = subprocess.Popen(
                COMMAND,
                cwd=Path(__file__).parent,
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(_template.stdin.close)
        request = [code, env, os.getcwd(), folder, timeout]
        print(json.dumps(request), file=_template.stdin, flush=True)
        status = int(_template.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("1", "2"))
    if status == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(code, timeout, out, err)
    return subprocess.CompletedProcess(code, status, out, err)


def serve() -> str:
    """Fork a child for each request; return the program, in the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a word
    import torch

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        code, env, cwd, folder, timeout = json.loads(line)
        if (child := os.fork()) == 0:
            break
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
    else:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(timeout)  # which ends the child, when it is too slow
    for descriptor in (0, 1, 2):
        with open(os.path.join(folder, str(descriptor)), "a+") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # A state leads PYTHONPATH, and hides what else is called openreg.
    path = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = ["", *path, *(p for p in sys.path[1:] if p not in path)]
    if path and (site := Path(path[0], "sitecustomize.py")).exists():
        runpy.run_path(str(site))
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    return code
