# SPDX-License-Identifier: Apache-2.0
"""Stop strings against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.core.errors import RequestError
from metrale_jax.text.stops import StopMatcher, StopPatterns

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Beginning and text of the stop string that is complete first, the longest of those that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0] - len(min(found)[2]), min(found)[2]) if found else None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """All text that a matcher releases for `pieces`, and the stop string that it met."""
    matcher = StopMatcher(StopPatterns.of(stops), include_stop_str_in_output=include)
    released = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        released += text
        if stop is not None:
            assert matcher.finish() == ""
            return released, stop
    return released + matcher.finish(), None


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS, include=st.booleans())
def test_the_outcome_is_that_of_a_search_of_the_whole_text(pieces, stops, include):
    whole = "".join(pieces)
    match = first_match(whole, stops)
    expected = whole if match is None else whole[: match[0] + include * len(match[1])]
    assert run(pieces, stops, include) == (expected, match and match[1])


@settings(max_examples=400, deadline=None)
@given(free=st.lists(LETTERS, max_size=4), rest=st.lists(LETTERS, max_size=4), stops=STOPS, include=st.booleans())
def test_only_a_stop_that_is_complete_in_what_may_stop_is_met_wherever_it_began(free, rest, stops, include):
    matcher, released, met = StopMatcher(StopPatterns.of(stops), include_stop_str_in_output=include), "", None
    for index, piece in enumerate(free + rest):
        text, met = matcher.push(piece, may_stop=index >= len(free))
        released += text
        if met is not None:
            break
    whole, least = "".join(free + rest), len("".join(free))
    ends = range(least + 1, len(whole) + 1)
    found = [(end, -len(stop), stop) for end in ends for stop in stops if whole[:end].endswith(stop)]
    if not found:
        assert met is None and released + matcher.finish() == whole
        return
    end, _, stop = min(found)
    assert (released, met) == (whole[: end if include else end - len(stop)], stop)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_and_no_more(pieces, stops):
    matcher = StopMatcher(StopPatterns.of(stops))
    whole, released = "", ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        if stop is not None:
            return
        whole += piece
        released += text
        ends = (whole[begin:] for begin in range(len(whole) + 1))
        held = max((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), default=0)
        assert len(whole) - len(released) == held


def test_a_stop_that_spans_pieces_is_found_and_what_follows_is_dropped():
    matcher = StopMatcher(StopPatterns.of(["</end>"]))
    assert matcher.push("text </e") == ("text ", None)
    assert matcher.push("nd> more") == ("", "</end>")


def test_a_false_start_is_released():
    matcher = StopMatcher(StopPatterns.of(["###"]))
    assert matcher.push("a##") == ("a", None)
    assert matcher.push("b") == ("##b", None)


def test_the_stop_complete_first_wins_and_of_those_ending_together_the_longest():
    assert run(["xabcd"], ["abcd", "bc"], False) == ("xa", "bc")
    assert run(["xabc"], ["bc", "abc", "c"], False) == ("x", "abc")


def test_no_stop_strings_hold_nothing_back():
    assert StopMatcher(StopPatterns.of([])).push("anything") == ("anything", None)


def test_one_string_is_taken_as_one_stop():
    assert run(["a stop"], "stop", False) == ("a ", "stop")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty string"):
        StopPatterns.of(["a", ""])


def test_pushing_after_a_match_is_our_own_mistake():
    matcher = StopMatcher(StopPatterns.of(["a"]))
    matcher.push("a")
    with pytest.raises(AssertionError, match="after a stop string"):
        matcher.push("b")
