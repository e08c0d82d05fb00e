"""This file runs the command line, for ``python -m ropelab`` and for the command ``ropelab``."""

import sys
import traceback

NOT_JUDGED = 2
"""The exit code for "no verdict". Python's own exit code after an error, 1, would mean that a function is wrong."""


def main() -> None:
    """Run the command line; any error of the library ends with ``NOT_JUDGED``."""
    try:
        from ropelab.conformance.cli import app
    except ModuleNotFoundError as error:
        print(f"ropelab: the command line needs {error.name}: pip install 'ropelab[cli]'", file=sys.stderr)
        raise SystemExit(NOT_JUDGED) from None
    try:
        app(prog_name="ropelab")
    except Exception:  # an error of this library, not of the function
        traceback.print_exc()
        raise SystemExit(NOT_JUDGED) from None


if __name__ == "__main__":
    main()
