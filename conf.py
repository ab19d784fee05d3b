"""Sphinx settings of the guide. No step needs a network."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "chapters"), str(ROOT / "docs" / "_ext")]

project = "The OpenReg guide"
author = "the OpenReg authors"
copyright = f"2026, {author}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "hawkmoth",
    "sphinx_copybutton",
    "sphinx_design",
    "freshness",
    "ladder",
    "listing",
    "symptoms",
    "verdicts",
]
root_doc = "index"
source_suffix = {".md": "myst-nb"}
include_patterns = ["index.md", "docs/**", "chapters/**"]
exclude_patterns = ["docs/_ext", "docs/_static", "**/README.md"]
nitpicky = True
nitpick_ignore = [("py:class", "Device")]  # the alias in openreg/devices.py
# The guide links to PyTorch only, and these are names of the standard library.
# PyTorch's pages describe these classes by a shorter name, or not at all.
nitpick_ignore_regex = [
    ("py:class", r"collections\.abc\..*"),
    ("py:class", r"torch\.(fx|export|_ops)\..*"),
]
for name in ("size_t", "ptrdiff_t", "int64_t", "uint32_t", "uint64_t"):
    nitpick_ignore.append(("c:identifier", name))
numfig = True
numfig_format = {"code-block": "Listing %s"}

myst_enable_extensions = [
    "attrs_inline",
    "colon_fence",
    "deflist",
    "fieldlist",
    "html_image",
]
myst_heading_anchors = 3

# force runs every page; cache only those whose state or cells changed.
nb_execution_mode = os.environ.get("OPENREG_GUIDE_EXECUTE", "cache")
nb_execution_cache_path = str(ROOT / "_build" / "jupyter_cache")
nb_execution_raise_on_error = False
nb_execution_show_tb = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "warn"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
hawkmoth_root = str(ROOT / "openreg" / "driver")
hawkmoth_compiler = "g++"  # only asked where its headers lie

TORCH = "https://docs.pytorch.org/docs/2.13/"
inventory = str(ROOT / "docs" / "inventories" / "torch.inv")
intersphinx_mapping = {"torch": (TORCH, inventory)}

html_theme = "furo"
html_title = project
html_static_path = ["docs/_static"]
html_css_files = ["guide.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "tango"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = (
    "div:not(.highlight-diff):not(.output) > div.highlight > pre"
)
