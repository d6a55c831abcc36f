"""A language model that says which of two replies is better: each against the reference, or against the others of its group.

Judges prefer a place, mostly the first. So every pair is asked in both orders, and half a point goes to each side where they disagree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifiers.base import Reply, Score, Scored
from strop.extensions.judges.judge import LlmVerifier, usage_metrics
from strop.extensions.judges.judge_prompt import JudgePrompt, UnreadableVerdict, find_verdict, write_conversation
from strop.extensions.judges.llm_client import LlmReply
from strop.types import Task

PLACES = ("conversation", "first", "second", "question", "verdict")
PROMPT = """The conversation so far:
{conversation}

Reply A:
{first}

Reply B:
{second}

{question}

Think it over briefly. {verdict}"""
VERDICT = "End with one line of this form, with A, B or TIE and nothing after it:\nVERDICT {mark}: A"
POINTS = {"A": 1.0, "TIE": 0.5, "B": 0.0}


@dataclass(frozen=True)
class _Comparison:
    points: float  # of the first reply, from 0 to 1: the mean over both orders
    consistent: bool = True
    unreadable: bool = False
    replies: tuple[LlmReply, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PairwiseJudgeVerifier(LlmVerifier):
    """The share of comparisons that a reply wins; a tie is half."""

    against: Literal["group", "reference"] = "group"
    opponents: int | None = None  # of the group: how many of the next replies each is compared with; None: with all
    question: str = "Which reply is better? Judge only what they say, not how long they are or which stands first."
    prompt: str = PROMPT  # a text or a file, with the places conversation, first, second, question and verdict

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None and (self.opponents < 1 or self.against == "reference"):
            raise EnvironmentConfigError(
                f"opponents is {self.opponents} against the {self.against}; set at least 1, of against=group"
            )
        assert self._prompt

    @cached_property
    def _prompt(self) -> JudgePrompt:
        return JudgePrompt(self.prompt, PLACES, ("first", "second", "verdict"))

    @property
    def compares(self) -> bool:
        return self.against == "group"

    @property
    def needs_answer(self) -> bool:
        return self.against == "reference"

    async def score(self, task: Task, reply: Reply) -> Score:
        """Compare with the reference."""
        return _summarize([(1.0, await self._compare(reply, self.read_text(reply), task.answer))])

    async def score_group(self, task: Task, replies: Sequence[Reply]) -> Sequence[Scored]:
        """Compare the replies among themselves. One that has no opponent gets 0.5."""
        texts, pairs = [self.read_text(reply) for reply in replies], self._choose_pairs(len(replies))
        found = await asyncio.gather(*(self._compare(replies[one], texts[one], texts[other]) for one, other in pairs))
        played: list[list[tuple[float, _Comparison]]] = [[] for _ in replies]
        for (one, other), comparison in zip(pairs, found, strict=True):
            played[one].append((1.0, comparison))
            played[other].append((-1.0, comparison))
        return [_summarize(each) for each in played]

    def _choose_pairs(self, count: int) -> list[tuple[int, int]]:
        if self.opponents is None or self.opponents >= count - 1:
            return list(combinations(range(count), 2))
        near = ((one, (one + step) % count) for one in range(count) for step in range(1, self.opponents + 1))
        return sorted({(min(pair), max(pair)) for pair in near})

    async def _compare(self, reply: Reply, one: str, other: str) -> _Comparison:
        if one == other:
            return _Comparison(0.5)
        there, back = await asyncio.gather(self._ask_order(reply, one, other), self._ask_order(reply, other, one))
        replies = (*there[1], *back[1])
        if there[0] is None or back[0] is None:
            assert self.unreadable is not None
            return _Comparison(self.unreadable, unreadable=True, replies=replies)
        first, second = there[0], 1 - back[0]
        return _Comparison((first + second) / 2, consistent=first == second, replies=replies)

    async def _ask_order(self, reply: Reply, first: str, second: str) -> tuple[float | None, list[LlmReply]]:
        """Return the points of the text that stands first. Raises UnreadableVerdict."""
        texts = {"conversation": write_conversation(reply.context), "first": first, "second": second}
        prompt, mark = self._prompt.render(texts, {"question": self.question, "verdict": VERDICT})

        def read(text: str) -> float:
            verdict = find_verdict(text, mark)
            if verdict not in POINTS:
                raise UnreadableVerdict(f"the judge's verdict is {verdict!r:.100}, which is none of {', '.join(POINTS)}")
            return POINTS[verdict]

        return await self.ask_until_read(prompt, read)


def _summarize(played: Sequence[tuple[float, _Comparison]]) -> Score:
    """Return the mean points of a reply, the first (1) or the second (-1) of each comparison."""
    comparisons = [comparison for _, comparison in played]
    points = [comparison.points if side > 0 or comparison.unreadable else 1 - comparison.points for side, comparison in played]
    metrics = {
        **usage_metrics([reply for side, comparison in played if side > 0 for reply in comparison.replies]),
        "inconsistent": sum(not each.consistent for each in comparisons) / max(len(comparisons), 1),
        "unreadable": sum(each.unreadable for each in comparisons) / max(len(comparisons), 1),
    }
    return Score(sum(points) / len(points) if points else 0.5, metrics)
