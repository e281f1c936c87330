# SPDX-License-Identifier: Apache-2.0
"""Where prompts go: affinity within a bound, and a table that follows its replicas."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_jax.core.errors import ConfigError
from serving.prefix_routing import LINK_BYTES, MAX_LINKS, PrefixTable, RoutingSettings, links_of

SECRET = b"a secret of the test"


def links(*pieces, salt=""):
    return links_of([piece.encode() for piece in pieces], salt, SECRET)


def table(*names, **settings):
    made = PrefixTable(RoutingSettings(**settings))
    made.set_replicas(names)
    return made


def sent(made, prompt, **loads):
    """The prompt goes where it belongs, and runs."""
    name = made.ranked(prompt, loads=loads)[0]
    made.began(name, prompt)
    return name


def test_a_prompt_has_a_link_for_each_piece_and_for_each_stretch_of_a_long_one():
    assert [link.size for link in links("a" * LINK_BYTES + "b", "c")] == [LINK_BYTES, 1, 1]
    assert links() == links("") == ()
    assert len(links("x" * LINK_BYTES * (MAX_LINKS + 5))) == MAX_LINKS


def test_equal_beginnings_have_equal_links_under_one_salt_and_none_under_two():
    one, more = links("system", "hello"), links("system", "hello", "again")
    assert more[:2] == one and links("system", "other")[1] != one[1]
    assert links("systemhello")[0] not in one, "where pieces end is part of them"
    other = links("system", "hello", salt="team-b")
    assert not {link.digest for link in one} & {link.digest for link in other}
    elsewhere = links_of([b"system"], "", b"another secret 1")
    assert elsewhere[0].digest != one[0].digest


def test_the_table_keeps_nothing_of_a_prompt_but_digests():
    made = table("a")
    made.began("a", links("my password is hunter2", salt="my salt"))
    kept = pickle.dumps(made)
    assert b"hunter2" not in kept and b"my salt" not in kept and SECRET not in kept


def test_a_prompt_goes_where_its_beginning_is_and_a_new_one_to_the_least_loaded():
    made = table("a", "b")
    assert sent(made, links("system one", "hello")) == "a"
    assert sent(made, links("system two", "hello")) == "b"
    assert [sent(made, links("system one", f"question {n}")) for n in range(4)] == ["a"] * 4
    assert sent(made, links("system three", "hello")) == "b", "it has one call, the other five"


def test_the_turns_of_a_chat_stay_together_among_others():
    made = table("a", "b", "c")
    chats = {name: [f"system of {name}", f"first words of {name}"] for name in ("x", "y", "z")}
    first = {name: sent(made, links(*turns)) for name, turns in chats.items()}
    assert sorted(first.values()) == ["a", "b", "c"]
    for turn in range(5):
        for name, turns in chats.items():
            turns += [f"answer {turn}", f"question {turn}"]
            assert sent(made, links(*turns)) == first[name]


def test_a_replica_that_is_too_loaded_is_passed_over_and_then_the_other_has_the_prefix_too():
    made = table("a", "b", max_imbalance=3)
    prompt = links("a shared beginning")
    places = [sent(made, prompt) for _ in range(8)]
    assert places == ["a"] * 4 + ["b"] * 4, "the fifth would have been four calls ahead"
    for _ in range(4):
        made.ended("a")
    assert sent(made, prompt) == "a" and made.load("b") == 4


def test_a_bound_of_nothing_is_the_least_loaded_of_them():
    made = table("a", "b", max_imbalance=0)
    assert [sent(made, links("same")) for _ in range(4)] == ["a", "b", "a", "b"]


def test_loads_that_others_report_count_where_they_are_larger():
    made = table("a", "b")
    made.began("a", links("p"))
    made.ended("a")
    assert made.ranked(links("p"))[0] == "a"
    assert made.ranked(links("p"), loads={"a": 20, "b": 1}) == ("b", "a")
    for _ in range(2):
        made.began("b", ())
    assert made.ranked((), loads={"a": 1, "b": 0}) == ("a", "b"), "own calls are not forgotten for a smaller figure"


def test_too_small_a_share_of_a_prompt_holds_nobody():
    made = table("a", "b", min_share=0.5)
    made.began("a", links("s" * 10, "t" * 90))
    assert made.ranked(links("s" * 10, "u" * 90))[0] == "b"
    assert made.ranked(links("s" * 10, "u" * 10))[0] == "a"


def test_a_replica_that_goes_takes_what_it_held_and_its_calls_with_it():
    made = table("a", "b")
    prompt = links("prefix")
    assert sent(made, prompt) == "a"
    made.drop("a")
    made.drop("a")
    assert made.ranked(prompt) == ("b",)
    made.ended("a")
    made.began("a", prompt)
    assert made.load("a") == 0 and made.replicas == ("b",)
    made.set_replicas(["b", "a"])
    assert made.ranked(prompt)[0] == "b" and made.load("a") == 0, "one that comes back holds nothing"


def test_new_replicas_get_new_prompts_and_old_ones_keep_theirs():
    made = table("a")
    for number in range(3):
        assert sent(made, links(f"chat {number}")) == "a"
    made.set_replicas(["a", "b"])
    assert sent(made, links("chat 1", "more")) == "a"
    assert [sent(made, links(f"new {number}")) for number in range(4)] == ["b"] * 4


def test_nobody_is_asked_who_is_not_there():
    made = table("a", "b")
    assert made.ranked(links("p"), among=["b", "stranger"]) == ("b",)
    assert PrefixTable().ranked(links("p")) == ()


def test_what_was_used_longest_ago_is_forgotten_and_of_a_prompt_its_end_first():
    made = table("a", "b", held_bytes=4 * LINK_BYTES, min_share=0.0)
    old, new = links("o" * 3 * LINK_BYTES), links("n" * 2 * LINK_BYTES)
    made.began("a", old)
    made.began("a", new)
    made.ended("a")
    made.ended("a")
    assert made.ranked(new)[0] == "a" and made.ranked(old)[0] == "a"
    assert made._held["a"].match(old) == 2 * LINK_BYTES and made._held["a"].num_bytes == 4 * LINK_BYTES


@given(st.lists(st.tuples(st.sampled_from("send end drop set".split()), st.integers(0, 5)), max_size=60))
def test_through_any_history_calls_are_bounded_counted_and_nobody_is_forgotten(history):
    made, bound, running = table("a", "b", "c", max_imbalance=2, held_bytes=8 * LINK_BYTES), 2, []
    for act, number in history:
        if act == "send" and made.replicas:
            least = min(made.load(name) for name in made.replicas)
            name = sent(made, links("shared", f"chat {number}" * 40))
            assert made.load(name) - 1 <= least + bound
            running.append(name)
        elif act == "end" and running:
            made.ended(running.pop(number % len(running)))
        elif act == "drop":
            made.drop("abc"[number % 3])
            running = [name for name in running if name != "abc"[number % 3]]
        elif act == "set":
            there = "abc"[: 1 + number % 3]
            made.set_replicas(there)
            running = [name for name in running if name in there]
        assert {name: made.load(name) for name in made.replicas} == {n: running.count(n) for n in made.replicas}
        assert all(held.num_bytes == sum(held._sizes.values()) <= 8 * LINK_BYTES for held in made._held.values())
        assert sorted(made.ranked(links("shared"))) == sorted(made.replicas)


@pytest.mark.parametrize("wrong", [{"max_imbalance": -1}, {"max_imbalance": True}, {"min_share": 2}, {"held_bytes": 1}])
def test_settings_out_of_range_are_told_with_a_way_out(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoutingSettings(**wrong)
