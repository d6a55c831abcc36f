"""What is answered: the most frequent final answers, with their counts in steps spread over a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from strop.extensions.watch.final_answers import find_answer, normalize_answer
from strop.safety.printable import make_printable

STEPS = 12
MOST_ANSWERS = 15


class AnsweredSteps(Protocol):
    """What has steps with answers: the rollouts of a run, or its validations."""

    def answered_steps(self) -> Sequence[int]: ...

    def read_answers(self, step: int) -> Iterable[tuple[str, str]]:
        """Return the text and the reference of each rollout; none of a step that cannot be read."""
        ...


def count_answers(source: AnsweredSteps) -> dict[str, Any]:
    """Return ``steps`` [T], the number of rollouts in each, ``totals`` [T], and of each answer its ``counts`` [T] and ``references`` [T],
    how often it would have been right.
    """
    steps = spread(source.answered_steps(), STEPS)
    answers, references = [], []
    for step in steps:
        read = list(source.read_answers(step))
        answers.append(Counter(find_answer(text) for text, _ in read))
        references.append(Counter(normalize_answer(reference) for _, reference in read))
    overall: Counter[str] = sum(answers, Counter())
    rows = [
        {
            "answer": make_printable(answer),
            "counts": [counted[answer] for counted in answers],
            "references": [counted[answer] if answer else 0 for counted in references],
        }
        for answer, _ in overall.most_common(MOST_ANSWERS)
    ]
    return {"steps": steps, "totals": [counted.total() for counted in answers], "distinct": len(overall), "rows": rows}


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the steps: the first, the last and some between."""
    if len(steps) <= count:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (count - 1)] for place in range(count)]
