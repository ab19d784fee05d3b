"""Pretend that a package with an entry point for torch is installed."""

import sys
import tempfile
from pathlib import Path


def install(name: str, code: str) -> None:
    """Make a package whose entry point runs `code`; last on the path."""
    folder = Path(tempfile.mkdtemp())
    body = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / f"{name}_start.py").write_text(f"def load():\n{body}")
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[torch.backends]\n{name} = {name}_start:load\n"
    )
    sys.path.append(str(folder))
