"""What a limit counts, beyond which calls are wrong, follows from calls of other extents."""

from dataclasses import replace

import pytest

from ropelab.conformance import verify
from ropelab.conformance.case import Sizes
from ropelab.conformance.faults import correct
from ropelab.conformance.limits import counts, limit_in_words, longest_right

LIMIT = 2**17
KNOWN = counts("q", sequences=True, pair=True, values=True)


@pytest.mark.parametrize("words", KNOWN)
def test_every_count_is_told_from_the_others(words):
    def wrong(sizes):
        return KNOWN[words](sizes) > LIMIT

    sizes = Sizes(batch=1)
    longest = longest_right(lambda n: wrong(replace(sizes, tokens=n)), 1, 2 * LIMIT)
    assert KNOWN[words](replace(sizes, tokens=longest)) <= LIMIT < KNOWN[words](replace(sizes, tokens=longest + 1))
    assert limit_in_words(replace(sizes, tokens=longest), KNOWN, wrong) == f"{LIMIT} {words}"


def test_a_limit_that_counts_nothing_known_is_that_of_the_call():
    def wrong(sizes):
        return sizes.tokens * sizes.q_heads**2 > 999

    assert limit_in_words(Sizes(batch=1, tokens=62), KNOWN, wrong) == "62 tokens of 4 heads of 16 features"


def test_a_call_that_cannot_be_made_refutes_nothing():
    def wrong(sizes):
        return sizes.tokens > 100 if sizes.head_dim == Sizes.head_dim else None

    assert limit_in_words(Sizes(batch=1, tokens=100), KNOWN, wrong) == "100 tokens"


@pytest.mark.parametrize(
    "size, limit, words",
    [
        (lambda x: x.numel(), 2**15, "in calls of more than 32768 elements of x"),
        (lambda x: x.shape[0] * x.shape[1] * x.shape[2], 2**11, "in calls of more than 2048 heads of x of all tokens"),
    ],
)
def test_a_description_has_the_limit_of_calls_of_all_extents(size, limit, words):
    def rope(x, positions):
        return correct.plain(x, -positions if size(x) > limit else positions)

    found = verify(rope, "plain", laws=["token_counts"], token_counts=(64, 1024)).identification
    assert found.proven and [str(d) for d in found.deviations] == [f"each input turns by minus the angle {words}"]
