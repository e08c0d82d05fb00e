"""Run the command line, for ``python -m ropelab`` and for the command ``ropelab``."""

import os
import platform
import sys
import traceback

NOT_JUDGED = 2
"""The exit code for "no verdict". Python's own exit code after an error, 1, would mean that a function is wrong."""
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells expect it."""


def main() -> None:
    """Run the command line. Without a verdict it ends with ``NOT_JUDGED``, after Ctrl-C with ``INTERRUPTED``."""
    _open_streams()
    if sys.argv[1:] == ["--version"]:
        return print(_versions())
    if sys.argv[1:] == ["env"]:  # as --version, without the extra
        return print(_environment())
    try:
        try:
            from ropelab.command.cli import Judged, app
        except ModuleNotFoundError as error:
            wanted = "pip install rich typer, the extra 'ropelab[cli]'"
            print(f"ropelab: the command line needs {error.name}: {wanted}", file=sys.stderr)
            raise SystemExit(NOT_JUDGED) from None
        app(prog_name="ropelab")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as ended:
        if ended.code == 1 and not isinstance(ended, Judged):  # typer and rich, where the reader of a pipe is gone
            raise SystemExit(NOT_JUDGED) from None
        raise
    except Exception:  # an error of this library, not of the function
        traceback.print_exc()
        raise SystemExit(NOT_JUDGED) from None


def _versions() -> str:
    """The versions that a report of a fault needs. They need no package but those that the library requires."""
    from ropelab.command.summary import versions

    found = versions("triton")
    triton = f"triton {found['triton']}" if "triton" in found else "no triton"
    return f"ropelab {found['ropelab']} (torch {found['torch']}, {triton}, Python {platform.python_version()})"


def _environment() -> str:
    from ropelab.command.load import load

    load()
    from ropelab.command.environment import report

    return report()


def _open_streams() -> None:
    """Open the descriptors 0, 1 and 2 where they are closed, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
