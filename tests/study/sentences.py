"""What a computed sentence states, whatever its words."""

import re


def numbers(text: str) -> list[float]:
    """The numbers of a text, in their order; a percentage as the number before its sign."""
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)]


def states(text: str, *expected: float) -> bool:
    """Whether the text has all these numbers, in this order, among others."""
    rest = iter(numbers(text))
    return all(number in rest for number in expected)
