# Chapter: autoload
"""Another name for :py:mod:`openreg`, which PyTorch's own examples use.

Code written against PyTorch's reference backend says ``import torch_openreg``.
It finds this backend, and nothing of its own in between.
"""

import sys

import openreg

sys.modules[__name__] = openreg
