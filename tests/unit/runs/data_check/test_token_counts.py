"""Rows have the numbers of tokens of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.data.recorded.examples import Conversation, Preference
from strop.models.chat_template import ChatTemplate
from strop.models.loading import load_tokenizer
from strop.rollouts.recorded_tokens import RecordedRules
from strop.runs.data_check.checked_row import CheckedRow
from strop.runs.data_check.token_counts import NO_LIMIT, TokenCounts, count_tokens
from strop.types import Message, Rollout, assistant, user
from support.recorded import demonstration_group, preference_group

TEXTS = (
    "Hello there.",
    "\n\n  def f():\n\treturn 1\n",
    " a \u00e9\U0001f600\u4e2d ",
    "7 + 8 = 15",
    "  ",
    "It's so,\r\nisn't it?",
)


@pytest.fixture(scope="module")
def template(tiny_model_folder: Path) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(str(tiny_model_folder)))


def longest_counts(rollouts: tuple[Rollout, ...]) -> TokenCounts:
    longest = max(rollouts, key=lambda each: each.length)
    return TokenCounts(len(longest.prompt), longest.sampled_tokens, longest.length)


@pytest.mark.parametrize("opened", [True, False])
def test_counts_are_those_of_the_groups_of_the_run(template: ChatTemplate, opened: bool) -> None:
    rules = RecordedRules(max_length=NO_LIMIT, add_generation_prompt=opened)
    rows, wanted = [], []
    for first in TEXTS:
        for second in TEXTS:
            messages: tuple[Message, ...] = (user(first), assistant(second), user(second), assistant(first), user("Thanks"))
            talk = Conversation(id="", messages=messages)
            pair = Preference(
                id="", prompt=(user(first),), chosen=(assistant(second),), rejected=(assistant(f"{first}{second}"),)
            )
            rows += [CheckedRow(0, "", "", "", example=talk), CheckedRow(0, "", "", "", example=pair)]
            wanted += [demonstration_group(0, "", talk, template, rules), preference_group(0, "", pair, template, rules)]
    assert [count_tokens(row, template, rules) for row in rows] == [longest_counts(group.rollouts) for group in wanted]
