"""The screen of a wrong function says what was measured, and says nothing of a right one."""

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from ropelab.command.summary import LINES, summary, to_note
from ropelab.command.vocabulary import FAMILY
from ropelab.conformance import calls
from ropelab.conformance.alone import wrong_alone
from ropelab.conformance.cache import CACHE_CONVENTIONS
from ropelab.conformance.cache.found import cache_screen
from ropelab.conformance.cache.found import watch as watch_cache
from ropelab.conformance.declared import declare
from ropelab.conformance.law import against_truth
from ropelab.conformance.measure import Reader, angle, form, measure, rows
from ropelab.conformance.reading import readings
from ropelab.conformance.result import Result
from ropelab.conformance.screen import SLOW, screen
from ropelab.conformance.shrink import smallest
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import verify
from ropelab.conformance.watched import watch
from ropelab.study.faults import CONTROLS, FAULTS, Fault, correct
from tests.laws import cache_faults
from tests.laws.cache_block_scales import BlockScaled
from tests.laws.cache_correct import BLOCK_FORMS, FORMS, Operator

CACHE_FAULTS = {fault.name: fault for fault in vars(cache_faults).values() if isinstance(fault, Fault)}


class Held:
    """A function under a declaration, with what its laws see of it."""

    def __init__(self, function, convention, **options):
        self.declaration = declare(convention, **options)
        self.function, self.surroundings = function, Surroundings()
        self.sizes = self.declaration.sizes

    def subject(self, declaration=None):
        return (declaration or self.declaration).subject(self.function, self.surroundings)

    def watched(self):
        with self.surroundings.ours():
            return [(law, number, seen) for law in self.declaration.laws if law.name not in SLOW
                    for number, seen in enumerate(watch(law, self.subject(), self.sizes))]  # fmt: skip

    def measured(self):
        """Return all that is seen, the first wrong call, its map, and the function that asks for it again."""
        found = self.watched()
        law, number, first = next(one for one in found if one[2].defined and one[2].wrong.any())

        def ask(draw):
            return next(islice(watch(law, self.subject(), self.sizes, draw), number, None))

        with self.surroundings.ours():
            return [seen for _, _, seen in found if seen.defined], first, measure(first, ask), ask

    def screen(self, *broken, target=""):
        show = cache_screen if self.declaration.writes_cache else screen
        laws = [
            Result(law.name, law.statement, "fail" if law.name in broken else "pass") for law in self.declaration.laws
        ]
        with self.surroundings.ours():
            return show(self.declaration, self.subject, laws, target)


def of_fault(name):
    fault = FAULTS.get(name) or CACHE_FAULTS[name]
    return Held(fault.function, fault.convention, **fault.options)


def shifted(x, positions):
    return correct.plain(x, positions + 3)


def longer(x, positions):
    return 1.5 * correct.plain(x, positions)


def turned_back(x, positions):
    return correct.plain(x, -positions)


def wrapped(x, positions):
    return correct.plain(x, positions % 7)


def other_base(x, positions):
    return correct.plain(x, positions, base=500.0)


def two_causes(x, positions):
    y = correct.plain(x, positions + 1)
    return torch.cat((y[..., :1, :], 0.5 * y[..., 1:, :]), -2)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_no_call_of_a_right_function_is_seen_as_wrong(control):
    held = Held(control.function, control.convention, **control.options)
    seen = [seen for _, _, seen in held.watched() if seen.defined]
    assert seen and not any(one.wrong.any() for one in seen)
    assert held.screen() is None


def test_a_call_is_asked_again_with_other_numbers_and_all_else_alike():
    held = of_fault("table_of_batch_zero")
    for law in held.declaration.laws:
        if law.name in ("packed", "strides", "adjoint", "decode", "context_parallel"):
            with held.surroundings.ours():
                both = [list(watch(law, held.subject(), held.sizes, number)) for number in (0, 1)]
            assert len(both[0]) == len(both[1])
            for one, other in zip(*both, strict=True):
                assert (one.what, one.given.shape) == (other.what, other.given.shape)
                assert [x.stride() for x in one.case.inputs] == [x.stride() for x in other.case.inputs]
                assert np.array_equal(one.positions, other.positions)
                assert law.name not in ("strides", "adjoint") or not np.array_equal(one.given, other.given)


def test_matrices_and_positions_are_those_of_the_function():
    _, first, maps, _ = Held(shifted, "plain").measured()
    turns = (first.positions[:, :, None] + 3) * first.frequencies
    apart = angle(maps.matrix) - np.broadcast_to(turns, maps.matrix.shape[:-2])
    assert abs((apart + np.pi) % (2 * np.pi) - np.pi).max() < 1e-5
    assert maps.alone.all() and np.allclose(maps.length.astype(float), 1)
    assert rows(Reader(maps), 0, range(5)).keys() == {tuple((p + 3.0,) for p in range(5))}


@pytest.mark.parametrize(
    "function, number",
    [(shifted, "p + 3"), (longer, "1.5"), (turned_back, "minus"), (wrapped, "7"), (other_base, "500")],
)
def test_a_common_mistake_is_read_with_its_number(function, number):
    seen, _, maps, _ = Held(function, "plain").measured()
    (sentence,) = readings(seen, maps)
    assert number in sentence


def half_a_head_apart(t, freqs_cos, freqs_sin):
    """Pairs (i, i + D/2) with i < R/2."""
    pairs, half = freqs_cos.shape[-1] // 2, t.shape[-1] // 2
    order = [*range(pairs), *range(half, half + pairs), *range(pairs, half), *range(half + pairs, 2 * half)]
    back = torch.tensor(order).argsort()
    return correct.deepspeed(t[..., order], freqs_cos, freqs_sin)[..., back]


def first_features_of_a_whole_head(t, freqs_cos, freqs_sin):
    width, (first, second) = freqs_cos.shape[-1], t.chunk(2, -1)
    turned = torch.cat((-second, first), -1)[..., :width]
    return torch.cat((t[..., :width] * freqs_cos + turned * freqs_sin, t[..., width:]), -1)


@pytest.mark.parametrize("rotary_dim", [4, 8, 12])
@pytest.mark.parametrize("function", [half_a_head_apart, first_features_of_a_whole_head])
def test_partners_half_a_head_apart_are_read(function, rotary_dim):
    seen, _, maps, _ = Held(function, "deepspeed", rotary_dim=rotary_dim).measured()
    (sentence,) = readings(seen, maps)
    assert "head_dim/2" in sentence


def test_nothing_is_read_where_one_wrong_element_has_another_cause():
    seen, _, maps, _ = Held(two_causes, "plain").measured()
    assert readings(seen, maps) == []


@pytest.mark.parametrize(
    "name",
    ["backward_applies_forward", "table_of_rank_zero", "height_and_width_dropped", "sections_in_blocks",
     "applied_twice", "exponent_by_head_dim", "frequencies_in_bfloat16",
     "backward_forgets_factor", "position_modulo_length", "layout_flag_ignored"],
)  # fmt: skip
def test_a_fault_of_the_catalogue_is_read(name):
    seen, _, maps, _ = of_fault(name).measured()
    assert len(readings(seen, maps)) == 1


def test_wrong_calls_are_told_by_what_they_alone_have():
    seen = [seen for _, _, seen in of_fault("table_of_batch_zero").watched() if seen.defined]
    wrong, right = ([one for one in seen if one.wrong.any() == bad] for bad in (True, False))
    words = calls.in_common(wrong, right, calls.CIRCUMSTANCES, calls.EXTENTS)[0].removeprefix("with ")
    assert [calls.CIRCUMSTANCES[words](one) for one in (*wrong, *right)] == [True] * len(wrong) + [False] * len(right)


def test_equal_calls_with_a_right_and_a_wrong_result_are_told():
    seen = next(seen for _, _, seen in Held(correct.plain, "plain").watched())
    other = replace(seen, actual=seen.actual + 1)
    assert calls.equal_differ([seen, other]) and not calls.equal_differ([seen, seen])
    assert not calls.equal_differ([seen, replace(other, given=seen.given + 1)])
    assert calls.equal_differ([seen for _, _, seen in of_fault("rescaled_cache_stays").watched() if seen.defined])


def axes_in_turn_to_the_end(q, k, cos, sin, positions, mrope_section, mrope_interleaved):
    """The last pair reads another axis, as it would in blocks; the pairs before do not."""
    pairs, axes = cos.shape[1], [i for i, n in enumerate(mrope_section) for _ in range(n)]
    axes = [i % len(mrope_section) for i in range(pairs)] if mrope_interleaved else axes
    rows = positions[torch.tensor(axes)].T.long(), torch.arange(pairs)
    return tuple(correct.turn(x, cos[rows][:, None], sin[rows][:, None], "split_half") for x in (q, k))


def test_a_mistake_that_would_make_right_elements_wrong_is_not_read():
    shown = Held(axes_in_turn_to_the_end, "mrope").screen("axes")
    assert shown.calls and not shown.reading, str(shown)


def test_a_pair_that_reads_another_axis_is_told_by_its_axes():
    shown = Held(axes_in_turn_to_the_end, "mrope").screen("axes")
    assert [re.findall(r"\d+", line) for line in shown.positions] == [["5", "0", "2"]] and not shown.matrices


def moved_in_later_sequences(x, positions):
    """The second sequence turns by a position too many, the third by two."""
    return correct.plain(x, positions.expand(x.shape[:2]) + torch.arange(len(x))[:, None])


def adjacent_angles(x, positions):
    """Pairs are halves, and the tables repeat each angle for adjacent features."""
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = (positions.double()[..., None] * frequencies).repeat_interleave(2, -1)[..., None, :]
    first, second = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()).to(x.dtype)


def test_each_of_two_wrong_sequences_has_its_positions():
    shown = Held(moved_in_later_sequences, "plain").screen("definition")
    read = [re.findall(r"\d+", line) for line in shown.positions if line.startswith("  ")]
    assert read == [[*"01234"], [*"12345"], [*"01234"], [*"23456"]] and not shown.matrices


def test_what_no_rotation_measures_has_neither_positions_nor_an_angle():
    shown = Held(adjacent_angles, "plain").screen("definition")
    assert not any(line.startswith("  ") for line in shown.positions)
    assert {len(re.findall(r"[+-]?\d\.\d+", line)) for line in shown.matrices[1:]} == {8}


def test_what_is_longer_at_the_right_positions_has_a_length():
    shown = Held(longer, "plain").screen("definition")
    expected, measured = ([*re.findall(r"\d+", line)] for line in shown.positions if line.startswith("  "))
    assert expected == measured and all("1.5000 (1.0000)" in line for line in shown.matrices[1:])


tables_of_a_shape = {}


def kept_for_a_shape(x, positions):
    """Tables that are kept for a number of tokens, whatever their positions are."""
    return correct.plain(x, tables_of_a_shape.setdefault(positions.shape, positions))


@pytest.mark.parametrize("function, wrong", [(kept_for_a_shape, False), (shifted, True)])
def test_the_smallest_call_is_made_alone(function, wrong):
    held = Held(function, "plain")
    _, first, _, _ = held.measured()
    with held.surroundings.ours():
        call, _ = smallest(held.subject, held.sizes, first)
        assert wrong_alone(held.subject(), call) is wrong


def overwritten(xq, xk, freqs_cis):
    z = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)).clone() for x in (xq, xk)]
    squares = [one * one.conj() for one in z]
    turned = [one.mul_(freqs_cis[:, None]) + 0 * square for one, square in zip(z, squares, strict=True)]
    return tuple(torch.view_as_real(one).flatten(-2).to(xq.dtype) for one in turned)


def test_a_backward_of_torch_that_raises_names_the_line_of_the_forward():
    told = verify(overwritten, "complex", laws=["definition", "adjoint"])["adjoint"].traceback
    assert __file__ in told and "squares = " in told


def tail_doubled(x, cos, sin, *arguments, **options):
    y, tail = correct.flash_attn(x, cos, sin, *arguments, **options), 2 * cos.shape[-1]
    return torch.cat((y[..., :tail], 2 * y[..., tail:]), -1)


def test_a_fault_of_features_that_do_not_rotate_has_no_positions_and_hangs_on_no_earlier_call():
    """Heads that rotate as a whole are right with the same inputs."""
    held = Held(tail_doubled, "flash_attn")
    shown = held.screen(*verify(tail_doubled, "flash_attn", shrink=False).failed)
    assert not shown.positions and not any("earlier calls" in line for line in shown.calls), str(shown)
    assert any("features that do not rotate" in line for line in shown.calls)


def test_an_element_that_reads_another_input_has_its_form():
    _, first, _, ask = of_fault("query_and_key_mixed").measured()
    place = tuple(np.argwhere(first.wrong)[0].tolist())
    assert {name for _, name, _ in form(first, ask, place)} & {"k"}
    assert {name for _, name, _ in form(first, ask, place, "right")} == {"q"}


def test_the_smallest_call_is_the_same_in_two_runs_and_cannot_be_smaller():
    held = of_fault("table_of_batch_zero")
    _, first, _, _ = held.measured()
    with held.surroundings.ours():
        one, other = (smallest(held.subject, held.sizes, first) for _ in range(2))
    assert one[0] == other[0]
    s = one[0].sizes
    assert (s.batch, s.tokens, s.q_heads, s.k_heads, s.head_dim) == (2, 1, 1, 1, 2)  # one sequence alone is right
    assert one[1].wrong.any() and not one[0].gradient


def test_without_hypothesis_the_call_of_the_law_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    found = of_fault("table_of_batch_zero").screen("definition")
    assert "[3, 5, 4, 16]" in found.smallest and found.reading


@pytest.mark.parametrize(
    "name, options",
    [("sign_reversed_undeclared", "--sign reversed"), ("second_half_of_tables_ignored", "--columns repeated"),
     ("layout_flag_ignored", "--layout split_half"), ("table_of_batch_zero", "")],
)  # fmt: skip
def test_another_declaration_is_named_where_the_function_keeps_the_laws_under_it(name, options):
    fault = FAULTS[name]
    assert of_fault(name).screen(*fault.must_fail).declared == options


def test_every_broken_family_is_named_and_an_exception_is_told_once():
    error = "IndexError: no row 273 of 256"
    results = [
        {"law": law, "status": "error", "message": error, "traceback": "", "words": ""}
        for law in ("definition", "isometry", "adjoint", "strides", "decode", "huge")
    ]
    note = f"it refuses second derivatives ({error})", "it refuses tensors without elements (ValueError: none)"
    noted = [{"law": law, "status": "note", "message": said} for law, said in zip("ab", note, strict=True)]
    told = summary([*results, *noted], None)
    assert told.count(error) == 1
    assert all(FAMILY[result["law"]] in told for result in results)
    repeated, other = to_note([*results, *noted])
    assert error not in repeated[1] and "IndexError" in repeated[1] and other == ("b", note[1])


@pytest.mark.parametrize("name", ["sign_reversed_undeclared", "query_and_key_mixed", "height_and_width_dropped"])
def test_a_screen_has_few_lines_and_json(name):
    found = of_fault(name).screen("definition", "axes")
    assert len(str(found).splitlines()) <= LINES
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


@pytest.mark.parametrize(
    "name, broken", [("table_of_batch_zero", "definition"), ("backward_applies_forward", "adjoint"),
                     ("exponent_by_head_dim", "definition"), ("slot_off_by_one_block", "definition")],
)  # fmt: skip
def test_the_script_repeats_the_smallest_call(name, broken, monkeypatch):
    held = of_fault(name)
    module = type(sys)("written_by_its_author")
    module.function = held.function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    script = held.screen(broken, target="written_by_its_author:function").repro
    if held.declaration.writes_cache:
        assert script == ""  # no counterexample in the result
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "repro.py", "exec"), {})
    said = next(line for line in script.splitlines() if line.startswith("# "))
    measured = float(said.split(" is ")[1].split(",")[0])
    numbers = [float(part) for part in "".join(c if c in "0123456789.-e+" else " " for c in printed.getvalue()).split()
               if any(c.isdigit() for c in part)]  # fmt: skip
    assert any(abs(number - measured) < 1e-3 for number in numbers)


# ---------------------------------------------------------------------------------------- operators that write a cache


def test_the_token_found_in_a_slot_is_told():
    held = of_fault("slot_off_by_one_block")
    found = held.screen("definition")
    law = held.declaration.laws[0]
    with held.surroundings.ours():
        case = next(watch_cache(law, held.subject(), held.sizes)).case
    size, blocks = case.places[0].shape[1], case.places[0].shape[0]
    moved = {(slot + size) % (size * blocks): token for token, slot in enumerate(case.every_slot.tolist()) if slot >= 0}
    told = [line.split() for line in found.positions if line.startswith("  slot")]
    tokens = {int(words[1]): int(words[5].rstrip(";")) for words in told if words[4] == "token"}
    assert tokens and tokens.items() <= moved.items()


def test_a_token_without_a_slot_that_is_written_is_told():
    assert any(
        "slot 0 " in line for line in of_fault("skipped_slots_written_to_slot_zero").screen("skipped_slots").positions
    )


def test_the_position_of_a_stored_row_is_told():
    *_, expected, measured = of_fault("key_turned_twice").screen("definition").positions
    known = [
        (int(p), int(q.rstrip("!"))) for p, q in zip(expected.split(), measured.split(), strict=True) if q[0].isdigit()
    ]
    assert len(known) > 3 and all(q == 2 * p for p, q in known)


@pytest.mark.parametrize("convention", FORMS)
def test_no_part_of_a_right_operator_is_seen_as_wrong(convention):
    dtypes = CACHE_CONVENTIONS[convention].dtypes
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    operator = BlockScaled() if convention in BLOCK_FORMS else Operator()
    held = Held(FORMS[convention](operator), convention, dtype=dtype)
    with held.surroundings.ours():
        seen = [one for law in held.declaration.laws if law.name != "token_counts"
                for one in watch_cache(law, held.subject(), held.sizes)]  # fmt: skip
    assert seen and not any(one.wrong.any() for one in seen)


def test_what_a_law_compares_with_the_definition_is_seen(monkeypatch):
    held = Held(correct.plain, "plain")
    law = held.declaration.laws[0]
    with held.surroundings.ours():
        seen = next(watch(law, held.subject(), held.sizes))
        told = next(iter(against_truth(held.subject(), seen.case)))
    assert np.array_equal(seen.actual, told.actual) and np.array_equal(seen.right, told.expected)


def test_no_declaration_is_named_that_was_not_held_to_every_broken_law():
    assert of_fault("positions_in_bfloat16").screen("large_positions").declared == ""
    assert of_fault("table_not_sized_for_scaling").screen("definition", "large_positions").declared == ""
