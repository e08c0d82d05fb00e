"""The convention of a function is guessed from its parameters, and never wrongly."""

import inspect
import re

import pytest
import torch

import ropelab
from ropelab import RotaryEmbedding, apply_rope
from ropelab.command.vocabulary import CHOICES
from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS, declare
from ropelab.conformance.meant import conventions_of
from ropelab.foreign import ARGUMENTS, FOREIGN, did_you_mean
from ropelab.study.faults import CONTROLS, FAULTS
from tests.laws.cache_correct import CORRECT
from tests.laws.cache_faults import CACHE_FAULTS
from tests.laws.test_right_functions import RIGHT, Rotary
from tests.laws.wrong_functions import WRONG

Q = torch.ones(1, 2, 1, 16)
KNOWN = CONVENTIONS | CACHE_CONVENTIONS
FUNCTIONS = [
    *((function, convention) for function, convention, _ in (RIGHT | WRONG).values()),
    *((entry.function, entry.convention) for entry in (*FAULTS.values(), *CACHE_FAULTS.values(), *CONTROLS)),
    *((operator, name) for name, operator in CORRECT.items()),
]


def test_the_convention_of_a_function_fits_and_another_seldom_does():
    """Operators of one name with other scales, and tables without further arguments, fit two conventions or more."""
    alone = 0
    for function, convention in FUNCTIONS:
        fitting, near = conventions_of(function, KNOWN)
        if isinstance(function, torch.jit.ScriptFunction):
            assert not fitting and not near  # its parameters are unknown
            continue
        assert convention in fitting, (function, fitting)
        alone += len(fitting) == 1
    assert alone > len(FUNCTIONS) * 3 / 4


def head_first(query, key, cos_of_rows):
    return query, key


def test_functions_that_fit_no_convention():
    fitting, near = conventions_of(head_first, KNOWN)
    assert not fitting and "vllm" in near
    assert conventions_of(lambda q, k, cos, sin, position_ids=None: q, KNOWN)[0] == ["huggingface"]
    assert set(conventions_of(lambda x, cos, sin: x, KNOWN)[0]) >= {"huggingface", "flash_attn"}
    assert conventions_of(Rotary(), KNOWN)[0] == ["huggingface"]
    assert conventions_of(Rotary, KNOWN)[0] == ["module"]


@pytest.mark.parametrize("word, meant", [(word, one) for word, meant in FOREIGN.items() for one in meant.split()])
def test_a_foreign_word_means_a_choice(word, meant):
    options = (KNOWN, *(values for option, values in CHOICES.items() if option != "out_layout"))
    choices = next(choices for choices in options if meant in choices)
    assert did_you_mean(word, choices) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize(
    "call",
    [lambda: apply_rope(Q, cos=Q[0, :, 0, :8], sin=Q[0, :, 0, :8], layout="neox"),
     lambda: RotaryEmbedding(16, layout="gpt-neox"),
     lambda: declare("plain", layout="rotate_half")],
)  # fmt: skip
def test_the_library_knows_the_words_of_the_command(call):
    with pytest.raises(ValueError, match="layout: expected one of .* did you mean 'split_half'"):
        call()


FUNCTIONS_OF_ROPELAB = [
    *(getattr(ropelab, name) for name in ropelab.__all__ if name not in ("NO_POSITION", "Rope", "use_backend")),
    RotaryEmbedding(16).forward,
]


def test_every_public_function_reads_the_arguments_of_others():
    told = set()
    for function in FUNCTIONS_OF_ROPELAB:
        known = inspect.signature(function).parameters
        assert not any(one.kind is one.VAR_KEYWORD for one in known.values())
        needed = {
            name: None for name, one in known.items() if one.default is one.empty and one.kind is not one.VAR_POSITIONAL
        }
        for word in {*ARGUMENTS, "unknown"} - {*known}:
            written = [one for one in ARGUMENTS.get(word, ()) if re.match(r"\w+", one)[0] in known]
            with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{word}'") as refused:
                function(**needed, **{word: 1})
            assert not written or str(refused.value).endswith(f"; did you mean {written[0]}?")
            told.update(written[:1])
    assert told == {one for written in ARGUMENTS.values() for one in written}


@pytest.mark.parametrize(
    "function, word",
    [(ropelab.PackedSequences, "max_seqlen"), (apply_rope, "max_seqlen"), (apply_rope, "epsilon")],
)
def test_a_word_of_others_that_means_nothing_here_gets_no_guess(function, word):
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{word}'$"):
        function(Q, Q, **{word: 1})


def test_tables_by_position_are_told_their_names():
    with pytest.raises(TypeError, match=r"takes q and k by position, got 4; did you mean cos=cos, sin=sin\?"):
        apply_rope(Q, Q, Q, Q)
    assert not any(one.kind is one.VAR_POSITIONAL for one in inspect.signature(apply_rope).parameters.values())


def test_what_an_error_tells_to_write_rotates_alike():
    q, angles = torch.randn(1, 6, 2, 16), torch.outer(torch.arange(6.0), theta := 10000.0 ** -(torch.arange(8) / 8))
    names = vars(ropelab) | {
        "q": q, "theta": 10000.0, "inv_freq": theta, "freqs": angles, "freqs_cis": torch.polar(angles * 0 + 1, angles),
        "seq_len": 6, "base": 10000.0, "rotary_dim": 16, "dim": 16,
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), -1),
        "cu_seqlens": torch.tensor([0, 6]), "total_tokens": 6, "mrope_section": [3, 3, 2],
    }  # fmt: skip
    plain = {"cos": angles.cos(), "sin": angles.sin()}
    expected = {layout: apply_rope(q, **plain, layout=layout) for layout in ("split_half", "interleaved")}
    for written in {one for several in ARGUMENTS.values() for one in several if "=" in one and " or " not in one}:
        made = dict(names)
        if written.startswith("cos, sin ="):
            exec(written, made)
            call = {"cos": made["cos"], "sin": made["sin"]}
        else:
            call = eval(f"dict({written})", made)
            call = call if {"cos", "frequencies"} & {*call} else plain | call
        if "axes" in call:
            call["positions"] = torch.arange(6).expand(3, 6)
        found = apply_rope(q, **call)
        torch.testing.assert_close(found, expected[call.get("layout", "split_half")], rtol=1e-5, atol=1e-5)
