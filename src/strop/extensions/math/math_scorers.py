"""What the processes that score answers load: a function of the arguments of one answer, which returns one that scores it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from strop.environments.scoring.scoring_worker import UnparsableReference
from strop.extensions.math import math_equality
from strop.extensions.math.dapo_verifier import score_dapo
from strop.extensions.math.reported_math import prepare_reported_math

# Scored once before the first fork, so that every child has the parser's tables and SymPy's lazy imports.
WARM_UP = (
    ("\\frac{1}{2}", "0.51"),
    ("2x", "x+x+1"),
    ("x^2", "\\sqrt{x}\\sin(x)"),
    ("(1,2]", "[1,3)"),
    ("\\{1,2\\}", "1,2,3"),
    ("x<3", "x>3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
    ("\\text{even}", "\\text{odd}"),
    ("50\\%", "12 \\text{ cm}"),
    ("2\\pi", "6.28^{\\circ}"),
)


def load_math_verify() -> Callable[..., Callable[[], float]]:
    def prepare(reference: str, answer: str) -> Callable[[], float]:
        def score() -> float:
            if not math_equality.prepare(reference):
                raise UnparsableReference(f"the reference answer {reference!r:.200} cannot be parsed")
            return math_equality.score_reply(reference, answer)

        return score

    for reference, answer in WARM_UP:
        prepare(reference, f"\\boxed{{{answer}}}")()
    prepare("1", "It is 2")()
    return prepare


def load_reported_math() -> Callable[..., Callable[[], float]]:
    for reference, answer in WARM_UP:
        prepare_reported_math("boxed", reference, answer)()
    return prepare_reported_math


def load_dapo() -> Callable[..., Callable[[], float]]:
    return lambda reference, answer: partial(score_dapo, reference, answer)
