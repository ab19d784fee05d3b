"""PyTorch's operator, module and optimizer databases, run on the device.

    python -m sweep --help

Every call is made on the CPU and on the device and compared. `coverage.tsv` is
what came out; `table.py` says how to read it.
"""
