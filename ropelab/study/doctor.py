"""Find the project's requirements that an environment lacks.

Run as a file, before anything is imported: ``python ropelab/study/doctor.py study test`` checks the package's own
requirements and the requirements of the named extras and dependency groups, all read from pyproject.toml.
"""

import platform
import re
import sys
from importlib import metadata
from pathlib import Path


def missing(requirements: list[str]) -> list[str]:
    """The requirements (``name>=version; marker``) that are not met, with the version found where it is too old."""
    lacking = []
    for full in requirements:
        requirement, _, marker = full.partition(";")
        if marker and not _holds(marker.strip()):
            continue
        name, _, wanted = requirement.partition(">=")
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(requirement)
            continue
        if _release(found) < _release(wanted):
            lacking.append(f"{requirement} (found {found})")
    return lacking


def _holds(marker: str) -> bool:
    """Whether the requirement is for this system: a marker is an expression of Python over a few names."""
    here = {"sys_platform": sys.platform, "platform_machine": platform.machine()}
    return bool(eval(marker, {"__builtins__": {}}, here))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)


def main(needs: list[str]) -> str | None:
    try:
        import tomllib  # new in Python 3.11
    except ImportError:
        return f"{sys.executable} is Python {sys.version.split()[0]}; Python >= 3.11 is needed"

    settings = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    project = settings["project"]
    groups = project["optional-dependencies"] | settings["dependency-groups"]
    lacking = missing(project["dependencies"] + [name for need in needs for name in groups[need]])
    if lacking:
        return (
            f"{sys.executable} lacks {', '.join(lacking)}\n"
            "Install them there, or leave out PYTHON= and make builds an environment of its own."
        )
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
