"""The laws of rotary position embedding as items of pytest, from the setting ``ropelab`` of a project.

The module imports ropelab only where a project has the setting, because pytest loads it in every environment with
ropelab.
"""

import ast
import importlib
import shlex

import pytest

SETTING = "ropelab"


def pytest_addoption(parser):
    """Declare the setting: lines such as ``my_package.rope:rotate plain layout=interleaved``."""
    parser.addini(SETTING, "functions that keep the laws: package.module:function convention [claim=value ...]",
                  type="linelist", default=[])  # fmt: skip


def pytest_report_header(config):
    """Say that a run leaves the laws out."""
    if config.getini(SETTING) and _names_tests(config):
        return "ropelab: no laws, because the command names files or folders; pytest without names runs them"
    return None


def pytest_configure(config):
    """Refuse a wrong setting before any test runs."""
    if config.getini(SETTING) and not _names_tests(config):
        from ropelab.conformance.declared import declare

        for line in config.getini(SETTING):
            target, convention, claims = _read(line)
            try:
                declare(convention, **claims)
            except (TypeError, ValueError) as error:
                raise pytest.UsageError(f"{SETTING}: {line!r}: {error}") from None


def pytest_collection_modifyitems(session, config, items):
    """Add an item for each law of each function. A run that names files or tests gets no such item."""
    if not config.getini(SETTING) or _names_tests(config):
        return
    from ropelab.conformance.declared import laws_of, select

    for line in config.getini(SETTING):
        target, convention, claims = _read(line)
        module, _, name = target.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except Exception as error:  # a module may raise anything
            reason = f"{SETTING}: {line!r}: {type(error).__name__}: {error}"
            if not hasattr(config, "workerinput"):
                raise pytest.UsageError(reason) from None
            items.append(Refused.from_parent(session, name=target, reason=reason))
            continue
        for law in select(known=laws_of(convention)):
            items.append(LawItem.from_parent(session, name=f"{target}[{law.name}]", function=function,
                                             convention=convention, claims=claims, law=law.name))  # fmt: skip


def _names_tests(config):
    return config.args_source is pytest.Config.ArgsSource.ARGS


def _read(line):
    """Target, convention and claims of a line of the setting."""
    expected = "package.module:function convention [claim=value ...]"
    try:
        target, convention, *claims = shlex.split(line)
        read = dict(claim.split("=", 1) for claim in claims)
    except ValueError as error:
        raise pytest.UsageError(f"{SETTING}: expected {expected}, got {line!r} ({error})") from None
    return target, convention, {key: _value(text) for key, text in read.items()}


def _value(text):
    """The number or flag that Python reads in the text of a claim, and otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class Refused(pytest.Item):
    """A line of the setting without a function, in a worker of xdist, which can end no run."""

    def __init__(self, *, reason, **about):
        super().__init__(**about)
        self.reason = reason

    def runtest(self):
        """Say why."""
        pytest.fail(self.reason, pytrace=False)


class LawItem(pytest.Item):
    """A law, and the function that is held to it."""

    def __init__(self, *, function, convention, claims, law, **about):
        super().__init__(**about)
        self.function, self.convention, self.claims, self.law = function, convention, claims, law

    def runtest(self):
        """Hold the function to the law."""
        from ropelab.conformance.testing import check_law

        check_law(self.function, self.convention, self.law, **self.claims)

    def reportinfo(self):
        """The target takes the place of a file."""
        return self.path, None, self.name
