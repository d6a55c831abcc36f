"""What the detectors see of a step: the finished rollouts of each group, with what their texts say about them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, cast, get_args, get_type_hints

from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.environments.verifier_registry import list_verifiers, make_verifier
from strop.environments.verifiers.base import Score, Verifier, call_score, read_reply
from strop.extensions.watch.final_answers import find_answer
from strop.types import Group, Rollout, Task
from strop.user_code import suggest_names

MOST_WORDS = 600  # of a text, from its end, that are looked at
NGRAM = 4
SHOWN = 5  # rollouts that a reading names
LONG_TEXT = 20  # words from which on the wording of a text says something
GROUPS, SAMPLES = 16, 4  # of a step whose wordings are compared; the others cost time and say little more

_DECORATION = re.compile(r"^\s*(?:#+ |[-*+] |\d+[.)] |>|\|)|\*\*|__|[\u2190-\u2bff\U0001f000-\U0001faff]|!{2,}", re.MULTILINE)


@dataclass(frozen=True)
class RolloutName:
    """Where ``strop rollouts`` shows a rollout."""

    step: int
    task: str
    sample: int


@dataclass(frozen=True)
class GradedRollout:
    """What graders that are never trained on said of a rollout."""

    name: RolloutName
    reward: float  # in [0, 1]
    second: float | None = None
    judged: tuple[float, float] | None = None


@dataclass(frozen=True)
class WatchedRollout:
    step: int
    rollout: Rollout

    @property
    def name(self) -> RolloutName:
        return RolloutName(self.step, self.rollout.task.id, self.rollout.sample)

    @property
    def reward(self) -> float:
        return self.rollout.reward

    @cached_property
    def text(self) -> str:
        return "\n".join(turn.text for turn in self.rollout.turns if turn.sampled)

    @cached_property
    def length(self) -> int:
        return self.rollout.sampled_tokens

    @cached_property
    def words(self) -> list[str]:
        """The last words of the text, in small letters, with every number as 0."""
        tail = self.text[-8 * MOST_WORDS :]
        return re.findall(r"[a-z_\\]+|0", re.sub(r"\d+", "0", tail.lower()))[-MOST_WORDS:]

    @cached_property
    def ngrams(self) -> Counter[int]:
        words = self.words
        return Counter(hash(tuple(words[start : start + NGRAM])) for start in range(len(words) - NGRAM + 1))

    @property
    def is_long(self) -> bool:
        return len(self.words) >= LONG_TEXT

    @cached_property
    def repetition(self) -> float:
        """The share of n-grams that occurred before in the text."""
        total = sum(self.ngrams.values())
        return 1 - len(self.ngrams) / total if total else 0.0

    @cached_property
    def decoration(self) -> float:
        """Headings, bullets, bold, emojis and the like for each word, at most 1."""
        return min(len(_DECORATION.findall(self.text)) / max(len(self.text.split()), 1), 1.0)

    @cached_property
    def answer(self) -> str:
        return find_answer(self.text)


@dataclass(frozen=True)
class WatchedStep:
    """The rollouts of a step that ended without an error, by group."""

    step: int
    groups: tuple[tuple[WatchedRollout, ...], ...]
    graded: tuple[GradedRollout, ...] = ()  # of the step before

    @staticmethod
    def of(step: int, groups: Sequence[Group], graded: Sequence[GradedRollout] = ()) -> WatchedStep:
        watched = (
            tuple(WatchedRollout(step, rollout) for rollout in group.rollouts if rollout.error is None) for group in groups
        )
        return WatchedStep(step, tuple(group for group in watched if group), tuple(graded))

    @cached_property
    def rollouts(self) -> tuple[WatchedRollout, ...]:
        return tuple(rollout for group in self.groups for rollout in group)

    @cached_property
    def rewarded(self) -> tuple[WatchedRollout, ...]:
        """The rollouts in the upper half of the range of the step's rewards, and not worse than the mean of their group."""
        rewards = [rollout.reward for rollout in self.rollouts]
        middle = (min(rewards) + max(rewards)) / 2 if rewards else 0.0
        kept = []
        for group in self.groups:
            mean = sum(rollout.reward for rollout in group) / len(group)
            kept += [rollout for rollout in group if rollout.reward >= max(middle, mean - 1e-9)]
        return tuple(kept)

    @cached_property
    def rewarded_by_task(self) -> tuple[tuple[WatchedRollout, ...], ...]:
        """A few rewarded rollouts of each of a few groups, for comparisons."""
        kept = {id(rollout) for rollout in self.rewarded}
        groups = (tuple(rollout for rollout in group if id(rollout) in kept)[:SAMPLES] for group in self.groups)
        return tuple(group for group in groups if group)[:GROUPS]

    @cached_property
    def some_by_task(self) -> tuple[tuple[WatchedRollout, ...], ...]:
        """A few rollouts, rewarded or not, of each of a few groups."""
        return tuple(group[:SAMPLES] for group in self.groups[:GROUPS])


def pairs_of(group: Sequence[WatchedRollout]) -> Iterator[tuple[WatchedRollout, WatchedRollout]]:
    """Yield the pairs of a group with different rewards, the better one first; of large groups a part."""
    for one, other in combinations(group[:16], 2):
        if one.reward != other.reward:
            yield (one, other) if one.reward > other.reward else (other, one)


HeldOutGrader = Callable[[Task, Rollout], Any]


@dataclass(frozen=True)
class VerifierGrader:
    """A verifier as a grader of a rollout's last turn; the rollout is not changed."""

    verifier: Verifier

    async def __call__(self, task: Task, rollout: Rollout) -> float:
        scored = await call_score(self.verifier, task, read_reply(rollout))
        return float(scored.value if isinstance(scored, Score) else scored)


def make_grader(given: str | Mapping[str, Any], key: str) -> HeldOutGrader:
    """Return the grader configured by a key: ``file.py:function``, a verifier's name, or a mapping of ``verifier`` and
    its options. Raises EnvironmentConfigError."""
    try:
        return _make_grader(given)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"{key}: {error}") from error


def _make_grader(given: str | Mapping[str, Any]) -> HeldOutGrader:
    options = {"function" if ":" in given else "verifier": given} if isinstance(given, str) else dict(given)
    if len({"function", "verifier"} & set(options)) != 1:
        raise EnvironmentConfigError(
            f"a grader is a function or a verifier, and {options} does not name one of them; set verifier"
        )
    name = options.pop("verifier", None)
    if name is not None:
        from strop.extensions.math.math_environment import MathEnvironment

        methods = get_args(get_type_hints(MathEnvironment)["verifier"])
        if name in methods and not options:
            return cast("HeldOutGrader", MathEnvironment(verifier=cast("Any", name)).correct)
        if isinstance(name, str) and ":" not in name and name not in list_verifiers():
            hint = suggest_names(name, (*list_verifiers(), *methods))
            raise EnvironmentConfigError(f"there is no verifier {name!r}{hint}. Name your own function as file.py:function")
        return _grade_with(make_verifier(name, options), name)
    name = options.pop("function")
    grader: Any = import_user_code(name)
    if isinstance(grader, type) and issubclass(grader, Verifier):
        return _grade_with(make_verifier(name, options), name)
    if options:
        raise EnvironmentConfigError(f"the function {name} has no option {next(iter(options))!r}; only verifiers have options")
    if not callable(grader) or isinstance(grader, type):
        raise EnvironmentConfigError(f"{name} is {grader!r:.80}, not a function; it is called with (task, rollout)")
    return cast("HeldOutGrader", grader)


def _grade_with(verifier: Verifier, name: str) -> VerifierGrader:
    if verifier.compares:
        raise EnvironmentConfigError(
            f"the verifier {name} compares the rollouts of a task, and a grader sees one rollout at a time; set another verifier, or "
            "against: reference where it has that"
        )
    return VerifierGrader(verifier)
