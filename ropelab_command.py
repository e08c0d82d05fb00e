"""The command ``ropelab``, which answers ``--help`` and mistakes in its options without an import of torch.

The import of a module of ropelab would first run ``ropelab/__init__.py``, which imports torch. Here the package takes
its place among the modules before its code has run. `ropelab.command.load` runs that code, for commands that need the
library.
"""

import sys
from importlib.util import find_spec, module_from_spec

if (spec := find_spec("ropelab")) is not None and "ropelab" not in sys.modules:
    sys.modules["ropelab"] = module_from_spec(spec)

from ropelab.command.main import main  # noqa: E402, F401
