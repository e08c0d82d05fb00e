"""Put the error messages of one of ropelab's functions into the words of the function that called it."""

import re
from collections.abc import Callable
from typing import Any


def renamed(error: TypeError | ValueError, **names: str) -> TypeError | ValueError:
    """The same error with the caller's names of the arguments.

    ``renamed(error, q="t", cos="freqs")`` turns ``q: expected cos's device cpu, got meta`` into ``t: expected freqs's
    device cpu, got meta``. A word counts as an argument at the beginning of the message, before ``'s`` and after
    ``of``.

    Args:
        error: an error of `ropelab.apply_rope` or a similar function: ``name: expected ..., got ...``.
        names: maps ropelab's name of each argument to the caller's name.
    """
    words = "|".join(names)
    argument = re.compile(rf"^(?:{words})(?=: )|\b(?:{words})(?='s )|(?<=\bof )(?:{words})\b")
    message = argument.sub(lambda found: names[found[0]], str(error))
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)


def in_words(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """``function`` with errors that have the caller's names of the arguments, as `renamed` gives them."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise renamed(error, **names) from error

    return called
