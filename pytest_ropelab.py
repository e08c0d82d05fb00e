"""The laws of rotary position embedding as items of pytest, from the setting ``ropelab`` of a project.

The module imports ropelab only where a project has the setting, because pytest loads it in every environment with
ropelab.
"""

import importlib
import shlex

import pytest

SETTING = "ropelab"


def pytest_addoption(parser):
    """Declare the setting: lines such as ``my_package.rope:rotate plain layout=interleaved``."""
    parser.addini(SETTING, "functions that keep the laws: package.module:function convention [claim=value ...]",
                  type="linelist", default=[])  # fmt: skip


def pytest_collection_modifyitems(session, config, items):
    """Add an item for each law of each function. A run that names files or tests gets no such item."""
    if not config.getini(SETTING) or config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    from ropelab.conformance.declared import laws_of, select

    for line in config.getini(SETTING):
        target, convention, *claims = shlex.split(line)
        for law in select(known=laws_of(convention)):
            items.append(LawItem.from_parent(session, name=f"{target}[{law.name}]", target=target,
                                             convention=convention, claims=claims, law=law.name))  # fmt: skip


class LawItem(pytest.Item):
    """A law, and the function that is held to it."""

    def __init__(self, *, target, convention, claims, law, **about):
        super().__init__(**about)
        self.target, self.convention, self.law = target, convention, law
        self.claims = dict(claim.split("=", 1) for claim in claims)

    def runtest(self):
        """Hold the function to the law."""
        from ropelab.conformance.testing import check_law

        module, _, name = self.target.partition(":")
        function = getattr(importlib.import_module(module), name)
        claims = {key: int(value) if value.isdigit() else value for key, value in self.claims.items()}
        check_law(function, self.convention, self.law, **claims)

    def reportinfo(self):
        """The target takes the place of a file."""
        return self.path, None, self.name
