# Chapter: autoload
"""What `import torch` calls when this package is installed.

It lies beside :py:mod:`openreg` and not in it. Importing a module imports the
package around it first, and what fails there would end ``import torch`` before
:py:func:`load` could catch it. For the same reason nothing is imported up here.
"""


# [autoload: load]
def load() -> None:
    """Import the backend; on failure warn, so that `import torch` goes on.

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
