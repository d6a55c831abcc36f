"""Episodes without a model: the policy writes texts that were given, one in each turn, the last of them in all that follow."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from strop.endings import Ending
from strop.environments.base import Environment
from strop.environments.compute_rewards import compute_group_rewards
from strop.environments.handle import LocalEnvironment
from strop.environments.policy_client import serve_policy
from strop.environments.rewards import RewardResult
from strop.extensions.checks.task_checks import CheckedTask, EnvironmentReport, PolicyScore, find_common_answer
from strop.safety.exits import contain_exits
from strop.types import Messages, Rollout, Task, Turn, assistant, observation_turn
from strop.user_code import describe_error

CHARACTERS_PER_TOKEN = 4
LIMIT_S = 60.0  # of an episode

Script = str | Sequence[str]  # what the policy writes in every turn, or in each


@dataclass(frozen=True)
class PlayedEpisode:
    """What an environment did with a text."""

    rollout: Rollout
    script: Script
    responses: tuple[tuple[tuple[str, str], ...] | None, ...] = ()  # role and content after each turn; None: it ended
    result: RewardResult | None = None
    accuracy: float = 0.0
    error: str | None = None

    @property
    def reward(self) -> float:
        return 0.0 if self.result is None else self.result.reward


def make_turn(text: str) -> Turn:
    """Return a turn of the policy with as many tokens as a tokenizer would make of the text, roughly."""
    length = -(-len(text) // CHARACTERS_PER_TOKEN) + 1  # and the end of the turn
    return Turn(
        author="policy",
        tokens=torch.arange(length),
        text=text,
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


async def play(environment: Environment[Any], task: Task, script: Script, *, max_turns: int, sample: int = 0) -> PlayedEpisode:
    """Play one episode, its rewards included. An error is returned, not raised."""
    rollout = Rollout(task=task, sample=sample, seed=sample, messages=(), prompt=torch.zeros(1, dtype=torch.int64))
    texts = (script,) if isinstance(script, str) else tuple(script)
    episode = _Episode(LocalEnvironment(environment), rollout, texts, max_turns)
    try:
        with contain_exits(), serve_policy(_SamePolicy(texts[-1])):
            return await asyncio.wait_for(episode.run(), LIMIT_S)
    except Exception as error:
        late = isinstance(error, TimeoutError) and not str(error)
        said = f"the episode did not end within {LIMIT_S:g} s" if late else describe_error(error)
        return PlayedEpisode(episode.rollout, script, tuple(episode.responses), error=said)


@dataclass(frozen=True)
class _SamePolicy:
    """The policy as an opponent of itself: it writes the same text."""

    text: str
    version: int = 0

    def past(self, share: float) -> _SamePolicy:
        return self

    def named(self, name: str) -> _SamePolicy:
        return self

    async def complete(self, messages: Messages, *, seed: int, stop_strings: Sequence[str] = ()) -> str:
        return self.text


class _Episode:
    def __init__(self, environment: LocalEnvironment[Any], rollout: Rollout, texts: tuple[str, ...], max_turns: int) -> None:
        self.environment, self.rollout, self.texts, self.max_turns = environment, rollout, texts, max_turns
        self.responses: list[tuple[tuple[str, str], ...] | None] = []

    async def run(self) -> PlayedEpisode:
        environment, task = self.environment, self.rollout.task
        played: PlayedEpisode | None = None
        async with environment.open(task):
            messages = tuple(await environment.prompt(task))
            self.rollout = replace(self.rollout, messages=messages, prompt=torch.arange(_count_tokens(messages)))
            while self.rollout.ending is None:
                await self._take_turn()
            result = await environment.score(task, self.rollout)
            self.rollout = replace(self.rollout, reward=result.reward, rewards=result.rewards, step_rewards=result.step_rewards)
            accuracy = (await environment.grade(task, self.rollout)).accuracy
            played = PlayedEpisode(self.rollout, self.texts, tuple(self.responses), result, accuracy)
        if played is None:
            raise RuntimeError(f"{environment.traits.title}.session swallowed an exception")
        return played

    async def _take_turn(self) -> None:
        text = self.texts[min(len(self.rollout.policy_turns), len(self.texts) - 1)]
        self.rollout = self.rollout.with_turn(make_turn(text), assistant(text))
        answer = await self.environment.respond(self.rollout.task, self.rollout)
        self.responses.append(None if answer is None else tuple((message.role, message.content) for message in answer))
        if answer is None:
            self.rollout = replace(self.rollout, ending=Ending.STOP)
        elif len(self.rollout.policy_turns) >= self.max_turns:
            self.rollout = replace(self.rollout, ending=Ending.TURNS)
        else:
            joined = "\n".join(message.content for message in answer)
            self.rollout = self.rollout.with_turn(observation_turn(list(range(_count_tokens(answer))), joined), *answer)


def _count_tokens(messages: Messages) -> int:
    return 1 + sum(len(message.content) for message in messages) // CHARACTERS_PER_TOKEN


AnswerForm = Callable[[str], str]
ANSWER_FORMS: Mapping[str, AnswerForm] = {
    "plain": lambda answer: answer,
    "sentence": lambda answer: f"The answer is {answer}.",
    "boxed": lambda answer: f"The answer is \\boxed{{{answer}}}",
    "Answer:": lambda answer: f"Answer: {answer}",
    "tags": lambda answer: f"<think>I know it.</think>\n<answer>{answer}</answer>",
    "####": lambda answer: f"I know it.\n#### {answer}",
    "code block": lambda answer: f"```\n{answer}\n```",
    "python block": lambda answer: f"```python\n{answer}\n```",
}
NONSENSE = (
    "lantern", "copper", "gently", "whistle", "the", "under", "seventeen", "orbit", "mosaic", "quickly", "because", "river", "pickle",
    "sideways", "a", "velvet", "thunder", "button", "maybe", "elephant", "cloud", "triangle", "of", "drizzle", "7", "pebble", "31",
    "harbour", "waffle",
)  # fmt: skip
LONGEST = 20_000  # characters


def make_nonsense(key: str, words: int) -> str:
    """Return random words that depend only on ``key``."""
    random = Random(key)
    return " ".join(random.choice(NONSENSE) for _ in range(words))


def make_ignorant_texts(task: Task, prompt: str, form: AnswerForm, *, longest: int, common_answer: str | None) -> dict[str, str]:
    """Return texts that can be written without knowing the answer. ``longest``: characters of the longest one."""
    length = max(min(longest, LONGEST), 1)
    texts = {
        "empty": "",
        "white space": " \n\t ",
        "prompt repeated": prompt,
        "0": "0",
        "0, in the answer's form": form("0"),
        "1": "1",
        "1, in the answer's form": form("1"),
        "all numbers to 100": " ".join(map(str, range(101))),
        "all choices": "A B C D E",
        "all choices, formatted": form("A, B, C, D"),
        "yes and no": "Yes, no. True, false.",
        "the longest possible": ("and so on " * (length // 10 + 1))[:length],
        "random words": make_nonsense(task.id, 60),
        "form without content": form(""),
        "refusal": "I'm sorry, but I can't help with that.",
    }
    if common_answer is not None:
        texts["the commonest answer"] = form(common_answer)
    return texts


def make_hedged_text(task: Task, form: AnswerForm, others: Sequence[str]) -> str | None:
    """Return the right answer among wrong ones, as a policy can write that guesses many; None if too few others are known."""
    wrong = [answer for answer in dict.fromkeys(others) if answer.strip() and answer.strip() != task.answer.strip()]
    if len(wrong) < 2:
        return None
    half = min(len(wrong) // 2, 4)
    return " or ".join(form(answer) for answer in (*wrong[:half], task.answer, *wrong[half : 2 * half]))


def make_padded_texts(task: Task, form: AnswerForm) -> dict[str, str]:
    """Return right answers in clothes that should earn nothing more."""
    return {
        "answer, then nonsense": f"{form(task.answer)}\n\n{make_nonsense(task.id, 40)}",
        "answer, said in many ways": "\n".join(other(task.answer) for other in (*ANSWER_FORMS.values(), form)),
    }


TURNS = "turn by turn"  # the form of a reference that the environment itself knows
NEAR_MAXIMUM = 0.9  # of the best score: what the reference answer should reach
STANDARD_ERRORS = 2.6  # between a mean and its lower confidence limit


@dataclass(frozen=True)
class ScoringLimits:
    """What a check of rewards is measured against."""

    max_turns: int
    longest: int  # characters that a policy may write
    bound: float = 0.5  # of the reference's score, above which an answer without knowledge is a fault
    budget_seconds: float = 30.0  # for scoring; at least four tasks are scored


@dataclass
class ScoredTexts:
    """The episodes of every policy, by task."""

    form: str | None = None  # of ``ANSWER_FORMS``, in which the reference answer scores best
    played: dict[str, dict[int, PlayedEpisode]] = field(default_factory=dict)  # policy -> index of the task -> episode

    def mean(self, policy: str, of: Callable[[PlayedEpisode], float]) -> float:
        values = [of(episode) for episode in self.played.get(policy, {}).values() if episode.error is None]
        return math.fsum(values) / len(values) if values else 0.0


class RewardChecker:
    """Scores made-up texts for the tasks of one environment."""

    def __init__(
        self, environment: Environment[Any], tasks: Sequence[CheckedTask], limits: ScoringLimits, report: EnvironmentReport
    ) -> None:
        self.environment, self.tasks, self.limits, self.report = environment, tasks, limits, report
        self.texts = ScoredTexts()

    async def check(self) -> None:
        """Score all texts, then look at them from all sides."""
        await self._score_references()
        await self._score_others()
        self._check_errors()
        self._check_reference()
        self._check_degenerate()
        await self._check_deterministic()

    def _form(self) -> AnswerForm:
        return ANSWER_FORMS.get(self.texts.form or "plain", ANSWER_FORMS["plain"])

    async def _score_references(self) -> None:
        turns = {each.index: tuple(self.environment.reference_turns(each.task)) for each in self.tasks}
        if any(turns.values()):
            await self._score_turns(turns)
            return
        known = [each for each in self.tasks if each.has_answer]
        if not known:
            self.report.not_checked["reference"] = "the tasks have no reference answers (task.answer)"
            return
        await self._score(
            known, lambda each: {f"reference, {name}": form(each.task.answer) for name, form in ANSWER_FORMS.items()}
        )
        means = {name: self.texts.mean(f"reference, {name}", lambda episode: episode.reward) for name in ANSWER_FORMS}
        self.texts.form = max(means, key=lambda name: means[name])

    async def _score_turns(self, turns: Mapping[int, Sequence[str]]) -> None:
        """Play the turns that the environment knows, where there are as many as an episode may have."""
        limit = self.limits.max_turns
        if long := [index for index, each in turns.items() if len(each) > limit]:
            self.report.note(
                "reference",
                f"{len(long)} of {len(turns)} tasks take more than max_rollout_turns={limit} turns to solve (the first: task {long[0]})",
            )
        known = [each for each in self.tasks if 0 < len(turns[each.index]) <= limit]
        if known:
            await self._score(known, lambda each: {f"reference, {TURNS}": turns[each.index]})
            self.texts.form = TURNS
        else:
            self.report.fault("reference", f"no task can be solved within max_rollout_turns={limit}; set it higher")

    async def _score_others(self) -> None:
        form, common = self._form(), find_common_answer(self.tasks)
        answers = [each.task.answer for each in self.tasks]

        def write(each: CheckedTask) -> dict[str, Script]:
            texts: dict[str, Script] = {}
            texts |= make_ignorant_texts(each.task, each.prompt, form, longest=self.limits.longest, common_answer=common)
            if self.texts.form in (None, TURNS) or not each.has_answer:
                return texts
            start = each.index % len(answers)
            hedged = make_hedged_text(each.task, form, [*answers[start:], *answers[:start]])
            texts |= {} if hedged is None else {"the answer among wrong ones": hedged}
            return texts | make_padded_texts(each.task, form)

        await self._score(self.tasks, write)

    async def _score(self, tasks: Sequence[CheckedTask], write: Callable[[CheckedTask], Mapping[str, Script]]) -> None:
        started = time.monotonic()
        for number, each in enumerate(tasks):
            if number >= 4 and time.monotonic() - started > self.limits.budget_seconds:
                return
            texts = write(each)
            episodes = await asyncio.gather(*(self._play(each, script, sample) for sample, script in enumerate(texts.values())))
            episodes = await self._with_group_rewards(each, episodes)
            for policy, episode in zip(texts, episodes, strict=True):
                self.texts.played.setdefault(policy, {})[each.index] = episode

    async def _play(self, each: CheckedTask, script: Script, sample: int = 0) -> PlayedEpisode:
        return await play(self.environment, each.task, script, max_turns=self.limits.max_turns, sample=sample)

    async def _with_group_rewards(self, each: CheckedTask, episodes: list[PlayedEpisode]) -> list[PlayedEpisode]:
        """Add the rewards of the group, to which all episodes of the task belong."""
        valid = [episode for episode in episodes if episode.error is None]
        if not any(each.mark.group for each in self.environment.reward_functions.values()) or not valid:
            return episodes
        try:
            results = await compute_group_rewards(self.environment, each.task, [episode.rollout for episode in valid])
        except Exception as error:
            failed = describe_error(error)
            return [replace(episode, error=episode.error or failed) for episode in episodes]
        scored = {id(episode): result for episode, result in zip(valid, results, strict=True)}
        return [replace(episode, result=scored.get(id(episode), episode.result)) for episode in episodes]

    def _check_errors(self) -> None:
        for policy, episodes in self.texts.played.items():
            failed = [(index, episode.error) for index, episode in episodes.items() if episode.error is not None]
            if failed:
                index, error = failed[0]
                self.report.fault(
                    "reward_errors",
                    f"{len(failed)} of {len(episodes)} episodes fail where the policy writes: {policy} (task {index}): {error}; groups "
                    "with such a rollout would be dropped",
                )

    def _check_reference(self) -> None:
        if self.texts.form is None:
            return
        references = [episodes for policy, episodes in self.texts.played.items() if policy.startswith("reference, ")]
        by_task = {index: max(episodes[index].reward for episodes in references if index in episodes) for index in references[0]}
        values = [episode.reward for episodes in self.texts.played.values() for episode in episodes.values()]
        nonsense = self.texts.mean("random words", lambda episode: episode.reward)
        best = max(by_task.values())
        bounded = all(0 <= value <= max(1.0, best) for value in values)
        low = [index for index, value in by_task.items() if value < NEAR_MAXIMUM * best]
        mean = math.fsum(by_task.values()) / len(by_task)
        if mean <= nonsense:
            self.report.fault(
                "reference",
                f"the reference answer scores {mean:.3g}, random words {nonsense:.3g}: the reward does not know its own answers, however "
                "they are written",
            )
        elif bounded and low:
            tasks = ", ".join(str(index) for index in low[:3])
            self.report.fault(
                "reference",
                f"the reference answer of {len(low)} of {len(by_task)} tasks scores low (tasks {tasks}), as if it were wrong",
            )

    def _check_degenerate(self) -> None:
        """Judge every text by the reference's mean score, or by 1 where rewards lie in [0, 1] and there is no reference."""
        reference = f"reference, {self.texts.form}"
        scale = self.texts.mean(reference, lambda episode: episode.reward)
        values = [
            episode.reward for episodes in self.texts.played.values() for episode in episodes.values() if episode.error is None
        ]
        if self.texts.form is None:
            scale = 1.0 if values and all(0 <= value <= 1 for value in values) else 0.0
            if not scale:
                self.report.not_checked["degenerate"] = (
                    "without reference answers and with rewards outside of [0, 1], no score is too high"
                )
        for policy in self.texts.played:
            if policy.startswith("reference, ") and policy != reference:
                continue
            flagged = scale > 0 and policy != reference and self._judge(policy, scale)
            reward, accuracy = (self.texts.mean(policy, of) for of in (lambda each: each.reward, lambda each: each.accuracy))
            self.report.scores.append(PolicyScore(policy, reward, accuracy, len(self.texts.played[policy]), flagged))

    def _judge(self, policy: str, scale: float) -> bool:
        """Return whether a text scores too high, and say so."""
        rewards = [episode.reward / scale for episode in self.texts.played[policy].values() if episode.error is None]
        if not rewards:
            return False
        mean, lower = math.fsum(rewards) / len(rewards), lower_limit(rewards)
        padded = policy in ("answer, then nonsense", "answer, said in many ways")
        bound = 1.05 if padded else self.limits.bound
        if lower <= bound:
            if policy == "answer, then nonsense" and lower > NEAR_MAXIMUM:
                self.report.note("degenerate", "nonsense after the right answer costs nothing")
            return False
        of_reference = "" if self.texts.form is None else f" of what the reference answer gives ({scale:.3g})"
        message = f"{policy!r} scores {mean:.0%}{of_reference}"
        accuracy = lower_limit([episode.accuracy for episode in self.texts.played[policy].values()])
        if self.environment.declares_accuracy and accuracy <= bound and lower < NEAR_MAXIMUM and not padded:
            self.report.note("degenerate", f"{message}, and is not counted as right")
            return False
        self.report.fault("degenerate", f"{message}; a policy finds that")
        return True

    async def _check_deterministic(self) -> None:
        """Play the same texts again: one after another in reverse order, and all at once; with other global random states."""
        chosen = self._choose_episodes(24)
        state = random.getstate()
        try:
            random.seed(77)
            again = [await self._play(each, episode.script, episode.rollout.sample) for each, episode in reversed(chosen)][::-1]
            random.seed(78)
            at_once = await asyncio.gather(
                *(self._play(each, episode.script, episode.rollout.sample) for each, episode in chosen)
            )
        finally:
            random.setstate(state)
        for how, repeated in (("again, in reverse order", again), ("concurrently", at_once)):
            pairs = zip((episode for _, episode in chosen), repeated, strict=True)
            different = [(one, two) for one, two in pairs if self._outcome(one) != self._outcome(two)]
            if different:
                one, two = different[0]
                self.report.fault(
                    "reward_deterministic",
                    f"{len(different)} of {len(chosen)} episodes have another reward, or other answers of respond, when played {how}: "
                    f"{one.reward:.6g}, then {two.reward:.6g} (task {one.rollout.task.id!r}); what respond knows must come from the "
                    "task, the rollout and the session",
                )
                return

    def _outcome(self, episode: PlayedEpisode) -> tuple[object, ...]:
        """Return what is the same whenever it is played: without rewards of the group, which other rollouts determine."""
        if episode.result is None:
            return (episode.responses, episode.error is not None)
        groups = {name for name, each in self.environment.reward_functions.items() if each.mark.group}
        rewards = sorted((name, value) for name, value in episode.result.rewards.items() if name not in groups)
        return (episode.responses, *rewards)

    def _choose_episodes(self, count: int) -> list[tuple[CheckedTask, PlayedEpisode]]:
        """Choose scored episodes of different policies and tasks."""
        by_index = {each.index: each for each in self.tasks}
        policies = [list(episodes.items()) for episodes in self.texts.played.values() if episodes]
        chosen = []
        for number in range(max(map(len, policies), default=0)):
            chosen += [
                (by_index[episodes[number][0]], episodes[number][1])
                for episodes in policies[number % 2 :: 2]
                if number < len(episodes)
            ]
            if len(chosen) >= count:
                break
        return chosen[:count]


def lower_limit(values: Sequence[float]) -> float:
    """Return a lower confidence limit of the mean that is not exact even where all values are equal."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / count
    return mean - STANDARD_ERRORS * math.sqrt((variance + 0.25 / count) / count)
