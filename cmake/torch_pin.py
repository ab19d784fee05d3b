"""The dependency on torch, as the build writes it into the metadata.

The sources work with a range of releases. What was compiled works with one:
the C++ backend interface has no stable ABI, so a wheel names the release line
it was built against.
"""

from importlib.metadata import version

RANGE = ">=2.13,<2.16"


def dynamic_metadata(
    field: str, settings: dict[str, object], project: object = None
) -> list[str]:
    if field != "dependencies" or settings:
        raise RuntimeError("torch_pin provides dependencies, with no settings")
    line = ".".join(version("torch").split("+")[0].split(".")[:2])
    return [f"torch{RANGE},=={line}.*"]
