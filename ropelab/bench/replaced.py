"""Give code of other packages other surroundings for a while: modules, variables of the environment, attributes."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def entries(mapping: MutableMapping, values: Mapping, *, without: Iterable = ()) -> Iterator[None]:
    """Within the context a mapping, such as ``sys.modules`` or ``os.environ``, has these values, and lacks some keys.

    Afterwards it is what it was, so that what was added within the context is gone.
    """
    before = dict(mapping)
    for name in without:
        mapping.pop(name, None)
    mapping.update(values)
    try:
        yield
    finally:
        for name in mapping.keys() - before.keys():
            del mapping[name]
        mapping.update(before)


@contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Within the context a class, an object or a module has other values of its attributes."""
    own = {name: value for name, value in vars(owner).items() if name in values}  # others are those of a base class
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            setattr(owner, name, own[name]) if name in own else delattr(owner, name)
