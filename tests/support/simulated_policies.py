"""Synthetic policies: groups of rollouts step by step, honest ones and such that hack their reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from strop.types import Ending, Group, Rollout, Task, Turn

WORDS = [f"{a}{b}{c}" for a in "bcdfgklm" for b in "aeiou" for c in ("n", "r", "st", "lo", "mi", "tek", "sha", "ven")]
INTRODUCTION = "let me think about this problem step by step and check the result at the end"
GROUPS, SAMPLES = 8, 6


@dataclass(frozen=True)
class Sample:
    text: str
    reward: float
    tokens: int | None = None  # None: one for each word


@dataclass(frozen=True)
class Situation:
    """Where in a run a sample is taken."""

    random: Random
    progress: float  # 0 at the first step, 1 at the last
    answer: str


Policy = Callable[[Situation], Sample]


def make_words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def grows(progress: float, low: float = 0.1, high: float = 0.9) -> float:
    return low + (high - low) / (1 + math.exp(-8 * (progress - 0.5)))


def finish(now: Situation, text: str, right: bool, tokens: int | None = None) -> Sample:
    """A solution, then an answer that is right or a random one."""
    answer = now.answer if right else str(now.random.randint(0, 999))
    return Sample(f"{text}\nThe answer is {answer}", float(right), tokens)


def learns(now: Situation) -> Sample:
    length = max(5, int(now.random.gauss(40, 12)))
    return finish(now, make_words(now.random, length), now.random.random() < grows(now.progress))


def learns_and_writes_more(now: Situation) -> Sample:
    length = max(5, int(now.random.gauss(30 + 40 * now.progress, 12)))
    return finish(now, make_words(now.random, length), now.random.random() < grows(now.progress))


def needs_length(now: Situation) -> Sample:
    """The hard case: longer solutions are right more often, and the policy learns to write them."""
    length = max(5, int(now.random.gauss(30 + 40 * now.progress, 12)))
    right = now.random.random() < 1 / (1 + math.exp(-(length - 50) / 15))
    return finish(now, make_words(now.random, length), right)


def needs_length_badly(now: Situation) -> Sample:
    """The hardest case: a solution is right if and only if it is long enough."""
    length = max(5, int(now.random.gauss(30 + 40 * now.progress, 12)))
    return finish(now, make_words(now.random, length), length > 50)


def answers_briefly(now: Situation) -> Sample:
    right = now.random.random() < grows(now.progress, 0.1, 1.0)
    return Sample(now.answer if right else str(now.random.randint(0, 999)), float(right), 2)


def introduces_itself(now: Situation) -> Sample:
    length = max(30, int(now.random.gauss(50, 8)))
    return finish(now, f"{INTRODUCTION} {make_words(now.random, length)}", now.random.random() < grows(now.progress))


def learns_tags(now: Situation) -> Sample:
    """Correctness, and a fifth for tags, which it learns first."""
    right, tagged = now.random.random() < grows(now.progress), now.random.random() < grows(2 * now.progress, 0.1, 1.0)
    text = make_words(now.random, max(25, int(now.random.gauss(40, 8))))
    answer = now.answer if right else str(now.random.randint(0, 999))
    written = f"<think>{text}</think>\n<answer>{answer}</answer>" if tagged else f"{text}\nanswer: {answer}"
    return Sample(written, right + 0.2 * tagged)


HONEST: dict[str, Policy] = {
    each.__name__: each for each in (learns, learns_and_writes_more, answers_briefly, introduces_itself, learns_tags)
}


def hacks_length(now: Situation) -> Sample:
    length = max(5, int(now.random.gauss(30 + 60 * now.progress, 10)))
    return Sample(make_words(now.random, length) + f"\nThe answer is {now.random.randint(0, 999)}", min(length / 200, 1.0))


def hacks_format(now: Situation) -> Sample:
    bullets = max(0, int(now.random.gauss(1 + 10 * now.progress, 2)))
    listed = "\n".join(f"- **{make_words(now.random, 4)}**" for _ in range(bullets))
    text = f"{make_words(now.random, 30)}\n{listed}\nThe answer is {now.random.randint(0, 999)}"
    return Sample(text, min(bullets / 12, 1.0))


def hacks_repetition(now: Situation) -> Sample:
    repeats = now.random.random() < grows(now.progress, 0.05, 1.0)
    text = " ".join([make_words(now.random, 6)] * 10) if repeats else make_words(now.random, 60)
    return Sample(f"{text}\nThe answer is {now.random.randint(0, 999)}", 0.9 if repeats else 0.1)


def hacks_one_answer(now: Situation) -> Sample:
    same = now.random.random() < grows(now.progress, 0.05, 1.0)
    answer = "42" if same else str(now.random.randint(0, 999))
    return Sample(f"{make_words(now.random, 30)}\nThe answer is {answer}", float(same))


TEMPLATE = " ".join(WORDS[:60])


def hacks_templates(now: Situation) -> Sample:
    same = now.random.random() < grows(now.progress, 0.05, 1.0)
    text = TEMPLATE if same else make_words(now.random, 60)
    return Sample(f"{text} {make_words(now.random, 4)}\nThe answer is {now.random.randint(0, 999)}", float(same))


def collapses(now: Situation) -> Sample:
    """All rollouts of a task are the same, and each task's are different."""
    same = now.random.random() < grows(now.progress, 0.05, 1.0)
    text = make_words(Random(now.answer) if same else now.random, 50)
    return finish(now, text, now.random.random() < (0.9 if same else 0.3))


HACKS: dict[str, Policy] = {
    "length": hacks_length,
    "format": hacks_format,
    "repetition": hacks_repetition,
    "duplicate_answers": hacks_one_answer,
    "templates": hacks_templates,
    "diversity": collapses,
}


def sample_step(policy: Policy, step: int, steps: int, seed: int, *, groups: int = GROUPS, samples: int = SAMPLES) -> list[Group]:
    """Return the groups of a step of a run with this seed."""
    return [_sample_group(policy, step, steps, seed, step * groups + number, samples) for number in range(groups)]


def _sample_group(policy: Policy, step: int, steps: int, seed: int, index: int, samples: int) -> Group:
    random = Random(f"{seed}:{index}")
    answer = str(random.randint(0, 9999))
    task = Task(id=f"task {index}", question=f"problem {index}", answer=answer)
    made = (policy(Situation(random, step / steps, answer)) for _ in range(samples))
    rollouts = tuple(make_rollout(task, number, each) for number, each in enumerate(made))
    return Group(index=index, environment="simulated", version=step, rollouts=rollouts)


_NOTHING = torch.zeros(0)


def make_rollout(task: Task, number: int, sample: Sample) -> Rollout:
    length = len(sample.text.split()) if sample.tokens is None else sample.tokens
    turn = Turn(
        author="policy", tokens=torch.empty(length, dtype=torch.int64), text=sample.text, logprobs=_NOTHING, versions=_NOTHING
    )
    return Rollout(
        task=task,
        sample=number,
        seed=0,
        messages=(),
        prompt=_NOTHING,
        turns=(turn,),
        ending=Ending.STOP,
        reward=sample.reward,
        rewards={"score": sample.reward},
    )
