"""Run the command line, for ``python -m ropelab``; the command ``ropelab`` does the same without this import."""

from ropelab.command.main import main

if __name__ == "__main__":
    main()
