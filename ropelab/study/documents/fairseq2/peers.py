"""Load fairseq2 itself: the pull request's code at its commit, and the newest release.

Both are pure Python. ``fairseq2/__init__.py`` imports the native library fairseq2n, and ``fairseq2/nn/__init__.py``
imports every module of ``fairseq2.nn``. So neither file is executed. An empty module, which only says where the files
of the package are, takes the place of each. Every other module is executed as published.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ropelab.bench import packages, replaced

REPOSITORY = "facebookresearch/fairseq2"
COMMIT = "eb69a67ca78cdea45688e2515b2491bbf2e8aa00"
"""The head of the pull request."""

PROPOSED = f"fairseq2 {COMMIT[:9]}"
"""The beginning of `Fairseq2.source` for the pull request's code."""

ENCODERS = "src/fairseq2/nn/_position_encoder.py"
"""The file that the pull request changes."""

NEEDED = tuple(
    f"src/fairseq2/{name}.py"
    for name in (
        "data_type", "device", "typing", "ops/__init__", "ops/_shape", "utils/tensor", "nn/_batch_layout",
        "nn/_incremental_state",
    )
)  # fmt: skip
"""The other files of the commit that `ENCODERS` needs. They import nothing outside this list but torch."""

_NOT_EXECUTED = ("fairseq2", "fairseq2.nn", "fairseq2.nn.utils", "fairseq2.utils", "fairseq2.models",
                 "fairseq2.models.olmo")  # fmt: skip


@dataclass(frozen=True)
class Fairseq2:
    """The classes of one version of fairseq2.

    Attributes:
        version: a release, or ``"eb69a67ca"``.
        sha256: the first 12 hexadecimal digits of the checksum of the file with the encoders.
        modules: the name of each module, without "fairseq2." -> the module.
    """

    version: str
    sha256: str
    modules: dict[str, ModuleType]

    @property
    def source(self) -> str:
        """The name of the code in the records: version and checksum."""
        return f"fairseq2 {self.version}, sha256 {self.sha256}"

    def __getattr__(self, name: str) -> type:
        """The class of that name, such as ``RotaryEncoder``, ``BatchLayout`` or ``IncrementalStateBag``."""
        for module in self.modules.values():
            if name in vars(module) and vars(module)[name].__module__ == module.__name__:
                return vars(module)[name]
        raise AttributeError(f"fairseq2 {self.version}: no class {name}")


@cache
def proposed() -> Fairseq2:
    """The code of the pull request.

    Raises:
        ropelab.bench.packages.NotInstalled: a file of the commit is not under ``build/peers``.
    """
    file = packages.file_at(REPOSITORY, COMMIT, ENCODERS)
    for path in NEEDED:
        packages.file_at(REPOSITORY, COMMIT, path)
    names = "nn._position_encoder", "nn._batch_layout", "nn._incremental_state"
    return _loaded(COMMIT[:9], file.parents[2], file, names)


@cache
def released() -> Fairseq2:
    """The newest release, which has both encoders without ``impl``, ``DualRotaryEncoder`` and ``YaRNRotaryEncoder``.

    Raises:
        ropelab.bench.packages.NotInstalled: fairseq2 is not under ``build/peers``.
    """
    version, directory = packages.locate("fairseq2")
    names = "nn.position_encoder", "nn.batch_layout", "nn.incremental_state", "models.olmo.yarn_rope"
    return _loaded(version, directory, directory / "fairseq2" / "nn" / "position_encoder.py", names)


def _loaded(version: str, directory: Path, encoders: Path, names: tuple[str, ...]) -> Fairseq2:
    """Execute the modules of these names, and of the modules that they import, from the files of one version.

    The modules are imported as ``fairseq2.…``, and then named after the version: torch.compile imports the module of
    every function that it inlines by the module's name, and several versions must not share a name.
    """
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fairseq2"}
    stand_ins = {name: ModuleType(name) for name in _NOT_EXECUTED}
    for name, module in stand_ins.items():
        module.__path__ = [str(directory.joinpath(*name.split(".")))]
    with replaced.entries(sys.modules, stand_ins):
        found = {}
        for name in names:
            found[name] = importlib.import_module(f"fairseq2.{name}")
            # models.olmo.yarn_rope imports these classes from fairseq2.nn, whose own file would gather them.
            stand_ins["fairseq2.nn"].__dict__.update(_definitions(found[name]))
        executed = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fairseq2"}
    sys.modules.update(others)
    prefix = f"_ropelab_peer_fairseq2_{version}".replace(".", "_")
    for name, module in executed.items():
        module.__name__ = prefix + name.removeprefix("fairseq2")
        sys.modules[module.__name__] = module
        for definition in _definitions(module, name).values():
            definition.__module__ = module.__name__
    return Fairseq2(version, hashlib.sha256(encoders.read_bytes()).hexdigest()[:12], found)


def _definitions(module: ModuleType, name: str | None = None) -> dict[str, Any]:
    """The classes and functions that the file of a module defines, by name."""
    name = name or module.__name__
    return {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
