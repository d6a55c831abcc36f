"""The samples of one task, and means over tasks: avg@n, pass@k, cons@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is correct (arXiv 2107.03374).

    ``correct`` of the ``samples`` samples are correct. Raises ValueError unless 1 <= k <= ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples per task; k must be between 1 and {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


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


def summarize_results(results: Sequence[TaskResult], ks: Sequence[int], voters: Sequence[int] = ()) -> dict[str, float]:
    """Return means over tasks: accuracy (avg@n), pass@k for each of ``ks``, and cons@k for each of ``voters`` if there are answers."""
    count, samples = len(results), len(results[0].accuracies)
    means = {"accuracy": sum(sum(result.accuracies) / samples for result in results) / count}
    if ks or voters:
        means[f"avg@{samples}"] = means["accuracy"]
    for k in ks:
        means[f"pass@{k}"] = sum(pass_at_k(samples, result.correct, k) for result in results) / count
    if any(answer is not None for result in results for answer in result.answers):
        for k in voters:
            means[f"cons@{k}"] = sum(result.consensus(k) for result in results) / count
    return means
