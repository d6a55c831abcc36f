"""The metrics of tasks from the results of their samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is correct (arXiv 2107.03374).

    ``correct`` of the ``samples`` samples are correct. Raises ValueError unless 1 <= k <= ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples per task; k must be between 1 and {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def present_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stored tasks with those of their samples that have an accuracy, without tasks that have no such sample.

    A sample that failed by no fault of the policy has none: it is missing, and no zero.
    """
    present = [{**task, "samples": [each for each in task["samples"] if each["accuracy"] is not None]} for task in tasks]
    return [task for task in present if task["samples"]]


@dataclass(frozen=True)
class TaskResult:
    """The accuracy and the answer of each sample of one task."""

    environment: str
    accuracies: tuple[float, ...]
    answers: tuple[str | None, ...]  # None: no answer to vote on

    @property
    def correct(self) -> int:
        return sum(accuracy >= 1 for accuracy in self.accuracies)

    def consensus(self, voters: int | None = None) -> float:
        """Return the accuracy of the most frequent answer among the first ``voters`` samples (None: all). The earlier answer wins a tie.

        0 if no sample has an answer.
        """
        votes = Counter(answer for answer in self.answers[:voters] if answer is not None)
        if not votes:
            return 0.0
        return self.accuracies[self.answers.index(votes.most_common(1)[0][0])]

    def majority(self, k: int) -> float:
        """Return the expected accuracy of the most frequent answer among k samples drawn from all without replacement, with ties
        broken at random. The mean over all choices of k samples is unbiased for k new samples.

        0 for a choice in which no sample has an answer.
        """
        if not 1 <= k <= len(self.answers):
            raise ValueError(f"maj@{k} cannot be estimated from {len(self.answers)} samples per task")
        votes = Counter(answer for answer in self.answers if answer is not None)
        counts, silent = tuple(sorted(votes.values())), len(self.answers) - votes.total()
        total = 0.0
        for answer, count in votes.items():
            accuracies = [each for each, given in zip(self.accuracies, self.answers, strict=True) if given == answer]
            if any(accuracies):
                total += math.fsum(accuracies) / count * float(_chance_of_majority(count, counts, silent, k))
        return total


@lru_cache(maxsize=65_536)
def _chance_of_majority(own: int, counts: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Return the probability that an answer given by ``own`` samples wins the vote of k samples, ties broken at random.

    ``counts``: of all answers, including this one. ``silent``: samples without an answer.
    """
    others = list(counts)
    others.remove(own)
    ways = Fraction(0)
    for votes in range(1, min(own, k) + 1):
        free = silent + sum(count for count in others if count < votes)  # that cannot have as many votes
        # (samples drawn, answers with the same number of votes) -> number of choices
        drawn: dict[tuple[int, int], int] = {(0, 0): 1}
        for count in (each for each in others if each >= votes):
            following: dict[tuple[int, int], int] = {}
            for (used, ties), choices in drawn.items():
                for number in range(min(votes, k - votes - used) + 1):
                    key = used + number, ties + (number == votes)
                    following[key] = following.get(key, 0) + choices * math.comb(count, number)
            drawn = following
        for (used, ties), choices in drawn.items():
            ways += Fraction(math.comb(own, votes) * choices * math.comb(free, k - votes - used), ties + 1)
    return ways / math.comb(sum(counts) + silent, k)


def summarize_results(
    results: Sequence[TaskResult],
    ks: Sequence[int],
    voters: Sequence[int] = (),
    majorities: Sequence[int] = (),
    *,
    samples: int | None = None,
) -> dict[str, float]:
    """Return means over tasks: accuracy (avg@n), pass@k for each of ``ks``, and, if there are answers, cons@k for each of ``voters`` and
    maj@k for each of ``majorities``.

    ``samples``: n, if samples may be missing. Tasks that have fewer than k are then left out of pass@k and maj@k, and a mean over no task
    is no metric.
    """
    if not results:
        return {}
    samples = samples or len(results[0].accuracies)
    means = {"accuracy": _mean([sum(result.accuracies) / len(result.accuracies) for result in results])}
    if ks or voters:
        means[f"avg@{samples}"] = means["accuracy"]
    for k in ks:
        drawn = [each for each in results if len(each.accuracies) >= k or k > samples]
        means |= {f"pass@{k}": _mean([pass_at_k(len(each.accuracies), each.correct, k) for each in drawn])} if drawn else {}
    if any(answer is not None for result in results for answer in result.answers):
        for k in voters:
            means[f"cons@{k}"] = _mean([result.consensus(k) for result in results])
        for k in majorities:
            drawn = [each for each in results if len(each.answers) >= k or k > samples]
            means |= {f"maj@{k}": _mean([each.majority(k) for each in drawn])} if drawn else {}
    return means


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
