"""``python -m ropelab``: the command line, as ``ropelab`` where the package is installed."""

import sys
import traceback

NOT_JUDGED = 2
"""Exit code for whatever is no verdict. Python's own for an error, 1, means that a function is wrong."""


def main() -> None:
    """Run it."""
    try:
        from ropelab.conformance.cli import app
    except ModuleNotFoundError as error:
        print(f"ropelab: the command line needs {error.name}: pip install 'ropelab[cli]'", file=sys.stderr)
        raise SystemExit(NOT_JUDGED) from None
    try:
        app(prog_name="ropelab")
    except Exception:  # an error of ours
        traceback.print_exc()
        raise SystemExit(NOT_JUDGED) from None


if __name__ == "__main__":
    main()
