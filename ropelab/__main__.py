"""``python -m ropelab``: the command line, as ``ropelab`` where the package is installed."""


def main() -> None:
    """Run it."""
    try:
        from ropelab.conformance.cli import app
    except ModuleNotFoundError as error:
        raise SystemExit(f"ropelab: the command line needs {error.name}: pip install 'ropelab[cli]'") from None
    app(prog_name="ropelab")


if __name__ == "__main__":
    main()
