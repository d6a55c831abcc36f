"""Random conversations with branches, retries and edits become a tree that holds each sampled token once, in its context."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.fakes import FakeGenerator
from strop.data.packing import pack
from strop.extensions.agents.gateway.exchange import Exchange
from strop.extensions.agents.gateway.history import add_turns, count_common
from strop.models.routing.router_config import ROUTES
from strop.types import Rollout
from support.agents import EMPTY_ROLLOUT, END, TOKENIZER, Recorder, check_tree, ids, list_contexts, make_session
from support.packed import check_routes, routed_turn
from support.rollouts import make_group, make_rollout

WORDS = ("the", "in", "12", " ", "a", "34")


class Babbler(Recorder):
    """Says few different texts, tokenized at random, so that histories and tokens often coincide."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.fake = FakeGenerator(TOKENIZER, lambda request: self._babble())

    def _babble(self) -> tuple[list[int], bool]:
        words = self.random.choices(WORDS, k=self.random.randint(1, 2))
        tokens = [
            token
            for word in words
            for token in (ids(word) if self.random.random() < 0.5 else TOKENIZER(word, add_special_tokens=False)["input_ids"])
        ]
        return ([*tokens, END], True) if self.random.random() < 0.8 else (tokens, False)


def converse(draw: random.Random, requests: int) -> tuple[Rollout, Recorder]:
    """Make requests that continue, repeat, edit or cut earlier conversations at random places."""
    generator = Babbler(draw.randrange(1000))
    session = make_session(generator)

    async def run() -> None:
        known: list[list[dict[str, Any]]] = [[]]
        for _ in range(requests):
            messages = [dict(message) for message in draw.choice(known[-4:] if draw.random() < 0.7 else known)]
            if messages and draw.random() < 0.3:
                messages = messages[: draw.randrange(len(messages)) + 1]
            if messages and draw.random() < 0.3:
                draw.choice(messages)["content"] += draw.choice(("!", " ", "the"))
            if not messages or messages[-1]["role"] == "assistant" or draw.random() < 0.2:
                role = draw.choice(("user", "user", "tool", "system"))
                messages.append({"role": role, "content": draw.choice(WORDS)})
            session.count_request()
            asked, encoded = session.read({"messages": messages, "n": draw.choice((1, 1, 1, 2))}, is_chat=True)
            _, replies = await session.complete(asked, encoded)
            known += [[*messages, {"role": "assistant", "content": reply.content}] for reply in replies]

    asyncio.run(run())
    rollout = session.finish(replace(EMPTY_ROLLOUT, metrics={})).rollout
    assert rollout is not None
    return rollout, generator


def check_conversation(seed: int, requests: int) -> None:
    rollout, generator = converse(random.Random(seed), requests)
    check_tree(rollout, generator.sampled)
    assert rollout.metrics["gateway/branches"] == len(rollout.branches)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14))
def test_a_random_conversation_is_stored_as_it_was_sampled(seed: int, requests: int) -> None:
    check_conversation(seed, requests)


def test_the_main_path_is_that_of_the_last_request_and_shares_what_it_can() -> None:
    rollout, generator = converse(random.Random(3), 12)
    contexts = {context for context, _ in list_contexts(rollout)}
    assert tuple(generator.sampled[-1][0]) in contexts
    assert torch.equal(rollout.turns[-1].tokens, generator.sampled[-1][1].tokens)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_the_common_beginning_is_counted(left: list[int], right: list[int]) -> None:
    count = count_common(left, right)
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]


def test_requests_of_an_agent_keep_only_the_experts_that_earlier_ones_lack() -> None:
    def exchange(number: int, context: tuple[int, ...], tokens: tuple[int, ...]) -> Exchange:
        turn = routed_turn(context, tokens)
        return Exchange(number=number, added=context, turn=turn)

    first = exchange(0, (5, 6, 7), (8, 9))
    branch, main = exchange(1, (5, 6, 20), (21, 22)), exchange(2, (5, 6, 7, 8, 9, 10), (11, 12))
    rollout = add_turns(make_rollout([]), [first, branch, main])
    assert [len(turn.columns[ROUTES]) for turn in rollout.policy_turns] == [4, 3, 3]
    batch = pack([make_group(rollout)])
    check_routes(batch)
    assert bool((batch.read_columns["routes"] >= 0).all())
