"""The store of prefixes never holds more tokens than its capacity and never gives a wrong prefix."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.generation.torch.kv_cache import Prefix, PrefixStore


def prefix(tokens: tuple[int, ...], logits: bool = False) -> Prefix:
    size = (1, 1, len(tokens), 1)
    return Prefix(tokens, torch.zeros(size), torch.zeros(size), torch.zeros(3) if logits else None)


_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), _tokens),
        st.tuples(st.just("session"), st.tuples(st.sampled_from("ab"), _tokens)),
        st.tuples(st.just("find"), st.tuples(st.sampled_from(["a", "b", ""]), _tokens)),
        st.tuples(st.just("clear"), st.just(None)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(capacity=st.integers(0, 15), steps=_steps)
def test_the_store_keeps_within_its_capacity_and_finds_only_prefixes(capacity: int, steps: list[tuple[str, Any]]) -> None:
    store = PrefixStore(capacity)
    for kind, argument in steps:
        match kind:
            case "prompt":
                store.put(argument, prefix(argument, logits=True))
                found = store.find(argument, "")
                assert (found is not None and found.tokens == argument) == (len(argument) <= capacity), (
                    "what was put last is there"
                )
            case "session":
                session, tokens = argument
                store.put(session, prefix(tokens))
            case "find":
                session, tokens = argument
                found = store.find(tokens, session)
                assert found is None or tokens[: found.length] == found.tokens
            case _:
                store.clear()
                assert store.num_tokens == 0
        entries = store._entries.values()
        assert store.num_tokens == sum(entry.length for entry in entries) <= capacity


def test_the_prefix_used_longest_ago_goes_first() -> None:
    store = PrefixStore(6)
    for tokens in ((1, 1), (2, 2), (3, 3)):
        store.put(tokens, prefix(tokens, logits=True))
    assert store.find((1, 1), "") is not None
    store.put((4, 4), prefix((4, 4)))
    assert store.find((2, 2), "") is None
    assert store.find((1, 1), "") is not None


def test_a_whole_prompt_is_preferred_to_a_part_of_it() -> None:
    store = PrefixStore(20)
    store.put("s", prefix((1, 2)))
    store.put((1, 2, 3), prefix((1, 2, 3), logits=True))
    whole, part, nothing = store.find((1, 2, 3), "s"), store.find((1, 2, 4), "s"), store.find((2, 2, 4), "s")
    assert whole is not None and whole.length == 3
    assert part is not None and part.length == 2
    assert nothing is None
