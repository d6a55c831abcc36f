"""maj@k: the vote of any k samples, in expectation."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.statistics import TaskResult, summarize_results


def vote_of_every_choice(result: TaskResult, k: int) -> float:
    """Count every choice of k samples, ties shared."""
    outcomes = []
    for chosen in itertools.combinations(range(len(result.answers)), k):
        votes = Counter(answer for place in chosen if (answer := result.answers[place]) is not None)
        best = [answer for answer in votes if votes[answer] == max(votes.values())]
        means = [
            [accuracy for accuracy, given in zip(result.accuracies, result.answers, strict=True) if given == answer]
            for answer in best
        ]
        outcomes.append(sum(sum(each) / len(each) for each in means) / len(best) if best else 0.0)
    return sum(outcomes) / len(outcomes)


samples = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8)


@given(samples, st.data())
def test_maj_at_k_is_the_mean_over_all_choices_of_k_samples(answers: list[str | None], data: st.DataObject) -> None:
    accuracies = tuple(float(answer == "a") + 0.5 * (answer == "b") for answer in answers)
    result, k = TaskResult("e", accuracies, tuple(answers)), data.draw(st.integers(1, len(answers)))
    assert result.majority(k) == pytest.approx(vote_of_every_choice(result, k), abs=1e-12)


def test_of_all_samples_cons_is_the_earliest_of_equally_frequent_answers_and_maj_any_of_them() -> None:
    result = TaskResult("e", (1.0, 0.0), ("1", "2"))
    assert (result.consensus(), result.majority(2)) == (1.0, 0.5)
    found = summarize_results([result], (), (2,), (1, 2))
    assert (found["cons@2"], found["maj@1"], found["maj@2"]) == (1.0, 0.5, 0.5)
    assert not any(name.startswith("maj") for name in summarize_results([TaskResult("e", (1.0,), (None,))], (), (1,), (1,)))


@pytest.mark.parametrize("k", [0, 3])
def test_maj_at_k_needs_as_many_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"maj@{k} cannot be estimated from 2 samples"):
        TaskResult("e", (1.0, 0.0), ("1", "2")).majority(k)


def test_the_vote_of_many_samples_is_counted_in_no_time() -> None:
    answers = tuple(str(place % 11) for place in range(128))
    started = time.perf_counter()
    TaskResult("e", tuple(float(answer == "3") for answer in answers), answers).majority(64)
    assert time.perf_counter() - started < 1
