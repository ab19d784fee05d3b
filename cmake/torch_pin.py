"""The dependency on torch, as the build writes it into the metadata.

The sources work with a range of releases. What was compiled works with one:
the C++ backend interface has no stable ABI, so a wheel names the release line
it was built against.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

RANGE = ">=2.13,<2.16"


def dynamic_metadata(settings: dict, project: dict) -> dict[str, list[str]]:
    """What the project depends on: the hook that scikit-build-core calls."""
    try:
        torch = Version(version("torch"))
    except PackageNotFoundError:
        raise RuntimeError(
            f"The build needs torch{RANGE}, and none is installed: install "
            f"one, or build without --no-build-isolation"
        ) from None
    if not SpecifierSet(RANGE).contains(torch, prereleases=True):
        raise RuntimeError(
            f"torch {torch} is installed, but {project['name']} builds with "
            f"torch{RANGE}: install one of those first"
        )
    return {"dependencies": [f"torch{RANGE},=={torch.major}.{torch.minor}.*"]}


def dynamic_wheel(settings: dict) -> dict[str, bool]:
    """Say that each wheel of one source archive may depend on another torch."""
    return {"dependencies": True}
