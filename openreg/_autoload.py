# Chapter: autoload
"""What `import torch` calls when this package is installed.

Nothing may be imported up here. When `import openreg` comes first, it imports
torch, torch calls `load`, and the package is only half there: a module that
needs nothing of it can be loaded all the same.
"""


# [autoload: load]
def load() -> None:
    """Import the package; on failure warn, so that `import torch` goes on.

    torch calls this at the end of its own import. A machine without a working
    driver still has to run CPU work, so the reason becomes a
    :py:class:`RuntimeWarning`. An explicit ``import openreg`` raises it.
    """
    try:
        import openreg  # noqa: F401
    except Exception as error:
        import warnings

        warnings.warn(
            f"openreg could not be loaded, so there is no openreg device: "
            f"{type(error).__name__}: {error}. Everything else of torch "
            f"works. TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops torch from trying",
            RuntimeWarning,
            stacklevel=2,
        )
# [/autoload: load]
