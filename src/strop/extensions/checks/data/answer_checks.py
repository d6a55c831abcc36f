"""Can the grader read the reference answers? An answer that does not equal itself is never right, whatever the policy writes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from strop.environments.answers import is_integer
from strop.environments.base import Environment
from strop.environments.math import MathEnvironment
from strop.environments.math_multi_reward import MathMultiReward
from strop.environments.scoring.scoring_pool import ScoringError, get_scoring_pool
from strop.environments.verifiers.math_verifier import verify_math
from strop.environments.verifiers.multiple_choice import CHOICE_EXTRACTORS
from strop.extensions.checks.data.row_checks import Faults

MOST_ANSWERS = 2000  # different ones that are graded; the others are taken to be like them
CONCURRENT = 64
FORMS = ("\\boxed{{{}}}", "Answer: {}", "The answer is {}")  # in which a policy may give an answer
WRONG = "\\boxed{{-98765.4321}}"
BY_VALUE = ("math_verify", "multilingual", "boxed", "olympiad", "minerva")  # verifiers
OPTION = re.compile(r"^\s*\(?([A-Z])[).:]\s+\S", re.MULTILINE)
KNOWN_OPTIONS = 2  # lines that look like options from which on a question is taken to have some


def is_graded(environment: Environment[Any] | None) -> bool:
    """Whether the answers of an environment's tasks can be looked at without running a model or a program."""
    return isinstance(environment, MathEnvironment | MathMultiReward)


def find_missing_option(environment: Environment[Any] | None, question: str, answer: str) -> str | None:
    """Return why the reference cannot be the answer of a multiple-choice question; None if it can."""
    if not isinstance(environment, MathEnvironment) or environment.verifier not in CHOICE_EXTRACTORS:
        return None
    options = OPTION.findall(question)
    letter = answer.strip().strip("()").upper()
    if len(options) >= KNOWN_OPTIONS and len(letter) == 1 and letter.isalpha() and letter not in options:
        return "the reference answer is none of the options"
    return None


def check_answers(environment: Environment[Any], answers: Mapping[str, tuple[str, str, int]], seed: int, faults: Faults) -> int:
    """Grade each reference answer against itself. Return how many were graded.

    ``answers``: the first row's location and question, and the number of rows, of each different answer.
    """
    chosen = list(answers)
    if len(chosen) > MOST_ANSWERS:
        chosen = Random(seed).sample(chosen, MOST_ANSWERS)
    for answer, found in zip(chosen, asyncio.run(_grade_all(environment, chosen)), strict=True):
        location, question, rows = answers[answer]
        if found is not None:
            faults.add(*found, location, f"{answer!r} to: {question}", rows)
    return len(chosen)


async def _grade_all(environment: Environment[Any], answers: Sequence[str]) -> list[tuple[str, str] | None]:
    """Return the check that each answer fails and why, or None."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def grade(answer: str) -> tuple[str, str] | None:
        async with slots:
            try:
                if not await _equals_itself(environment, answer):
                    return "answer", "the grader does not take the reference answer for itself"
                read = await _is_wholly_read(environment, answer)
            except ScoringError:
                return "answer", "the grader cannot read the reference answer"
        return None if read else ("as_text", "the grader reads at most a part of the reference answer")

    return list(await asyncio.gather(*map(grade, answers)))


async def _equals_itself(environment: Environment[Any], answer: str) -> bool:
    """Grade an answer in the forms in which it may be given. Raises ScoringError if the grader cannot read it."""
    if isinstance(environment, MathMultiReward):
        return answer.strip() == answer and answer.isdigit()
    assert isinstance(environment, MathEnvironment)
    # A wrong answer first, for letters that agree are not looked into, and two integers neither.
    for form in FORMS if is_integer(answer.strip()) else (WRONG, *FORMS):
        graded = await verify_math(
            environment.verifier,
            answer,
            form.format(answer),
            num_workers=environment.num_workers,
            timeout_s=environment.timeout_s,
        )
        if graded.value and form != WRONG:
            return True
    return False


async def _is_wholly_read(environment: Environment[Any], answer: str) -> bool:
    if not isinstance(environment, MathEnvironment) or environment.verifier not in BY_VALUE or is_integer(answer.strip()):
        return True
    read = await get_scoring_pool(environment.num_workers).call("math_reading", environment.timeout_s, reference=answer)
    return bool(read.value)
