"""Refusals of ropelab's functions in the words of the adapter that called them."""

import re


def renamed(error: TypeError | ValueError, **names: str) -> TypeError | ValueError:
    """The same error with the adapter's names of the arguments.

    ``renamed(error, q="t", cos="freqs")`` makes ``t: expected freqs's device cpu, got meta`` of ``q: expected cos's
    device cpu, got meta``. A word is an argument where the message begins with the word, and before ``'s`` and after
    ``of``.

    Args:
        error: of `ropelab.apply_rope` or its like: ``name: expected ..., got ...``.
        names: ropelab's name of each argument -> the adapter's.
    """
    words = "|".join(names)
    argument = re.compile(rf"^(?:{words})(?=: )|\b(?:{words})(?='s )|(?<=\bof )(?:{words})\b")
    message = argument.sub(lambda found: names[found[0]], str(error))
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)
