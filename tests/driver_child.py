"""Run a snippet against the driver in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
PRELUDE = """\
import ctypes, os, sys, threading
import driver
from driver_gate import Gate, held, let_ready_work_run
libc = ctypes.CDLL(None)
"""


def run(code: str, *options: str, **environment: str):
    """The finished process; OPENREG_* settings come from the caller only."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OPENREG_") or name == "OPENREG_DRIVER"
    }
    return subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(code)],
        env=inherited | {"PYTHONPATH": str(TESTS)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def output(code: str, *options: str, **environment: str) -> str:
    """What the snippet prints; it must end well."""
    process = run(code, *options, **environment)
    assert process.returncode == 0, (
        f"exit status {process.returncode}\n{process.stderr}"
    )
    return process.stdout.strip()


def error(statement: str, **environment: str) -> str:
    """The driver's error that a statement raises, as `name: message`."""
    code = f"""
try:
    {statement}
except driver.DriverError as error:
    print(error)
"""
    return output(code, **environment)
