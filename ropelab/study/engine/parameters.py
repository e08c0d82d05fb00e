"""Check the parameters of a notebook in its first cell, by name, before anything runs."""

import math
from collections.abc import Callable

from ropelab.bench.records import ROOT, Selection, gpus, of_one_gpu


def truths(**given: object) -> None:
    """Check that each value is True or False. A word such as "no" would count as True, so it is refused."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def integers(least: int, multiple: int = 1, /, **given: object) -> None:
    """Check that each value is an integer of at least ``least``, divisible by ``multiple``."""
    for name, value in given.items():
        expected = f"an integer of at least {least}" + (f", divisible by {multiple}" if multiple > 1 else "")
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
        if value < least or value % multiple:
            raise ValueError(f"{name}: expected {expected}, got {value}")


def positive_numbers(**given: object) -> None:
    """Check that each value is a finite number above 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number above 0, got {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a number above 0, got {value}")


def words(**given: object) -> None:
    """Check that each value is a text with a letter in it."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a word, got {value!r}")
        if not value.strip():
            raise ValueError(f"{name}: expected a word, got an empty one")


def lists(check: Callable[..., None], length: int | None = None, /, **given: object) -> None:
    """Check that each value is a list of ``length`` items (default: one or more), and ``check(name=item)`` each."""
    for name, value in given.items():
        expected = "a list" + (f" of {length} items" if length else "")
        if not isinstance(value, list):
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
        if not value or (length and len(value) != length):
            raise ValueError(f"{name}: expected {expected}{'' if length else ' of at least one item'}, got {value}")
        for i, item in enumerate(value):
            check(**{f"{name}[{i}]": item})


def chosen_records(records: object, gpu: object) -> Selection:
    """The records that a notebook reads: in the directory ``records``, of ``gpu``, or else of the GPU of reference.

    A relative directory begins at the root of the checkout, so a notebook runs in any working directory.
    """
    for name, value in (("records", records), ("gpu", gpu)):
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a word, got {value!r}")
    if not gpus(ROOT / records):
        raise ValueError(f"records: expected a directory with a folder of records for each GPU, got {records!r}")
    return of_one_gpu(ROOT / records, gpu)
