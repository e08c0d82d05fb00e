"""Run the code of the package ``ropelab``, which the command leaves out until it needs the library."""

import sys


def load() -> None:
    """Run the code of the package, where the command ``ropelab`` has left it out so far."""
    package = sys.modules["ropelab"]
    if not hasattr(package, "__version__") and package.__spec__ is not None and package.__spec__.loader is not None:
        package.__spec__.loader.exec_module(package)
