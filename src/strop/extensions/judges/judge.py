"""A language model as the judge of replies, by a rubric of criteria (Zheng et al. 2023, "Judging LLM-as-a-judge")."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from strop.environments.base import EnvironmentConfigError
from strop.environments.rewards import is_finite
from strop.environments.verifiers.base import Reply, Score, Verifier
from strop.extensions.judges.judge_prompt import (
    SYSTEM_PROMPT,
    JudgePrompt,
    UnreadableVerdict,
    read_scores,
    write_conversation,
)
from strop.extensions.judges.llm_client import LlmClient, LlmReply, get_llm_client
from strop.extensions.judges.llm_endpoint import make_endpoint
from strop.types import Task, system, user
from strop.user_code import suggest_names

VerdictT = TypeVar("VerdictT")

PLACES = ("conversation", "reply", "reference", "criteria", "verdict")
PROMPT = """The conversation so far:
{conversation}

The reply to judge:
{reply}

A reference answer (empty if there is none):
{reference}

Judge the reply by these criteria:
{criteria}

Think it over briefly. {verdict}"""
VERDICT = 'End with one line of this form, with a number for each criterion and nothing after it:\nVERDICT {mark}: {"NAME": NUMBER, ...}'
CRITERION_OPTIONS = ("question", "weight", "scale")


@dataclass(frozen=True, kw_only=True)
class Criterion:
    question: str
    weight: float = 1.0
    scale: tuple[float, float] = (0.0, 1.0)  # from worst to best; (0, 1) is no or yes

    def describe(self, name: str) -> str:
        low, high = self.scale
        how = "1 for yes, 0 for no" if self.scale == (0.0, 1.0) else f"a number from {low:g} (worst) to {high:g} (best)"
        return f"- {name}: {self.question} ({how})"

    def read(self, name: str, score: float) -> float:
        """Return the score between 0 and 1. Raises UnreadableVerdict for one that is not on the scale."""
        low, high = self.scale
        if not low <= score <= high or (self.scale == (0.0, 1.0) and score not in (0.0, 1.0)):
            raise UnreadableVerdict(f"the judge gave {name} {score:g}, and the scale is {low:g} to {high:g}")
        return (score - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class LlmVerifier(Verifier):
    """What judges have in common: whom they ask, how often, and what an unreadable verdict is."""

    endpoint: dict[str, Any]  # base_url, model, api_key_env, limits, cache and prices, as in LlmEndpoint
    system_prompt: str = SYSTEM_PROMPT
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int | None = None
    attempts: int = 3  # times that a question is asked until its verdict can be read
    unreadable: float | None = (
        None  # the value where it never can, counted as ``unreadable``; None: an error, which drops the group
    )
    thoughts: bool = False  # show the judge what stands before </think>, too

    def __post_init__(self) -> None:
        make_endpoint(self.endpoint)
        if self.attempts < 1 or self.max_tokens < 1:
            raise EnvironmentConfigError(
                f"attempts is {self.attempts} and max_tokens is {self.max_tokens}; both must be at least 1"
            )
        if self.unreadable is not None and not math.isfinite(self.unreadable):
            raise EnvironmentConfigError(f"unreadable is {self.unreadable}; set it to a finite number, or leave it out")

    def prepare(self) -> None:
        """Find the key now: without it no reply can be judged."""
        self.client  # noqa: B018

    @cached_property
    def client(self) -> LlmClient:
        return get_llm_client(make_endpoint(self.endpoint))

    def read_text(self, reply: Reply) -> str:
        return reply.text if self.thoughts else reply.content.strip()

    async def ask(self, prompt: str, sample: int) -> LlmReply:
        messages = (system(self.system_prompt), user(prompt)) if self.system_prompt else (user(prompt),)
        sampling: dict[str, Any] = {} if self.seed is None else {"seed": self.seed + sample}
        return await self.client.complete(
            messages, temperature=self.temperature, max_tokens=self.max_tokens, sample=sample, **sampling
        )

    async def ask_until_read(
        self, prompt: str, read: Callable[[str], VerdictT], *, sample: int = 0, stride: int = 1
    ) -> tuple[VerdictT | None, list[LlmReply]]:
        """Ask until ``read`` understands the reply, with samples ``stride`` apart. Raises UnreadableVerdict if it never does and
        ``unreadable`` is not set."""
        replies: list[LlmReply] = []
        for attempt in range(self.attempts):
            replies.append(await self.ask(prompt, sample + attempt * stride))
            try:
                return read(replies[-1].text), replies
            except UnreadableVerdict as error:
                if attempt + 1 == self.attempts and self.unreadable is None:
                    raise UnreadableVerdict(
                        f"{error} (attempts {self.attempts}; set unreadable to a value to go on without)"
                    ) from error
        return None, replies


@dataclass(frozen=True, kw_only=True)
class JudgeVerifier(LlmVerifier):
    """The weighted mean of the criteria, each between 0 and 1, as a judge scores them. With ``per_turn`` each turn is judged."""

    criteria: dict[str, Any] = field(
        default_factory=lambda: {"correct": "Does the reply answer the question correctly?"}
    )  # name -> question, or {question, weight, scale: [worst, best]}
    prompt: str = PROMPT  # a text or a file, with the places conversation, reply, reference, criteria and verdict
    samples: int = 1  # verdicts that are averaged; their spread is logged as ``disagreement``

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise EnvironmentConfigError(f"samples is {self.samples}; it must be at least 1")
        if self.samples > 1 and self.temperature == 0:
            raise EnvironmentConfigError(
                f"samples is {self.samples} at temperature 0, which gives equal verdicts; set temperature above 0"
            )
        assert self._criteria and self._prompt

    @cached_property
    def _criteria(self) -> Mapping[str, Criterion]:
        if not self.criteria:
            raise EnvironmentConfigError("the judge has no criteria; set criteria to names and questions")
        return {name: read_criterion(name, given) for name, given in self.criteria.items()}

    @cached_property
    def _prompt(self) -> JudgePrompt:
        return JudgePrompt(self.prompt, PLACES, ("reply", "verdict"))

    async def score(self, task: Task, reply: Reply) -> Score:
        prompt, mark = self._prompt.render(
            {
                "conversation": write_conversation(reply.context),
                "reply": self.read_text(reply),
                "reference": task.answer,
            },
            {"criteria": "\n".join(each.describe(name) for name, each in self._criteria.items()), "verdict": VERDICT},
        )
        verdicts = await asyncio.gather(*(self._judge(prompt, mark, sample) for sample in range(self.samples)))
        return self._summarize(verdicts)

    async def _judge(self, prompt: str, mark: str, sample: int) -> tuple[dict[str, float] | None, list[LlmReply]]:
        """Return the score of each criterion, None if no verdict can be read, and what the judge replied. Raises UnreadableVerdict."""

        def read(text: str) -> dict[str, float]:
            scores = read_scores(text, mark, list(self._criteria))
            return {name: self._criteria[name].read(name, score) for name, score in scores.items()}

        return await self.ask_until_read(prompt, read, sample=sample, stride=self.samples)

    def _summarize(self, verdicts: Sequence[tuple[dict[str, float] | None, list[LlmReply]]]) -> Score:
        metrics = usage_metrics([reply for _, replies in verdicts for reply in replies])
        read = [scores for scores, _ in verdicts if scores is not None]
        metrics["unreadable"] = 1 - len(read) / len(verdicts)
        if not read:
            assert self.unreadable is not None
            return Score(self.unreadable, metrics)
        weights = {name: each.weight for name, each in self._criteria.items()}
        values = [sum(weights[name] * scores[name] for name in weights) / sum(weights.values()) for scores in read]
        if len(weights) > 1:
            metrics |= {f"criteria/{name}": sum(scores[name] for scores in read) / len(read) for name in weights}
        if self.samples > 1:
            metrics["disagreement"] = max(values) - min(values)
        return Score(sum(values) / len(values), metrics)


def usage_metrics(replies: Sequence[LlmReply]) -> dict[str, float]:
    """Return what asking took, to be logged."""
    return {
        "asked": float(len(replies)),
        "cached": float(sum(reply.cached for reply in replies)),
        "retries": float(sum(reply.retries for reply in replies)),
        "tokens": float(sum(reply.input_tokens + reply.output_tokens for reply in replies if not reply.cached)),
        "cost": math.fsum(reply.cost for reply in replies),
        "seconds": max((reply.seconds for reply in replies), default=0.0),
    }


def read_criterion(name: str, given: Any) -> Criterion:
    options = given if isinstance(given, Mapping) else {"question": given}
    for option in options:
        if option not in CRITERION_OPTIONS:
            raise EnvironmentConfigError(
                f"the criterion {name} has no option {option!r}{suggest_names(str(option), CRITERION_OPTIONS)}"
            )
    question, weight, scale = options.get("question"), options.get("weight", 1.0), options.get("scale", (0, 1))
    if not isinstance(question, str) or not question.strip():
        raise EnvironmentConfigError(f"the criterion {name} asks {question!r}; set question to what the judge should find out")
    if isinstance(weight, bool) or not is_finite(weight) or weight <= 0:
        raise EnvironmentConfigError(f"the weight of the criterion {name} is {weight!r}; set it to a positive number")
    if (
        not isinstance(scale, list | tuple)
        or len(scale) != 2
        or not all(is_finite(each) for each in scale)
        or scale[0] >= scale[1]
    ):
        raise EnvironmentConfigError(f"the scale of the criterion {name} is {scale!r}; set it to [worst, best], such as [1, 10]")
    return Criterion(question=question, weight=float(weight), scale=(float(scale[0]), float(scale[1])))
