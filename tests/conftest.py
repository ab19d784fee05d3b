"""The machinery of the guide is importable in tests as it is in pages."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "chapters"), str(ROOT / "docs" / "_ext")]
