"""``reward_penalties``: how a rollout is written sets its reward to 0."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.algorithm_factory import make_algorithm
from strop.algorithms.policy_gradient.turns import make_turn_advantages
from strop.base_config import validate_section
from strop.data.packing import pack
from strop.learner.client import ColumnSources
from strop.rollouts.reward_shaping_config import RewardPenaltiesConfig
from strop.types import Group, Message, Rollout, Task, Turn, assistant, observation_turn, user
from support.rollouts import make_rollout, sampled_turn

OPEN, CLOSE, UNWANTED = 101, 102, 103


class Tags:
    """A tokenizer for which each tag is one token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [{"<think>": OPEN, "</think>": CLOSE}[text]]}


class Letters:
    """A tokenizer for which a tag is several tokens."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def section(**values: Any) -> RewardPenaltiesConfig:
    return validate_section(RewardPenaltiesConfig, values)


def said(text: str, tokens: list[int] | None = None) -> Turn:
    return replace(sampled_turn(tokens or [7, 8]), text=text)


def written(*turns: Turn, prompt: list[int] | None = None) -> Rollout:
    return replace(make_rollout(prompt or [5, 6], *turns), reward=1.0, rewards={"correct": 1.0})


def penalized(penalty: str, rollout: Rollout, tokenizer: Any = None, **values: Any) -> bool:
    found = section(**{f"penalize_{penalty}": True}, **values).find_violations(rollout, tokenizer or Letters())
    return found[penalty]


def test_an_answer_that_repeats_the_thinking_is_penalised_and_one_that_says_more_is_not() -> None:
    assert penalized("duplicated_reasoning", written(said("<think>It is 4.</think> It is 4. ")))
    assert penalized("duplicated_reasoning", written(said("It is 4.</think>It is 4.")))
    assert not penalized("duplicated_reasoning", written(said("It is 4.</think>4")))
    assert not penalized("duplicated_reasoning", written(said("</think>"))), "nothing is not repeated"


@pytest.mark.parametrize(
    ("text", "empty"),
    [("thinking</think> \n", True), ("<think>never closed", True), ("  ", True), ("thinking</think>4", False), ("4", False)],
)
def test_a_rollout_must_end_with_an_answer(text: str, empty: bool) -> None:
    assert penalized("empty_final_answer", written(said("first</think>turn"), said(text))) is empty


def test_unwanted_tokens_are_looked_for_in_every_turn_of_the_policy_alone() -> None:
    unwanted = {"token_ids": {"unwanted": [UNWANTED]}}
    assert penalized("unwanted_tokens", written(said("a", [7, UNWANTED]), said("b")), **unwanted)
    assert not penalized("unwanted_tokens", written(said("a"), observation_turn([UNWANTED], "x"), said("b")), **unwanted)


def test_thinking_is_closed_exactly_once_where_the_prompt_opened_it() -> None:
    opened, closed, open_again = [5, OPEN], [7, CLOSE, 8], [7, OPEN, CLOSE]
    for prompt, tokens, malformed in [
        (opened, closed, False),
        (opened, [7, 8], True),
        ([5, OPEN, CLOSE], [7, 8], False),
        ([5], closed, True),
        (opened, open_again, True),
        ([5, OPEN, OPEN], closed, True),
    ]:
        assert penalized("malformed_think_tag", written(said("4", tokens), prompt=prompt), Tags()) is malformed


def test_each_turn_is_measured_against_what_came_since_the_last() -> None:
    first, second = said("a", [CLOSE]), said("b", [7])
    both = written(first, observation_turn([OPEN, CLOSE], "result"), second, prompt=[OPEN])
    assert not penalized("malformed_think_tag", both, Tags())
    assert penalized("malformed_think_tag", written(first, observation_turn([OPEN], "result"), second, prompt=[OPEN]), Tags())


def test_tags_of_several_tokens_are_found_in_the_text() -> None:
    assert penalized("malformed_think_tag", written(said("<think>again</think>")))
    assert penalized("malformed_think_tag", written(said("a</think>b</think>c")))
    assert not penalized("malformed_think_tag", written(said("a</think>b")))
    ids = {"token_ids": {"think_open": OPEN, "think_close": CLOSE}}
    assert penalized("malformed_think_tag", written(said("a", [CLOSE])), **ids)


def test_a_call_that_cannot_be_read_is_penalised_and_so_is_one_in_an_answer() -> None:
    for text, malformed, penalised in (("4", 0.0, False), ("4", 1.0, True), ("<tool_call>4", 0.0, True)):
        turn = replace(said(text), num_messages=1)
        rollout = replace(
            written(turn), messages=(user("<tool_call>?"), assistant(text)), metrics={"malformed_tool_calls": malformed}
        )
        assert penalized("invalid_tool_call", rollout) == penalised


def test_a_penalised_rollout_has_reward_zero_and_every_penalty_is_counted() -> None:
    penalties = section(penalize_empty_final_answer=True, penalize_duplicated_reasoning=True)
    empty = penalties.apply(written(said(" ")), Letters(), 0.0)
    assert (empty.reward, empty.rewards) == (0.0, {"correct": 0.0})
    assert empty.metrics == {"penalty/empty_final_answer": 1.0, "penalty/duplicated_reasoning": 0.0}
    good = penalties.apply(written(said("4")), Letters(), 0.0)
    assert good.reward == 1.0 and good.metrics["penalty/empty_final_answer"] == 0.0


def test_ids_that_are_needed_are_asked_for() -> None:
    (problem,) = section(penalize_unwanted_tokens=True).errors("reward_penalties")
    assert problem.key == "reward_penalties.token_ids.unwanted" and "penalize_unwanted_tokens is true" in str(problem)
    (problem,) = section(token_ids={"think_open": 1}).errors("reward_penalties")
    assert "Set both" in str(problem)


def test_turns_are_given_advantages_for_invalid_calls_and_malformed_tags_and_the_reward_stays() -> None:
    rollout = Rollout(task=Task(id="t"), sample=0, seed=0, messages=(user("?"),), prompt=torch.tensor([5, 6]), reward=1.0)
    unread = Message("tool", "Error: no JSON", name="tool")
    rollout = (
        rollout.with_turn(said("a call", [1, 2]), assistant("a call"))
        .with_turn(observation_turn([3], "Error"), unread)
        .with_turn(said("<think>again", [4, 5, 6]), assistant("<think>again"))
        .with_turn(observation_turn([3], "42"), Message("tool", "42", name="tool", tool_call_id="c00010000"))
        .with_turn(said("fine", [7]), assistant("fine"))
        .with_turn(said("<think> <tool_call>", [8]), assistant("<think> <tool_call>"))
    )
    rules = section(invalid_tool_call_advantage=-5.0, malformed_think_tag_advantage=-2.0)
    assert rules.enabled and not section().enabled
    given = rules.apply(rollout, Letters(), 0.0)
    assert given.turn_advantages == (-5.0, -2.0, 0.0, -5.0) and given.reward == 1.0
    assert given.metrics == {"penalty/invalid_tool_call_turns": 0.5, "penalty/malformed_think_tag_turns": 0.5}
    clean = rules.apply(written(said("fine")), Letters(), 0.0)
    assert clean.turn_advantages == () and clean.metrics["penalty/invalid_tool_call_turns"] == 0.0
    only_tags = section(malformed_think_tag_advantage=-2.0).apply(rollout, Letters(), 0.0)
    assert only_tags.turn_advantages == (0.0, -2.0, 0.0, -2.0)


def test_the_tokens_of_such_a_turn_have_its_advantage_after_all_else_and_the_others_keep_theirs() -> None:
    def make(reward: float, *given: float) -> Rollout:
        turns = (said("a", [1, 2]), observation_turn([3], "x"), said("b", [4, 5, 6]))
        return replace(make_rollout([9], *turns), reward=reward, turn_advantages=given)

    groups = [Group(index=0, environment="e", version=0, rollouts=(make(1.0, -5.0, 0.0), make(0.0)))]
    algorithm = make_algorithm("grpo", {"advantage_low": -1.0, "advantage_high": 1.0})
    batch = pack(groups, algorithm.group_credit(groups))
    plain = algorithm.token_credit(batch).advantages
    credited = algorithm.token_credit(asyncio.run(ColumnSources(frozenset(), {}).fill(batch, groups)))
    assert credited.advantages[:2].tolist() == [-5.0, -5.0]  # beyond the bounds
    assert torch.equal(credited.advantages[2:], plain[2:]) and plain[2] > 0 > plain[-1]
    neither = [replace(groups[0], rollouts=tuple(replace(each, turn_advantages=()) for each in groups[0].rollouts))]
    assert make_turn_advantages(batch, neither) == {}
